"""One table of workers from the lists of all sources, and what the admin API changed.

Of several sources that name the same worker, the one that the operator named first wins. The same
worker is one with the same id, or with the same URL. Within its own list a source may name a URL
twice: an engine that is replaced drains while its successor starts.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from sgl_ext.membership.member import Member

ADMIN = "admin"


class AdminChanges(msgspec.Struct, frozen=True):
    """What was changed through the admin API, the last source.

    changed_s: when, by the wall clock: of two balancers' changes the later ones count.
    added: URLs of workers. removed: ids of workers of other sources that shall leave.
    """

    changed_s: float = 0.0
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()


class Listed(NamedTuple):
    """A worker, and the name of the source whose entry counts."""

    member: Member
    source: str


class Conflict(NamedTuple):
    """An entry that is ignored, because `winner` names that worker, too."""

    ignored: Listed
    winner: str

    def __str__(self) -> str:
        member, source = self.ignored
        return f"{source} names {member.id} at {member.url}, as {self.winner} does, which counts"


def merge(
    lists: Mapping[str, Iterable[Member]], admin: AdminChanges
) -> tuple[list[Listed], list[Conflict]]:
    """The workers that there are, and the entries that are ignored.

    lists: of each source, by its name, in the order in which the operator named them.
    """
    added = [Member(id=url, url=url) for url in admin.added]
    listed: list[Listed] = []
    ids: dict[str, str] = {}
    urls: dict[str, str] = {}
    conflicts: list[Conflict] = []
    for source, members in [*lists.items(), (ADMIN, added)]:
        for member in members:
            winner = ids.get(member.id) or urls.get(member.url, source)
            if member.id in ids or winner != source:
                conflicts.append(Conflict(Listed(member, source), winner))
                continue
            ids[member.id] = urls[member.url] = source
            if member.id not in admin.removed:
                listed.append(Listed(member, source))
    return listed, conflicts
