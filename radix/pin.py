"""A pin: a lease on the first tokens of prompts, and its place in the release order.

Pins are released in this order, the least valuable first:

    (priority, valuable_until_s, id)    valuable_until_s = used_s + ttl_s * hits / (hits + 1)

A pin that was never read is valuable until the time of its grant. Each read brings the time
closer to the end of the lease, as a prefix that was read often will be read again. A new pin is
valuable until now, so it displaces pins of its priority that were never read, or that are idle
for longer than their reads justify, and never one in use.
"""

from dataclasses import dataclass
from typing import Any

EMPTY = "empty"
"""Rejected: there are no tokens to pin."""
BUDGET = "budget"
"""Rejected: the prefix alone is longer than the budget."""
OWNER_SHARE = "owner share"
"""Rejected: the prefix alone exceeds the owner's share, or more valuable pins fill that share."""
LESS_VALUABLE = "less valuable"
"""Rejected: more valuable pins leave no room for it."""

ReleaseOrder = tuple[int, float, int]


@dataclass(slots=True, eq=False)
class Pin:
    """A lease on a prefix. Only `Pins` changes it, except for `label`.

    id: ascending in the order of grants.
    prefix: a hash of the space and the tokens, as hexadecimal digits.
    used_s: the time of the last read or request for the pin.
    hits: how many requests have read the whole prefix from the cache.
    owner: the first tenant that named itself in a request for the pin.
    session: the first session that did.
    label: belongs to the caller.
    """

    id: int
    prefix: str
    tokens: int
    ttl_s: float
    deadline_s: float
    granted_s: float
    used_s: float
    hits: int
    owner: str
    session: str
    priority: int
    label: Any

    @property
    def valuable_until_s(self) -> float:
        return self.used_s + self.ttl_s * self.hits / (self.hits + 1)

    @property
    def release_order(self) -> ReleaseOrder:
        return self.priority, self.valuable_until_s, self.id
