"""What balancers share, in this process: a server's store without a server."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence

from sgl_ext.balancer.store.documents import StoreFailed
from sgl_ext.balancer.store.shared_state import Lease, Leased


class SharedMemory:
    """`SharedState` by a clock of the test's; it fails while `is_away`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.is_away = False
        self.leases: list[Lease] = []
        self._levels: dict[str, tuple[float, float]] = {}
        self._present: set[str] = set()
        self._newest: dict[str, tuple[int, bytes]] = {}
        self._queues: list[asyncio.Queue[bytes]] = []

    def _answer(self) -> None:
        if self.is_away:
            raise StoreFailed("away")

    async def lease(self, lease: Lease) -> Leased:
        self._answer()
        self.leases.append(lease)
        now_s, cap = self._clock(), lease.per_minute
        level, filled_s = self._levels.get(lease.name, (cap, now_s))
        level = min(cap, level + (now_s - filled_s) * cap / 60)
        level = min(cap, level - lease.take)
        granted = 0.0
        if level >= min(lease.need, cap):
            granted = lease.need + min(lease.extra, max(level - lease.need, 0))
        self._levels[lease.name] = (level - granted, now_s)
        return Leased(granted, level - granted)

    async def count_present(self, id: str) -> int:
        self._answer()
        self._present.add(id)
        return len(self._present)

    async def newer(self, name: str, version: int) -> tuple[int, bytes] | None:
        self._answer()
        found = self._newest.get(name)
        return None if found is None or found[0] <= version else found

    async def share(self, name: str, version: int, data: bytes) -> None:
        self._answer()
        if version > self._newest.get(name, (-1, b""))[0]:
            self._newest[name] = version, data

    async def publish(self, messages: Sequence[bytes]) -> None:
        self._answer()
        for queue in self._queues:
            for message in messages:
                queue.put_nowait(message)

    async def messages(self) -> AsyncGenerator[bytes, None]:
        queue: asyncio.Queue[bytes] = asyncio.Queue()
        self._queues.append(queue)
        while True:
            yield await queue.get()

    async def close(self) -> None: ...
