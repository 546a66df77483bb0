"""The workers that there are, as a source of them says: a list, a file, Ray, Kubernetes.

    source.lists() -> (member, member), then (member,), ...   each list replaces the one before

A source says who belongs to the fleet and who should leave it. Whether a worker can serve is found
by the balancer's own probes.
"""

from collections.abc import AsyncIterator, Mapping
from typing import Literal, Protocol

import msgspec

State = Literal["ready", "draining", "restarting"]
"""`ready`: takes requests as soon as a probe succeeds. `draining`: finishes those that it has.
`restarting`: as `draining`, and requests that find no other worker wait for it, or for its
successor. A worker that is gone is not in the list."""


class Member(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine.

    id: its identity: that of the pod, actor or process. An engine that replaces another has a new
        id, though it may have the same URL. Also its name in metrics and in the admin API.
    url: http://HOST:PORT
    model: the name of the model that it serves; empty: not known.
    labels: what its source knows of it besides, such as its node.
    """

    id: str
    url: str
    model: str = ""
    labels: Mapping[str, str] = {}
    state: State = "ready"


class MembershipError(Exception):
    """The source cannot be read, or says something that cannot be used. The message says what."""


class Membership(Protocol):
    """A source of workers.

    name: as the operator wrote it; it appears in messages and metrics.
    """

    name: str

    def lists(self) -> AsyncIterator[tuple[Member, ...]]:
        """Whole lists: the first at once, then one after each change.

        Raises MembershipError. The caller keeps the last list, and calls again after a pause, as it
        does if the iterator ends.
        """
        ...
