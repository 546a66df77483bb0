"""Residency: the segments that one engine holds, their tokens, and when they are gone.

Requests share a tree of tokens in the engine, and are chains of segments here. The two trees fork
at the same places, give or take a few tokens:

    tokens   |--- node 1 --------|--- node 2 -----|       segments   a - b - c
                                 |--- node 3 ---|                        |
                                                                         d

No prompt is rendered to find where a segment ends in tokens. The end of a prompt is known exactly,
as is every segment that ended an earlier prompt. Ends between two known ends are estimated by
bytes. Where a second chain leaves the first, the engine's tree shows how many tokens the two really
share: that measurement replaces the estimate, and later forks can only lower it. So a claim is
inexact only where no chain has forked yet.

A tree keeps an inner node at least as long as the nodes below it. So only leaves are checked here:
each has the id of a node at or below its end. While that node is resident, so is the whole chain.
When it is not, the leaf's tokens are matched against the tree once, which shows how much is left.
Segments that no longer fit are removed, and the last one that fits becomes the leaf, unless another
branch continues from it.

Invariants, asserted by `check`: a segment's parent is held; `children` counts its children; the
segments without children are the leaves.
"""

from bisect import bisect_left
from collections.abc import Sequence, Sized
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple, Protocol

Stored = tuple[int, int | None, int]
"""A segment, its parent, and the resident prompt tokens up to its end."""

MATCH_TOKENS_PER_STEP = 300
"""Matching this many tokens takes as long as checking one leaf, 0.3 us."""
_LISTED_PER_STEP = 32
"""So does listing this many leaves."""


class Tree(Protocol):
    """The engine's tree of tokens. Neither method may change it."""

    def evicted(self, node: int) -> bool:
        """Whether the node is no longer resident, or unknown."""

    def match(self, key: Any, tokens: int) -> tuple[int, int]:
        """How many of the key's first `tokens` are resident, and the node that holds the last."""


class Changes(NamedTuple):
    """What changed since the last call, in the order in which to apply it."""

    cleared: bool
    removed: list[int]
    """Each is removed with everything below it."""
    stored: list[Stored]
    """New segments and segments whose tokens changed, parents first."""


@dataclass(slots=True)
class _Segment:
    parent: int | None
    tokens: int
    measured: bool
    children: int = 0


class _Leaf(NamedTuple):
    node: int
    key: Sized


