"""Engines that the steps of a report share: one group of arms, started at the same time.

    wide           a large cache and 32 slots, for what is about speed
    narrow         few slots and a small cache, for preemption and eviction
    deterministic  as narrow, with kernels that give a prompt the same answer in any batch
    tiered         the same kernels, and HiCache with a small cache on the device

Once all arms of a group serve, it writes `--written`, a file for `--running` of
`bench/lib/engines.py`. It ends them when it is interrupted. Our scheduler in the group `wide`
writes what it made, for `bench/gpu/facts.py`.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from bench.lib.engines import Arm, chosen, engine_parser
from bench.priority import ARMS as PRIORITY_ARMS
from bench.speculative_prefill import FLAGS as PREFILL_FLAGS
from bench.speculative_prefill import template_without_switch

Setting = str | int | float | bool
FACTS = "facts.json"
"""Beside our engine's logs."""
_HOST = ("--enable-hierarchical-cache", "--hicache-write-policy", "write_through")
_STOCK_PRIORITY = PRIORITY_ARMS["stock_priority"].flags
_DETERMINISTIC: Mapping[str, Setting] = {
    "enable-deterministic-inference": True,
    "cuda-graph-backend-decode": "disabled",
}


@dataclass(frozen=True)
class Group:
    """Engines of one size.

    arms: the flags of each arm beside the group's settings; an arm `ours` is our engine, all others
        are stock SGLang. pool_tokens, slots, chunk_tokens: the sizes of each engine.
    is_large: whether it has the machine's larger model. is_judge: whether its answers are to be
        equal in any batch, so that it needs deterministic kernels. settings: others, as the
        settings file has them.
    """

    arms: Mapping[str, tuple[str, ...]]
    pool_tokens: int
    slots: int
    chunk_tokens: int = 2048
    is_large: bool = False
    is_judge: bool = False
    settings: Mapping[str, Setting] = field(default_factory=dict)


GROUPS = {
    # A chat of 128K tokens, and what else is in the cache.
    "wide": Group(
        {"stock": (), "ours": ()}, 139_264, 32, 8192, is_large=True,
        settings={"served-model-name": "bench"},
    ),
    "narrow": Group({"stock": (), "stock_priority": _STOCK_PRIORITY, "ours": ()}, 32_768, 8),
    "deterministic": Group(
        {"stock": _STOCK_PRIORITY, "ours": ()}, 16_384, 4, is_judge=True, settings=_DETERMINISTIC
    ),
    "tiered": Group(
        {"stock": _HOST, "ours": (*_HOST, "--host-pin-budget", "0.9")}, 8_192, 4, is_judge=True,
        settings={**_DETERMINISTIC, "hicache-ratio": 8},
    ),
}  # fmt: skip


def main() -> None:
    parser = engine_parser(__doc__)
    parser.add_argument("--group", choices=GROUPS, required=True)
    parser.add_argument("--written", type=Path, required=True)
    options = parser.parse_args()
    # One core computes on the CPU platform; clients and tokenizers need the other.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    engines, folder, group = chosen(options, "tiny"), options.written.parent, GROUPS[options.group]
    path = [str(Path(__file__).parent / "facts_probe"), os.environ.get("PYTHONPATH", "")]
    probe = {
        "SGLEXT_FACTS": str(folder / "ours" / FACTS),
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
    }
    more: tuple[str, ...] = ()
    if group.is_large:
        template = template_without_switch(engines.model, folder / "template.jinja")
        more = (*PREFILL_FLAGS, "--chat-template", str(template))
    started = time.monotonic()
    arms = {
        name: Arm(flags, name == "ours", probe if name == "ours" else None)
        for name, flags in group.arms.items()
    }
    with suppress(KeyboardInterrupt), engines.serving(arms, *more, folder=folder) as nodes:
        start_s = round(time.monotonic() - started, 1)
        found = {
            name: {"url": node.url, "engines": node.engines, "log_dir": str(node.log_dir)}
            for name, node in nodes.items()
        }
        draft = options.written.with_suffix(".draft")
        draft.write_text(json.dumps(found | {"start_s": start_s, "process": os.getpid()}))
        draft.rename(options.written)
        threading.Event().wait()


if __name__ == "__main__":
    main()
