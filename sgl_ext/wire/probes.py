"""How an engine answers its balancer's probes.

GET /ready         200: it takes requests; 503: not now; 504: a process of it was stopped.
                   Its headers say what the engine is, as a `ProbeAnswer`
GET /sgl_ext/work  signs of whether a silent engine works (`scheduler.silence`)
"""

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from scheduler.silence import Signs

READY_PATH, WORK_PATH = "/ready", "/sgl_ext/work"
# The number of its version of changed settings, how many data-parallel ranks it has, and with
# prefill and decode engines what it does.
SETTINGS_HEADER = "x-sgl-ext-settings"
RANKS_HEADER = "x-sgl-ext-ranks"
ROLE_HEADER = "x-sgl-ext-role"


class ProbeAnswer(NamedTuple):
    """What an engine says of itself with each answer to a readiness probe.

    settings_number: of its version of changed settings; None if it has no sgl-ext, or another
        version of it. ranks: how many data-parallel ranks it has. role: `prefill PORT`, `decode`,
        or "" for an engine that does both.
    """

    settings_number: int | None
    ranks: int | None = 1
    role: str = ""


def probe_headers(said: ProbeAnswer) -> dict[str, str]:
    """The headers of such an answer."""
    headers = {
        SETTINGS_HEADER: str(said.settings_number),
        RANKS_HEADER: str(said.ranks),
    }
    return headers | {ROLE_HEADER: said.role} if said.role else headers


def read_probe(headers: Mapping[str, str]) -> ProbeAnswer:
    """What such an answer says; None for a number that it does not state."""
    number, ranks = _number(headers, SETTINGS_HEADER), _number(headers, RANKS_HEADER)
    return ProbeAnswer(number, ranks, headers.get(ROLE_HEADER, ""))


def _number(headers: Mapping[str, str], name: str) -> int | None:
    text = headers.get(name, "")
    return int(text) if text.isascii() and text.isdecimal() else None


def encode_signs(signs: Signs) -> bytes:
    """The body of an answer about its work."""
    return msgspec.json.encode(signs)


def read_signs(answer: bytes) -> Signs:
    """Raises msgspec.MsgspecError if it is malformed."""
    return msgspec.json.decode(answer, type=Signs)
