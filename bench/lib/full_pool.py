"""bench/speculative_prefill while the engine's memory is full of other sessions' prefixes."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import requests
from sgl_ext_cpu.node import Node

from bench.lib.pin_load import CHAT, Texts
from bench.lib.script import precondition, require
from bench.lib.speculative_figures import COMPUTED, arm_figures, later
from bench.lib.speculative_load import Load, Round, Stage
from bench.lib.spread import ratio_spread
from sgl_ext.protocols.registry import of_path
from sgl_ext.reading.segments import read_chain

SHARES = (0.0, 0.05, 0.2)
"""The arms: settings of `prefill-ahead-evictable-share`."""
_FILLER_TOKENS = 1500
_SHARE = "prefill_ahead_evictable_share"


@dataclass
class Part:
    """One arm's share of a round. before, after: tokens of the other sessions in the cache."""

    seen: Round = field(default_factory=Round)
    before: int = 0
    after: int = 0


class FullPool:
    """An engine whose memory other sessions fill before people talk."""

    def __init__(self, node: Node, texts: Texts, pool_tokens: int) -> None:
        self._node = node
        self._texts = texts
        self._pool_tokens = pool_tokens
        self._versions = count(1)
        self._fillers: list[dict[str, Any]] = []

    def set_share(self, share: float) -> None:
        """Changes the engine's setting."""
        version: Any = {"number": next(self._versions), "values": {_SHARE: share}}
        url = f"{self._node.engines[0]}/sgl_ext/settings"
        answer = requests.post(url, json=version, timeout=30)
        require(answer.ok and answer.json()["applied"], "the engine takes settings", said=answer)

    def fill(self, name: str) -> int:
        """Sends other sessions' prompts until the memory is full; their tokens in the cache."""
        self._fillers = []
        for number in range(self._pool_tokens * 5 // 4 // _FILLER_TOKENS):
            text = self._texts.fresh(f"{name}, session {number}", _FILLER_TOKENS)
            body = {"model": "tiny", "max_tokens": 1}
            self._fillers.append(body | {"messages": [{"role": "user", "content": text}]})
            url = f"{self._node.engines[0]}{CHAT}"
            requests.post(url, json=self._fillers[-1], timeout=300).raise_for_status()
        held = self.held()
        is_full = held > self._pool_tokens - 2 * _FILLER_TOKENS
        precondition(is_full, "the memory is full", held=held, of=self._pool_tokens)
        return held

    def held(self) -> int:
        """The tokens of the other sessions' prompts in the cache, as the engine publishes them."""
        held: dict[str, int] = {}
        url = f"{self._node.engines[0]}/sgl_ext/events"
        with requests.get(url, stream=True, timeout=60) as answer:
            for line in answer.iter_lines():
                event = json.loads(line)
                held |= {segment: tokens for segment, _, tokens in event.get("stored", ())}
                if event.get("complete"):
                    break
        return sum(self._held_of(body, held) for body in self._fillers)

    def _held_of(self, body: dict[str, Any], held: dict[str, int]) -> int:
        chain = read_chain(of_path(CHAT), body).hashes
        return max((held.get(f"{segment:032x}", 0) for segment in chain), default=0)

    async def play(self, stage: Stage, load: Load, share: float, name: str) -> Part:
        """Fills the memory, and has people talk whose next turns are prefilled with this share."""
        self.set_share(share)
        before = self.fill(f"{name}, share {share}")
        # The words do not depend on the share, so that arms differ in nothing else.
        seen = await stage.play(load, "ours", name)
        return Part(seen, before, self.held())


def figures(seen: dict[float, list[Part]]) -> dict[str, Any]:
    """Each share against none: what people gain, and what the other sessions lose beyond what the
    people's own prompts take from them."""
    found: dict[str, Any] = {}
    middles = {share: [_ttft_ms(part) for part in parts] for share, parts in seen.items()}
    lost = {share: [part.before - part.after for part in parts] for share, parts in seen.items()}
    for share, parts in seen.items():
        arm = arm_figures([part.seen for part in parts])
        more = [ours - off for off, ours in zip(lost[0.0], lost[share], strict=True)]
        found[f"share_{share:g}"] = {
            "ttft_p50_ms": arm["ttft_p50_ms"],
            "ttft_p50_ratio": ratio_spread(middles[0.0], middles[share]),
            "next_prefix_cached_share": arm["cached_share_p50"],
            "prefilled_ahead_tokens": round(arm["counters"].get(COMPUTED, 0)),
            "others_held_tokens": round(statistics.median(part.before for part in parts)),
            "others_lost_tokens": round(statistics.median(lost[share])),
            "others_lost_more_tokens": round(statistics.median(more)),
            "others_ttft_p99_ms": arm["others_ttft_p99_ms"],
            "failed": arm["failed"],
        }
    return found


def _ttft_ms(part: Part) -> float:
    return float(statistics.median(turn.seen.ttft_ms for turn in later([part.seen])))
