"""No field of an SDK's request is ignored without a reason that is written down."""

from __future__ import annotations

import pytest

from docs.request_fields.__main__ import read_schemas
from docs.request_fields.observed import Observer
from docs.request_fields.states import REFUSED, UNKNOWN, Notes, states_of

pytestmark = pytest.mark.long


async def test_every_field_is_acted_on_or_refused_by_name_or_harmless_for_a_reason() -> None:
    observer = Observer()
    for about in read_schemas().values():
        for path, document in about["schemas"].items():
            states = await states_of(observer, path, document, Notes(path))
            assert not [state.name for state in states if state.state == UNKNOWN]
            assert len(states) > 100
            for state in states:
                if state.state == REFUSED:
                    assert any(name in state.text for name in state.way), state
