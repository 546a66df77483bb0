"""What balancers on several machines share beside documents: limits, versions and messages.

SQLite is on one machine, so only a server's store offers this. Everything here is lost harmlessly.
"""

from collections.abc import AsyncGenerator, Sequence
from typing import NamedTuple, Protocol

PRESENT_S = 5.0
"""How long a balancer counts after it said that it is there."""
CALL_S = 0.25
"""The longest time that a call waits."""


class Lease(NamedTuple):
    """What a balancer asks of a shared token bucket that adds `per_minute`, and holds that much.

    take: tokens that were used already, whether or not they are there; negative: put back.
    need, extra: then `need` is leased or nothing, and with it as much of `extra` as there is. A
        full bucket leases any need, and is in debt then.
    """

    name: str
    per_minute: float
    take: float = 0.0
    need: float = 0.0
    extra: float = 0.0


class Leased(NamedTuple):
    """The tokens that were leased, and those that the bucket still has."""

    tokens: float
    level: float


class SharedState(Protocol):
    """The state that all balancers of a store share. Methods raise StoreFailed after CALL_S."""

    async def lease(self, lease: Lease) -> Leased:
        """Leases tokens of a bucket; one that is unknown is full."""

    async def count_present(self, id: str) -> int:
        """Notes that this balancer is there; returns how many have been in the last PRESENT_S."""

    async def newer(self, name: str, version: int) -> tuple[int, bytes] | None:
        """The newest version of what this names, and its data; None if none is above `version`."""

    async def share(self, name: str, version: int, data: bytes) -> None:
        """Shares data of a version, unless there is one as new."""

    async def publish(self, messages: Sequence[bytes]) -> None:
        """Sends messages to all balancers that receive them now."""

    def messages(self) -> AsyncGenerator[bytes, None]:
        """The messages from now on, also this balancer's own. Raises an exception of the client
        when the connection ends."""

    async def close(self) -> None: ...


# What tenants' keys used, by day and month: what each kind of store promises.
#
# Balancers add what they counted, and read what all have counted. A balancer that gets no answer
# sends its batch again, and a store adds each batch once, by its number.

KEPT_DAYS = 400
"""How long the store holds a period."""


class Use(NamedTuple):
    """Requests and tokens of a key in a period: a month, `2026-11`, or a day, `2026-11-28`, of UTC.

    tokens: prompt tokens that were computed, and output tokens.
    """

    period: str
    tenant: str
    key: str
    requests: int
    tokens: int


class Batch(NamedTuple):
    """What a writer adds at once. number: larger than that of its batch before.

    forgets: periods before this one are deleted.
    """

    writer: str
    number: int
    uses: Sequence[Use]
    forgets: str


class UsageTable(Protocol):
    """Methods raise StoreFailed. None of them blocks the event loop."""

    async def add(self, batch: Batch) -> None:
        """Adds to what is there, unless this batch was added before."""

    async def read(self, period: str) -> list[Use]:
        """What all keys used in a period."""

    async def days(self, month: str) -> list[Use]:
        """What all keys used on each day of a month, in the order of days, tenants and keys."""
