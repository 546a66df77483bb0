"""Families of prompts: those of one harness with the same tools."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from sgl_ext.doctor.logs.entry import Entry
from sgl_ext.doctor.logs.tokens import Tokens
from sgl_ext.prompts.findings import MOST_VERSIONS

MOST_FAMILIES = 1024
_MOST_BEGINNINGS = 4096


class FamilyKey(NamedTuple):
    """The harness, and the hash of the tools; "" without tools."""

    harness: str
    tools: str


@dataclass
class Family:
    """beginnings: hashes of tools and instructions together. versions: those of the clients."""

    tools_count: int = 0
    requests: int = 0
    tokens: Tokens = field(default_factory=Tokens)
    cost: float = 0.0
    beginnings: set[str] = field(default_factory=set)
    versions: set[str] = field(default_factory=set)


class Families:
    """Sums by family; those beyond the bound are in one without a hash of its tools."""

    def __init__(self) -> None:
        self._by_key: defaultdict[FamilyKey, Family] = defaultdict(Family)

    def __iter__(self) -> Iterator[tuple[FamilyKey, Family]]:
        return iter(self._by_key.items())

    def get(self, key: FamilyKey) -> Family | None:
        """The family of this key; None if it has no request."""
        return self._by_key.get(key)

    def add(self, entry: Entry, cost: float) -> None:
        """Adds a request and what its tokens cost."""
        key = FamilyKey(entry.harness, entry.tools)
        if key not in self._by_key and len(self._by_key) >= MOST_FAMILIES:
            key = FamilyKey(entry.harness, "")
        family = self._by_key[key]
        family.tools_count = entry.tools_count
        family.requests += 1
        family.tokens = family.tokens.plus(entry.tokens)
        family.cost += cost
        if entry.prefix and len(family.beginnings) < _MOST_BEGINNINGS:
            family.beginnings.add(entry.prefix)
        if entry.version and len(family.versions) < MOST_VERSIONS:
            family.versions.add(entry.version)
