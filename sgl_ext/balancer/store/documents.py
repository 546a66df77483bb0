"""Documents of tenants, whichever server stores them: what each kind of store promises.

A document has an owner and an id, and may continue another document of the same owner:

    resp_1 <- resp_2 <- resp_3      chain(resp_3) is all three, the oldest first

A document expires a TTL after its last use. Using it also uses those that it continues. Beyond the
store's limit the least recently used documents of a tenant are evicted: its own if it holds more
than its share, an equal part of what all hold, otherwise those of the tenant that holds most. A
chain with a missing document is unknown.

An owner is a kind, a blank and a tenant; a tenant's kinds count together.
"""

import hashlib
from collections.abc import Mapping
from typing import NamedTuple, Protocol

LONGEST_CHAIN = 5_000
SWEEP_BATCH = 64
WAIT_S = 2.0
"""The longest time that a request waits for a store."""
_EVICTION_BATCH = 8
MAX_QUEUED = 256
MAX_QUEUED_BYTES = 64 << 20


class Document(NamedTuple):
    """`items` is the part that documents which continue it need, `about` is the rest.

    continues: the id of the document that it continues.
    is_listed: whether `listing` shows it. Such an id has no blank, and `about` is short.
    """

    id: str
    items: bytes
    about: bytes
    continues: str | None = None
    is_listed: bool = False


class Found(NamedTuple):
    """A document as it was read.

    expires_s: when it expires unless it is used before, in seconds since the epoch.
    """

    items: bytes
    about: bytes
    expires_s: float


class Listed(NamedTuple):
    """A document as a list shows it: all but its items.

    used_s: when it was used last, in seconds since the epoch.
    """

    id: str
    about: bytes
    items_bytes: int
    used_s: float
    expires_s: float


class StoreFailed(Exception):
    """The store cannot be read or written now: it is locked, full, damaged, away or too slow."""


class StoreUnusable(Exception):
    """The store cannot be used at all. The message names the setting and shows no password."""


class StoreUnreachable(StoreUnusable):
    """The store's server does not answer now."""


class Documents(Protocol):
    """A store. Methods raise StoreFailed after WAIT_S at most; `now` is in seconds since the epoch.

    None of them blocks the event loop.
    """

    async def get(self, owner: str, id: str, now: float) -> Found | None:
        """The document of this id. This does not count as a use."""

    async def chain(self, owner: str, id: str, now: float, limit_bytes: int) -> list[bytes] | None:
        """The items of a document and of those that it continues, the oldest first.

        None if a document of the chain is missing. Raises BalancerError 413 if the items are
        larger than `limit_bytes`.
        """

    async def listing(self, owner: str, after: str, limit: int, now: float) -> list[Listed]:
        """The owner's listed documents whose ids follow `after`, in the order of their ids, at
        most `limit`. This does not count as a use."""

    async def use(self, owner: str, id: str, now: float) -> None:
        """Renews a document and those that it continues. A failure is counted and not raised.

        To save writes, a document that was used within a hundredth of its TTL is not renewed.
        """

    async def put(self, owner: str, document: Document, ttl_s: float, now: float) -> int | None:
        """Stores a document, in place of the one with its id.

        Returns how many others were evicted for it, None if it is larger than its tenant's share.
        """

    async def delete(self, owner: str, id: str, now: float) -> bool:
        """Deletes a document. False if it is unknown."""

    async def sweep(self, now: float) -> int:
        """Deletes some expired documents and returns how many; a failure is counted."""

    async def close(self) -> None: ...


def key_of(owner: str, id: str) -> bytes:
    """A document's name in a server: clients choose ids, so they are hashed to 16 bytes."""
    text = f"{owner}\0{id}".encode(errors="surrogatepass")
    return hashlib.blake2b(text, digest_size=16).digest()


def tenant_of(owner: str) -> str:
    """The tenant whose share a document counts in."""
    return owner.partition(" ")[2]


def victim_of(held: Mapping[str, int], writer: str) -> tuple[str, int]:
    """The tenant whose documents a full store evicts for `writer`, and how many at once.

    held: each tenant's bytes. A writer with more than an equal part of them evicts its own; for
    another writer the tenant that holds most gives way, one document at a time.
    """
    if held.get(writer, 0) * len(held) > sum(held.values()):
        victim = writer
    else:
        victim = max(held, key=lambda name: (held[name], name), default=writer)
    return victim, _EVICTION_BATCH if victim == writer else 1
