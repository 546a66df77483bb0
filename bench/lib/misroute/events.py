"""What the engines published, and when this process heard it: a second reader of their events."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Iterable

import aiohttp
import orjson

_AGAIN_S = 0.2
_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=5)
_LONGEST_LINE = 2**26


class Diary:
    """When each engine said of each segment that it holds it, or no longer does.

    An engine whose stream ends, as when it is killed, has withdrawn everything. Times
    are seconds of the wall clock.
    """

    def __init__(self) -> None:
        self.lines = 0
        self.gaps = 0
        self.cleared: defaultdict[str, list[float]] = defaultdict(list)
        self._removed: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
        self._stored: defaultdict[tuple[str, int], list[float]] = defaultdict(list)

    async def listen(self, engines: Iterable[str]) -> None:
        """Reads all engines' events until cancelled."""
        async with aiohttp.ClientSession(timeout=_TIMEOUT, read_bufsize=_LONGEST_LINE) as http:
            await asyncio.gather(*(self._follow(http, engine) for engine in engines))

    def withdrawn(self, engine: str, hashes: Iterable[int]) -> list[float]:
        """When the engine took back what it had said of this chain, or of some of it."""
        times = list(self.cleared[engine])
        for segment in hashes:
            times += self._removed.get((engine, segment), ())
        return times

    def stored(self, engine: str, segment: int) -> list[float]:
        """When the engine said that it holds the segment."""
        return self._stored.get((engine, segment), [])

    @property
    def removals(self) -> int:
        """How many segments were removed, each with what is below it."""
        return sum(map(len, self._removed.values()))

    async def _follow(self, http: aiohttp.ClientSession, engine: str) -> None:
        while True:
            heard = False
            try:
                async with http.get(f"{engine}/sgl_ext/events") as answer:
                    answer.raise_for_status()
                    last = None
                    async for line in answer.content:
                        last = self._note(engine, line, last)
                        heard = True
            except aiohttp.ClientError:
                pass
            if heard:
                self.cleared[engine].append(time.time())
            await asyncio.sleep(_AGAIN_S)

    def _note(self, engine: str, line: bytes, last: int | None) -> int:
        now_s = time.time()
        event = orjson.loads(line)
        self.lines += 1
        self.gaps += last is not None and event["seq"] != last + 1
        if event.get("cleared") and not event.get("snapshot"):
            self.cleared[engine].append(now_s)
        for segment in event.get("removed", ()):
            self._removed[engine, int(segment, 16)].append(now_s)
        for segment, _, _ in event.get("stored", ()):
            self._stored[engine, int(segment, 16)].append(now_s)
        return int(event["seq"])
