"""Whom sgl-ext is compared with, and the README's table of three comparisons."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bench.report.tables import Figures, look, shown


@dataclass(frozen=True)
class Peer:
    """key: under which the document has its version."""

    key: str
    name: str
    what: str


PEERS = (
    Peer("sglang", "SGLang", "the engine without our plugin, and with its own caches"),
    Peer("sglang-router", "sglang-router", "SGLang's router, cache-aware"),
    Peer("smg", "smg", "a gateway for engines, with several policies"),
    Peer("vllm-router", "vllm-router", "vLLM's router, sticky sessions"),
    Peer("nginx", "nginx", "a plain proxy: it chooses nothing"),
    Peer("ai-dynamo-runtime", "Dynamo", "the prefix index of its KV router"),
)


Paths = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class _Line:
    """theirs and ours: where each figure of a cell is in the step's."""

    what: str
    against: str
    step: str
    theirs: Paths
    ours: Paths


def _of_size(arm: str) -> Paths:
    return (("/v1/messages", "52000", arm, "ttft_ms"),)


def _beside_batch(arm: str) -> Paths:
    return (("memory", "arms", arm, "interactive", "ttft_p50_ms"),)


_LINES = (
    _Line(
        "TTFT of a cached turn of 52K tokens, ms",
        "SGLang",
        "warm_turn",
        _of_size("stock"),
        _of_size("ours"),
    ),
    _Line(
        "TTFT with a line that changes at token 0, ms",
        "SGLang",
        "header_strip",
        (("by_length", "52000", "stock_ms"),),
        (("by_length", "52000", "ours_ms"),),
    ),
    _Line(
        "TTFT p50 beside a batch larger than memory, ms",
        "SGLang, priority scheduling",
        "priority",
        _beside_batch("stock_priority"),
        _beside_batch("ours"),
    ),
)


def peer_rows(found: Mapping[str, Figures | str]) -> list[tuple[str, str, str, str]]:
    """What was measured, against whom, their figure and ours. found: by step, or how it ended."""
    return [
        (line.what, line.against, _cell(ended, line.theirs), _cell(ended, line.ours))
        for line in _LINES
        for ended in [found.get(line.step, "not run")]
    ]


def _cell(figures: Any, paths: Paths) -> str:
    if isinstance(figures, str):
        return figures
    cells = [shown(look(figures, *path)) for path in paths]
    return cells[0] if len(set(cells)) == 1 else " / ".join(cells)


def peer_versions() -> dict[str, str]:
    """The version of each peer that the benches use; nginx only if it is there."""
    from bench.index import DYNAMO, DYNAMO_VERSION
    from bench.lib.other_routers import nginx_version, router_versions

    versions = {**router_versions(), DYNAMO: DYNAMO_VERSION}
    nginx = nginx_version()
    return {**versions, **({"nginx": nginx} if nginx else {})}
