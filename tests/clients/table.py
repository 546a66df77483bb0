"""What tests measure of each client, for `python -m docs.clients_table`."""

from __future__ import annotations

import json
from typing import Any

from sgl_ext_cpu.node import ROOT

from tests.clients.agents import Turn
from tests.clients.install import version

_MEASURED = ROOT / ".run" / "clients"


def note(client: str, protocol: str, second: Turn | None = None, **measured: Any) -> None:
    """Notes fields of the row of a client and a protocol. Fields of several notes add up.

    second: the first request of the client's second session.
    """
    if second:
        share = round(100 * second.cached_tokens / second.prompt_tokens, 1)
        measured = {"share": share, "tokens": second, **measured}
    _MEASURED.mkdir(parents=True, exist_ok=True)
    row = {"client": client, "version": version(client), "protocol": protocol, **measured}
    name = f"{client} {protocol} {' '.join(measured)}".replace("/", "-")
    (_MEASURED / f"{name}.json").write_text(json.dumps(row))
