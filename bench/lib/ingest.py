"""What engines' events cost a balancer: to warm an index up, and from then on.

A snapshot has what an engine holds, conversation by conversation, in lines of up to 1,000 segments.
After it an engine sends its load ten times a second, and after each turn the segments of the turn
and those that were evicted for it. The lines are those of the wire, parsed and applied as a
balancer does (`PrefixEventReader`, `Router.load_reported`); reading them from a socket is left out.
Times are of the processor.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from random import Random
from typing import Any

import orjson

from bench.lib.fleet import router_of
from bench.lib.index_side import resident_bytes
from bench.lib.script import require
from sgl_ext.balancer.routing.prefix_events import PrefixEventReader
from sgl_ext.balancer.routing.router import Router

SEGMENTS = 5_000
_LINE_SEGMENTS = 1_000
_CONVERSATION = 125
_TURN = 4
_SEGMENT_TOKENS = 1_024
_LINES = 400
_FOLLOWED = 10
LOADS_PER_S, TURNS_PER_S = 10, 1
"""Of one engine, for the figures per engine."""


def ingest(engines: int, segments: int = SEGMENTS) -> dict[str, float]:
    """Warms one index up from so many engines, then applies what some of them send."""
    router = router_of(engines, limit_segments=engines * segments * 9 // 8)
    before = resident_bytes()
    streams = []
    warm_s, wire_bytes = 0.0, 0
    for engine in range(engines):
        stream = Stream(router, engine)
        seconds, size = stream.apply(stream.snapshot(segments))
        warm_s, wire_bytes = warm_s + seconds, wire_bytes + size
        if engine < _FOLLOWED:
            streams.append(stream)
    count = len(router.prefixes.index)
    require(count == engines * segments, "all segments are stored", found=count)
    grown = resident_bytes() - before
    turns, loads = ([each.apply(make(each)) for each in streams] for make in (_turns, _loads))
    require(not any(each.reader.orphans for each in streams), "no segment is an orphan")
    lines = _LINES * len(streams)
    turn_us, load_us = (sum(s for s, _ in part) / lines * 1e6 for part in (turns, loads))
    turn_bytes, load_bytes = (sum(size for _, size in part) / lines for part in (turns, loads))
    busy = (TURNS_PER_S * turn_us + LOADS_PER_S * load_us) / 1e6
    return {
        "engines": engines,
        "segments": count,
        "warm_up_s": round(warm_s, 2),
        "warm_up_s_1000_engines": round(warm_s / count * 1_000 * SEGMENTS, 2),
        "segments_per_s": round(count / warm_s),
        "wire_bytes_per_segment": round(wire_bytes / count, 1),
        "bytes_per_segment": round(grown / count, 1),
        "turn_line_us": round(turn_us, 1),
        "load_line_us": round(load_us, 1),
        "processor_share_per_engine": round(busy, 6),
        "bytes_per_s_per_engine": round(TURNS_PER_S * turn_bytes + LOADS_PER_S * load_bytes),
    }


class Stream:
    """The events of one engine, and their reader."""

    def __init__(self, router: Router, engine: int) -> None:
        self.random = Random(f"engine {engine}")
        self.ends: list[tuple[str, int]] = []  # of conversations: segment and tokens
        self._router = router
        self._worker = router.workers.all[engine]
        self._seq = 0
        prefixes, pins = router.prefixes, self._worker.pins
        self.reader = PrefixEventReader(
            self._worker.slot, prefixes.written, prefixes.in_flight, pins
        )

    def line(self, **event: Any) -> bytes:
        """The next line."""
        self._seq += 1
        return orjson.dumps({"seq": self._seq, **event})

    def segment(self) -> str:
        """A new one."""
        return f"{self.random.getrandbits(128):032x}"

    def snapshot(self, segments: int) -> Iterator[bytes]:
        """What a stream begins with."""
        yield self.line(snapshot=True, cleared=True, publishes=["prefixes", "load"])
        rows: list[tuple[str, str | None, int]] = []
        parent = None
        for number in range(1, segments + 1):
            place = (number - 1) % _CONVERSATION + 1
            segment, tokens = self.segment(), place * _SEGMENT_TOKENS
            rows.append((segment, parent if place > 1 else None, tokens))
            parent = segment
            if place == _CONVERSATION or number == segments:
                self.ends.append((segment, tokens))
            if len(rows) == _LINE_SEGMENTS or number == segments:
                yield self.line(stored=rows)
                rows = []
        yield self.line(complete=True)

    def apply(self, lines: Iterator[bytes]) -> tuple[float, int]:
        """Applies lines as a subscriber does; the processor's seconds, and the lines' bytes."""
        router, worker, made = self._router, self._worker, [*lines]
        began_s = time.process_time()
        for line in made:
            now_s = router.clock()
            event = self.reader.apply(line, now_s)
            router.attempts.confirm(worker)
            if event.load is not None:
                worker.apply_load(event.load, now_s)
                router.load_reported(worker)
        return time.process_time() - began_s, sum(map(len, made)) + len(made)


def _turns(stream: Stream) -> Iterator[bytes]:
    """Turns of conversations, each of which is evicted when the next one comes."""
    evicted: list[str] = []
    for number in range(_LINES):
        above, tokens = stream.ends[number % len(stream.ends)]
        rows = []
        for place in range(1, _TURN + 1):
            segment = stream.segment()
            rows.append((segment, above, tokens + place * _SEGMENT_TOKENS))
            above = segment
        yield stream.line(removed=evicted, stored=rows)
        evicted = [rows[0][0]]


def _loads(stream: Stream) -> Iterator[bytes]:
    names = ("running", "queued", "pending_tokens", "used_tokens", "pinned_tokens")
    sizes = {"capacity_tokens": 1_500_000, "max_running": 64, "context_tokens": 200_000}
    for _ in range(_LINES):
        now = {name: stream.random.randrange(60) for name in names}
        yield stream.line(load={**now, **sizes})