@dataclass(eq=False, kw_only=True)
class Residency:
    """The segments that an engine holds.

    page: the tree's page size in tokens; only whole pages are resident.
    slack: how many tokens at a prompt's end the tree may omit.
    limit_segments, limit_tokens: beyond this many segments, or tokens in the keys of all leaves,
        the least recently used branch is forgotten and published as removed.
    forgotten: how many branches were forgotten. deferred: how many sweeps ran out of steps.
    """

    page: int = 1
    slack: int = 0
    limit_segments: int = 500_000
    limit_tokens: int = 32_000_000

    def __post_init__(self) -> None:
        self.forgotten = 0
        self.deferred = 0
        self._segments: dict[int, _Segment] = {}
        self._leaves: dict[int, _Leaf] = {}  # the least recently used first
        self._key_tokens = 0
        self._changed: dict[int, int | None] = {}  # to their parents
        self._cleared = False
        self._suspect = False
        self._unswept: list[int] = []
        self._unsent: dict[int, None] = {}  # after `renew`, in its order

    def __len__(self) -> int:
        return len(self._segments)

    @property
    def settled(self) -> bool:
        """Whether the leaves were checked after the last eviction."""
        return not (self._suspect or self._unswept)

    @property
    def changed(self) -> bool:
        """Whether `take` would return anything."""
        return bool(self._changed or self._unsent) or self._cleared

    def add(
        self,
        hashes: Sequence[int],
        ends: Sequence[int],
        *,
        key: Sized,
        resident: int,
        node: int,
        had: int,
        own: int = 0,
    ) -> None:
        """Records that the engine has put the first `resident` tokens of a prompt into its tree.

        hashes, ends: the prompt's segments and the bytes up to their ends, ascending.
        key: the whole prompt for `Tree.match`; its length is in tokens.
        node: a node of the tree at or below the end of the `resident` tokens.
        had: how many of these tokens the tree had before.
        own: how many of those this request itself put there, in earlier parts.
        """
        if not hashes or resident <= 0:
            return
        # A tree that had all of the tokens, or only those of this request, shows no fork.
        shared = had if had < resident and (own < had or not own) else None
        # How many segments are held. Bisection works, as their ancestors are held too.
        depth = bisect_left(hashes, True, key=lambda segment: segment not in self._segments)
        known = self._segments[hashes[depth - 1]].tokens if depth else 0
        begin = ends[depth - 1] if depth else 0
        rest, width = max(0, len(key) - known), max(1, ends[-1] - begin)

        def offset(index: int) -> int:
            return known + rest * (ends[index] - begin) // width

        if shared is not None and depth and self.settled:
            most = offset(depth) if depth < len(hashes) else known
            self._measure(hashes[:depth], shared, most)
            known = self._segments[hashes[depth - 1]].tokens
            rest = max(0, len(key) - known)
        parent = hashes[depth - 1] if depth else None
        for index in range(depth, len(hashes)):
            tokens = offset(index)
            if tokens > resident + self.slack:
                break
            self._store(hashes[index], parent, min(tokens, resident), index == len(hashes) - 1)
            parent = hashes[index]
        if parent is not None and not self._segments[parent].children:
            self._add_leaf(parent, self._drop_leaf(parent) or _Leaf(node, key))
        while len(self._leaves) > 1 and (
            len(self._segments) > self.limit_segments or self._key_tokens > self.limit_tokens
        ):
            self.forgotten += 1
            self._shrink(next(iter(self._leaves)), 0, 0)

    def evicted(self) -> None:
        """Records an eviction, after which leaves must be checked."""
        self._suspect = True

    def sweep(self, tree: Tree, steps: int) -> None:
        """Checks leaves, the least recently used first, until done or out of steps. The last step
        may take as many more as the longest prompt has tokens to match."""
        while steps > 0:
            if not self._unswept:
                if not self._suspect:
                    return
                self._suspect = False
                self._unswept = list(reversed(self._leaves))
                steps -= len(self._unswept) // _LISTED_PER_STEP
                continue
            steps -= 1
            segment = self._unswept.pop()
            leaf = self._leaves.get(segment)
            if leaf is None or not tree.evicted(leaf.node):
                continue
            tokens = self._segments[segment].tokens
            steps -= tokens // MATCH_TOKENS_PER_STEP
            self._shrink(segment, *tree.match(leaf.key, tokens))
        if not self.settled:
            self.deferred += 1

    def clear(self) -> None:
        """Records that the tree was emptied."""
        for table in (self._segments, self._leaves, self._changed, self._unswept, self._unsent):
            table.clear()
        self._key_tokens = 0
        self._suspect = False
        self._cleared = True

    def renew(self) -> None:
        """Makes `take` return everything once more, for a receiver that was cleared."""
        self._unsent = dict.fromkeys(self._segments)
        self._changed.clear()
        self._cleared = False

    def take(self, most: int | None = None) -> Changes:
        """What changed since the last call, as the state is now; of at most `most` segments, those
        that changed first. `changed` says whether there are more.

        Parents come first in `stored`, because a child that changed before its parent was
        returned by an earlier call.
        """
        segments = self._segments
        most = len(self._unsent) + len(self._changed) if most is None else most
        renewed = list(islice(self._unsent, most))
        some = dict(islice(self._changed.items(), most - len(renewed)))
        for segment in renewed:
            del self._unsent[segment]
        for segment in some:
            del self._changed[segment]
        removed = [
            segment
            for segment, parent in some.items()
            if segment not in segments
            # A parent that is removed by this call removes what is below it.
            and (parent is None or parent in segments or parent not in some)
        ]
        stored = [
            (segment, segments[segment].parent, segments[segment].tokens)
            for segment in (*renewed, *some)
            if segment in segments
        ]
        changes = Changes(self._cleared, removed, stored)
        self._cleared = False
        return changes

    def _measure(self, path: Sequence[int], shared: int, most: int) -> None:
        """Applies a measurement: the chains that share `path` share `shared` tokens."""
        last = self._segments[path[-1]]
        if not last.measured:
            last.measured = True
            self._correct(path[-1], min(max(shared, last.tokens), most))
        for segment in reversed(path):
            if self._segments[segment].tokens <= shared:
                return
            self._correct(segment, shared)

    def _correct(self, segment: int, tokens: int) -> None:
        entry = self._segments[segment]
        tokens -= tokens % self.page
        if tokens != entry.tokens:
            entry.tokens = tokens
            self._changed.setdefault(segment, entry.parent)

    def _store(self, segment: int, parent: int | None, tokens: int, measured: bool) -> None:
        if parent is not None:
            self._segments[parent].children += 1
            self._drop_leaf(parent)
        self._segments[segment] = _Segment(parent, tokens - tokens % self.page, measured)
        self._changed.pop(segment, None)  # one that was removed comes after its parent again
        self._changed[segment] = parent

    def _add_leaf(self, segment: int, leaf: _Leaf) -> None:
        """Adds a leaf as the most recently used."""
        self._leaves[segment] = leaf
        self._key_tokens += len(leaf.key)

    def _drop_leaf(self, segment: int) -> _Leaf | None:
        leaf = self._leaves.pop(segment, None)
        if leaf is not None:
            self._key_tokens -= len(leaf.key)
        return leaf

    def _shrink(self, segment: int, resident: int, node: int) -> None:
        """Shortens a leaf's chain to the `resident` tokens, which end at `node`."""
        leaf = self._drop_leaf(segment)
        assert leaf is not None, "only leaves shrink"
        current: int | None = segment
        while current is not None:
            entry = self._segments[current]
            if entry.children:
                return
            if 0 < entry.tokens <= resident:
                self._add_leaf(current, _Leaf(node, leaf.key))
                return
            del self._segments[current]
            self._unsent.pop(current, None)
            self._changed.setdefault(current, entry.parent)
            if entry.parent is not None:
                self._segments[entry.parent].children -= 1
            current = entry.parent

    def check(self) -> None:
        """Asserts the invariants."""
        children = dict.fromkeys(self._segments, 0)
        for entry in self._segments.values():
            if entry.parent is not None:
                children[entry.parent] += 1  # a KeyError: the parent is not held
        for segment, entry in self._segments.items():
            assert entry.children == children[segment], f"{segment:x} miscounts its children"
            assert entry.tokens % self.page == 0, f"{segment:x} ends inside a page"
        assert self._leaves.keys() == {s for s, count in children.items() if not count}
        assert self._key_tokens == sum(len(leaf.key) for leaf in self._leaves.values())
