"""No field of a completion is ignored without a reason that is written down."""

from __future__ import annotations

from docs.request_fields import sdks
from docs.request_fields.observed import Observer
from docs.request_fields.states import ACTS, REFUSED, UNKNOWN, Notes, states_of


async def test_every_field_of_a_completion_is_acted_on_or_refused_or_harmless() -> None:
    path = sdks.COMPLETIONS
    document = sdks.read_sdk("openai", (path,))["schemas"][path]
    notes = Notes(path)
    states = {each.name: each for each in await states_of(Observer(), path, document, notes)}
    assert not [name for name, each in states.items() if each.state == UNKNOWN]
    assert not notes.unused
    refused = {name for name, each in states.items() if each.state == REFUSED}
    assert refused == {"request.suffix", "request.best_of"}
    assert all(name.rpartition(".")[2] in states[name].text for name in refused)
    assert states["request.echo"].state == ACTS
