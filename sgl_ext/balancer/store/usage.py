"""What tenants' keys used, by day and month: what each kind of store promises.

Balancers add what they counted, and read what all have counted. A balancer that gets no answer
sends its batch again, and a store adds each batch once, by its number.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

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
