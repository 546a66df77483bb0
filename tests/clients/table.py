"""What tests measure of each client, for `python -m docs.clients_table`."""

from __future__ import annotations

import json
from typing import Any

from sgl_ext_cpu.node import ROOT

from tests.clients.agents import Turn
from tests.clients.install import version

_MEASURED = ROOT / ".run" / "clients"


def note(client: str, protocol: str, **measured: Any) -> None:
    """Notes fields of the row of a client and a protocol. Fields of several notes add up."""
    _MEASURED.mkdir(parents=True, exist_ok=True)
    row = {"client": client, "version": version(client), "protocol": protocol, **measured}
    name = f"{client} {protocol} {' '.join(measured)}".replace("/", "-")
    (_MEASURED / f"{name}.json").write_text(json.dumps(row))


def share(turn: Turn) -> float:
    """The part of a prompt that was read from the cache, in percent."""
    return round(100 * turn.cached_tokens / turn.prompt_tokens, 1)
