"""What crosses from one process to another is spelled in `sgl_ext/wire` alone."""

from __future__ import annotations

from pathlib import Path

import sgl_ext
from sgl_ext.wire import events, orders, probes
from sgl_ext.wire.headers import INTERNAL_HEADERS

SOURCES = Path(sgl_ext.__file__).parent
NAMES = (
    *INTERNAL_HEADERS,
    probes.SETTINGS_HEADER,
    probes.RANKS_HEADER,
    probes.ROLE_HEADER,
    probes.WORK_PATH,
    orders.SETTINGS_PATH,
    events.EVENTS_PATH,
    events.SUBSCRIBERS_PATH,
)


def test_no_other_module_spells_a_header_or_a_path() -> None:
    literals = {f'"{name}"' for name in NAMES}
    others = [path for path in SOURCES.rglob("*.py") if path.parent.name != "wire"]
    assert len(others) > 100
    spelled = [
        (path.relative_to(SOURCES), literal)
        for path in others
        for text in [path.read_text()]
        for literal in literals
        if literal in text
    ]
    assert spelled == []
