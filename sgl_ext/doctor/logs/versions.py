"""Which versions of a client changed how its prompts begin.

Such a version computes again, for each fleet and session, what the version before had cached.
"""

from collections import defaultdict
from itertools import pairwise
from typing import NamedTuple

from sgl_ext.doctor.logs.entry import Entry

_Kind = tuple[str, str]
_ByVersion = defaultdict[_Kind, defaultdict[str, set[str]]]


class VersionChange(NamedTuple):
    """No prompt of the later version begins like one of the earlier. what: "tools" or
    "instructions"."""

    harness: str
    earlier: str
    later: str
    what: str


class Versions:
    """Compares each version with the one that came before it, by the class of its requests.

    Instructions count only where several sessions of a version share them: those that name a
    folder or a day differ between all sessions.
    """

    def __init__(self) -> None:
        self._tools: _ByVersion = defaultdict(lambda: defaultdict(set))
        self._shared: _ByVersion = defaultdict(lambda: defaultdict(set))
        self._first_s: dict[tuple[str, str], float] = {}
        self._session: dict[tuple[str, str, str, str], str] = {}

    def add(self, entry: Entry) -> None:
        """Adds a request."""
        if not entry.version or not entry.tools:
            return
        kind, came = (entry.harness, entry.agent), (entry.harness, entry.version)
        self._first_s[came] = min(self._first_s.get(came, entry.time_s), entry.time_s)
        self._tools[kind][entry.version].add(entry.tools)
        begun = self._session.setdefault((*kind, entry.version, entry.prefix), entry.session)
        if begun != entry.session:
            self._shared[kind][entry.version].add(entry.prefix)

    def changes(self) -> list[VersionChange]:
        """The versions that changed how prompts begin, each once."""
        found: dict[VersionChange, None] = {}
        for kind, tools in self._tools.items():
            harness, shared = kind[0], self._shared[kind]
            versions = sorted(tools, key=lambda version: self._first_s[harness, version])
            for earlier, later in pairwise(versions):
                old, new = shared[earlier], shared[later]
                if tools[earlier].isdisjoint(tools[later]):
                    found[VersionChange(harness, earlier, later, "tools")] = None
                elif old and new and old.isdisjoint(new):
                    found[VersionChange(harness, earlier, later, "instructions")] = None
        return list(found)
