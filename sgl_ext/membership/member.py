"""The workers that there are, as a source of them says: a list, a file, Ray, Kubernetes.

    source.lists() -> (member, member), then (member,), ...   each list replaces the one before

A source says who belongs to the fleet and who should leave it. Whether a worker can serve is found
by the balancer's own probes.

`merge` makes one table of workers from the lists of all sources and the changes of the admin API. A
worker that the admin API has drained stays in it, and so does its successor, until it is taken
back.
Of several sources that name the same worker, the one that the operator named first wins. The same
worker is one with the same id, or with the same URL. Within its own list a source may name a URL
twice: an engine that is replaced drains while its successor starts.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol

import msgspec
from msgspec.structs import replace

from sgl_ext.wire.peers import AdminChanges

State = Literal["ready", "draining", "restarting", "ended", "drained"]
"""`ready`: takes requests as soon as a probe succeeds. `draining`: finishes those that it has.
`restarting`: as `draining`, and requests that find no other worker wait for it, or for its
successor. `ended`: its process has ended, and another one will take its place. `drained`: as
`draining`, and it stays until it is taken back; the admin API alone says so. A worker that is gone
is not in the list."""


class Member(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine.

    id: its identity: that of the pod, actor or process. An engine that replaces another has a new
        id, though it may have the same URL. Also its name in metrics and in the admin API.
    url: http://HOST:PORT
    model: the name of the model that it serves; empty: not known.
    labels: what its source knows of it besides, such as its node.
    name: what it has in common with those that it replaces and that replace it; "": its id.
    """

    id: str
    url: str
    model: str = ""
    labels: Mapping[str, str] = {}
    state: State = "ready"
    name: str = ""

    @property
    def lasting_name(self) -> str:
        """What names it also when it was started again."""
        return self.name or self.id


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


ADMIN = "admin"


class Listed(NamedTuple):
    """A worker, and the name of the source whose entry counts."""

    member: Member
    source: str


class Merged(NamedTuple):
    """The workers that there are, and the entries that are ignored, each as a message."""

    listed: list[Listed]
    ignored: list[str]


def merge(lists: Mapping[str, Sequence[Member]], admin: AdminChanges) -> Merged:
    """One table from the lists of all sources.

    lists: of each source, by its name, in the order in which the operator named them.
    """
    added = [Member(id=url, url=url) for url in admin.added]
    listed: list[Listed] = []
    ignored: list[str] = []
    ids: dict[str, str] = {}
    urls: dict[str, str] = {}
    for source, members in [*lists.items(), (ADMIN, added)]:
        for member in members:
            named = f"{source} names {member.id} at {member.url}"
            winner = ids.get(member.id) or urls.get(member.url, source)
            if member.id in ids or winner != source:
                ignored.append(f"{named}, as {winner} does, which counts")
            else:
                ids[member.id] = urls[member.url] = source
                if member.lasting_name in admin.removed and member.state == "ready":
                    member = replace(member, state="drained")
                listed.append(Listed(member, source))
    return Merged(listed, ignored)
