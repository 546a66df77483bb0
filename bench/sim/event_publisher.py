"""A simulated engine's event stream, in the plugin's wire form.

Segments go out within PUBLISH_S of a change, the load at most every LOAD_S. Lines
are numbered by connection; the first is a snapshot.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable

from bench.sim.engine import Engine
from bench.sim.segments import Stored
from sgl_ext.wire.events import (
    LOAD,
    PREFIXES,
    EngineLoad,
    Line,
    StoredRow,
    encode,
    name_of,
    numbered,
)

PUBLISH_S = 0.02
LOAD_S = 0.1


class Publisher:
    """Sends its subscribers what an engine holds, and its load."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._followers: set[asyncio.Queue[Line]] = set()
        self._scheduled = False
        self._load: EngineLoad = {}
        self._load_at = 0.0
        self._load_waits = False

    def changed(self) -> None:
        """Schedules a line, if anything changed."""
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_later(PUBLISH_S, self._publish)

    async def follow(self) -> AsyncIterator[bytes]:
        """Lines without end."""
        queue: asyncio.Queue[Line] = asyncio.Queue()
        # The snapshot has segments that no line has sent yet, so their removal must be sent.
        self._publish()
        held = _stored(self._engine.segments.snapshot())
        whole: Line = {"snapshot": True, "cleared": True, "complete": True, "stored": held}
        queue.put_nowait({**whole, "publishes": [PREFIXES, LOAD], "load": self._now()})
        self._followers.add(queue)
        try:
            number = 0
            while True:
                line = await queue.get()
                yield numbered(encode(line), number)
                number += 1
        finally:
            self._followers.discard(queue)

    def _publish(self) -> None:
        self._scheduled = False
        removed, stored = self._engine.segments.take()
        line: Line = {}
        if removed:
            line["removed"] = [*map(name_of, removed)]
        if stored:
            line["stored"] = _stored(stored)
        load, loop = self._now(), asyncio.get_running_loop()
        if load != self._load and loop.time() - self._load_at >= LOAD_S:
            self._load, self._load_at, self._load_waits = load, loop.time(), False
            line["load"] = load
        elif load != self._load and not self._load_waits:
            self._load_waits = True
            loop.call_later(LOAD_S, self.changed)
        if line:
            for queue in self._followers:
                queue.put_nowait(line)

    def _now(self) -> EngineLoad:
        load = self._engine.load
        return {
            "running": load.running,
            "queued": load.queued,
            "pending_tokens": int(load.pending_tokens),
            "used_tokens": int(load.used_tokens),
            "pinned_tokens": 0,
            "capacity_tokens": int(load.capacity_tokens),
            "prefill_tokens": int(load.prefill_tokens),
        }


def _stored(records: Iterable[Stored]) -> list[StoredRow]:
    return [
        (name_of(segment), None if parent is None else name_of(parent), tokens)
        for segment, parent, tokens in records
    ]
