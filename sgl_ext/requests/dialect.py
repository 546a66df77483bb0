"""What harnesses send and SGLang refuses, or drops unheard, said in words that it knows.

    body as sent --> translate --> body for SGLang's own validation and conversion
                         |
                         +--> what was told otherwise or left out, and how often: a metric

By the documented meaning of each protocol's fields, as far as an engine can have it: what runs
on a vendor's own servers is left out, what the client runs is offered as a plain tool, what
cannot be shown is named in its place. What is wrong in itself stays, and is refused by SGLang.
A body that needs nothing is handed back as it is; the one given is never changed. To translate
twice is to translate once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from sgl_ext.requests.dialects import chat, messages, responses
from sgl_ext.requests.dialects.parts import Model, Told

_PROTOCOLS: dict[str, Callable[[dict[str, Any], Model, Told], dict[str, Any]]] = {
    "/v1/messages": messages.translate,
    "/v1/messages/count_tokens": messages.translate,
    "/v1/chat/completions": chat.translate,
    "/v1/responses": responses.translate,
}
PATHS = frozenset(_PROTOCOLS)


class Translated(NamedTuple):
    """A body for SGLang, and how often what of the one sent was translated or left out."""

    body: Any
    told: Mapping[str, int]


def translate(path: str, body: Any, model: Model) -> Translated:
    """The body that SGLang gets for one that a client posted to `path`. Never raises."""
    protocol = _PROTOCOLS.get(path)
    if protocol is None or not isinstance(body, dict):
        return Translated(body, {})
    told: Told = Counter()
    return Translated(protocol(body, model, told), told)
