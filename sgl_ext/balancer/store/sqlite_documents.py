"""The documents in an SQLite file that the balancer processes of one machine share."""

from sgl_ext.balancer.store.documents import Document, Found, Listed
from sgl_ext.balancer.store.sqlite_file import DocumentStore
from sgl_ext.balancer.store.sqlite_thread import StoreThread
from sgl_ext.protocols.errors import BalancerError


class SqliteDocuments:
    """`Documents`, which the thread of this process reads and writes."""

    def __init__(self, thread: StoreThread) -> None:
        self._thread = thread

    async def get(self, owner: str, id: str, now: float) -> Found | None:
        return await self._thread.read(lambda file: file.get(owner, id, now))

    async def chain(self, owner: str, id: str, now: float, limit_bytes: int) -> list[bytes] | None:
        def read(file: DocumentStore) -> list[bytes] | BalancerError | None:
            try:
                return file.chain(owner, id, now, limit_bytes)
            except BalancerError as too_large:  # which is no fault of the store
                return too_large

        found: list[bytes] | BalancerError | None = await self._thread.read(read)
        if isinstance(found, BalancerError):
            raise found
        return found

    async def listing(self, owner: str, after: str, limit: int, now: float) -> list[Listed]:
        return await self._thread.read(lambda file: file.listing(owner, after, limit, now))

    async def use(self, owner: str, id: str, now: float) -> None:
        await self._thread.tidy(lambda file: file.use(owner, id, now))

    async def put(self, owner: str, document: Document, ttl_s: float, now: float) -> int | None:
        size_bytes = len(document.items) + len(document.about)
        return await self._thread.write(
            lambda file: file.put(owner, document, ttl_s, now), size_bytes
        )

    async def delete(self, owner: str, id: str, now: float) -> bool:
        return await self._thread.write(lambda file: file.delete(owner, id, now))

    async def sweep(self, now: float) -> int:
        """Also shortens the write-ahead log."""
        gone = await self._thread.tidy(lambda file: file.sweep(now))
        await self._thread.checkpoint()
        return gone or 0

    async def close(self) -> None:
        await self._thread.close()
