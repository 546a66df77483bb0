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
Segments that no longer fit leave, and the last one that fits becomes the leaf, unless another
branch continues from it.

An engine with a host tier moves what its device gives up to its host. A segment that leaves the
device goes to `HostSegments` as long as the tree has a node at or below its end, and comes back
from there, with the end that was known, when a request has brought its tokens back. So along a
chain come first the segments on the device, then those on the host. "Resident" means on the device.

Invariants, asserted by `check`: a segment's parent is held; `children` counts its children; the
segments without children are the leaves.

`HostSegments` are those that an engine keeps on its host alone.

    on the device     a - b
                           \\
    on the host             c - d          d is a leaf here; c and d have nodes of the engine's tree
                             \\
                              e

A segment comes here when the device gave its tokens up and the tree still has them, and leaves when
a request has brought them back. Its parent is here or on the device. A tree keeps an inner node at
least as long as those below it, so after evictions on the host only leaves are checked, by the id
of a node at or below their end. That node says whether the leaf is there, and nothing is matched.

Invariants, asserted by `check`: `_children` counts the segments here by their parents; the segments
without such children are the leaves.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from enum import StrEnum
from itertools import takewhile
from typing import Any, NamedTuple, Protocol

from radix.residency_changes import Changes, Stored, Unpublished


class Tier(StrEnum):
    """From the fastest to the slowest. Events and the API use these names."""

    DEVICE = "device"
    """The engine's device: a request reads it at once."""
    HOST = "host"
    """Memory of the engine's machine that this engine alone uses: a request loads it first."""
    SHARED = "shared"
    """Memory of a machine that all of its engines use."""


UNKNOWN = 0
"""No node: the segment is there as long as one below it is."""
_LISTED_PER_STEP = 32


class KeepingTree(Protocol):
    """The engine's tree of tokens, which this may not change."""

    def keeps(self, node: int) -> bool:
        """Whether the tree still has a node, on the device or on the host."""


@dataclass(slots=True, frozen=True)
class HostSegment:
    """node: one at or below the segment's end, or UNKNOWN."""

    parent: int | None
    tokens: int
    measured: bool
    node: int


class HostSegments:
    """segments: by their hashes; callers only read them."""

    def __init__(self) -> None:
        self.segments: dict[int, HostSegment] = {}
        self._children: dict[int, int] = {}
        self._leaves: dict[int, None] = {}  # those that came first, first
        self._suspect = False
        self._unswept: list[int] = []

    def __len__(self) -> int:
        return len(self.segments)

    @property
    def leaves(self) -> list[int]:
        """Those without segments below them here; those that came last first."""
        return [*reversed(self._leaves)]

    @property
    def settled(self) -> bool:
        """Whether the leaves were checked after the last eviction on the host."""
        return not (self._suspect or self._unswept)

    def has_below(self, segment: int) -> bool:
        """Whether segments right below this one are here. It may be on the device."""
        return segment in self._children

    def parents_first(self) -> Iterator[int]:
        """All segments, each after its parent."""
        listed: set[int] = set()
        for leaf in self._leaves:
            branch: list[int] = []
            current: int | None = leaf
            while current is not None and current in self.segments and current not in listed:
                branch.append(current)
                listed.add(current)
                current = self.segments[current].parent
            yield from reversed(branch)

    def add(self, segment: int, entry: HostSegment) -> None:
        """A segment has left the device, and stays on the host."""
        self.segments[segment] = entry
        if entry.parent is not None:
            self._children[entry.parent] = self._children.get(entry.parent, 0) + 1
            self._leaves.pop(entry.parent, None)
        if segment not in self._children:
            self._leaves[segment] = None

    def pop(self, segment: int) -> HostSegment:
        """A segment is back on the device, as its parent is. Those below it stay."""
        entry = self.segments.pop(segment)
        self._leaves.pop(segment, None)
        self._forget_child(entry.parent)
        return entry

    def evicted(self) -> None:
        """Records an eviction on the host, after which leaves must be checked."""
        self._suspect = True

    def sweep(self, tree: KeepingTree, steps: int) -> list[tuple[int, int | None]]:
        """Checks leaves until done or out of steps. Returns what is gone: segments with their
        parents."""
        gone: list[tuple[int, int | None]] = []
        while steps > 0 and not self.settled:
            if not self._unswept:
                self._suspect = False
                self._unswept = list(reversed(self._leaves))
                steps -= len(self._unswept) // _LISTED_PER_STEP
                continue
            leaf: int | None = self._unswept.pop()
            steps -= 1
            while leaf in self._leaves and not self._is_kept(tree, leaf):
                parent = self._drop(leaf)
                gone.append((leaf, parent))
                steps -= 1
                leaf = parent
        return gone

    def forget_oldest(self) -> tuple[int, int | None]:
        """Forgets the leaf that came first; returns it and its parent."""
        leaf = next(iter(self._leaves))
        return leaf, self._drop(leaf)

    def clear(self) -> None:
        """The tree was emptied."""
        for table in (self.segments, self._children, self._leaves, self._unswept):
            table.clear()
        self._suspect = False

    def _is_kept(self, tree: KeepingTree, leaf: int) -> bool:
        node = self.segments[leaf].node
        return node != UNKNOWN and tree.keeps(node)

    def _drop(self, leaf: int) -> int | None:
        """Removes a leaf. Its parent becomes one if it is here and has no other child."""
        parent = self.segments.pop(leaf).parent
        del self._leaves[leaf]
        self._forget_child(parent)
        return parent

    def _forget_child(self, parent: int | None) -> None:
        if parent is None:
            return
        self._children[parent] -= 1
        if not self._children[parent]:
            del self._children[parent]
            if parent in self.segments:
                self._leaves[parent] = None

    def check(self) -> None:
        """Asserts the invariants."""
        children: dict[int, int] = {}
        for entry in self.segments.values():
            if entry.parent is not None:
                children[entry.parent] = children.get(entry.parent, 0) + 1
        assert self._children == children
        assert self._leaves.keys() == self.segments.keys() - children.keys()


MATCH_TOKENS_PER_STEP = 300
"""Matching this many tokens takes as long as checking one leaf, 0.3 us."""
"""So does listing this many leaves."""


class Tree(Protocol):
    """The engine's tree of tokens. No method may change it."""

    def evicted(self, node: int) -> bool:
        """Whether the node is no longer resident, or unknown."""

    def match(self, key: Any, tokens: int) -> tuple[int, int]:
        """How many of the key's first `tokens` are resident, and the node that holds the last."""

    def keeps(self, node: int) -> bool:
        """Whether the tree has the node, on the device or on the host."""

    def path(self, node: int) -> Sequence[tuple[int, int]]:
        """The nodes down to one that the tree `keeps`: the tokens up to the end of each, and its
        id."""


@dataclass(slots=True)
class _Segment:
    parent: int | None
    tokens: int
    measured: bool
    children: int = 0
    node: int = UNKNOWN


class _Leaf(NamedTuple):
    node: int
    key: Sized


@dataclass(eq=False, kw_only=True)
class Residency:
    """The segments that an engine holds.

    page: the tree's page size in tokens; only whole pages are resident.
    slack: how many tokens at a prompt's end the tree may omit.
    limit_segments, limit_tokens: beyond this many segments, or tokens in the keys of all leaves,
        the least recently used branch is forgotten and published as removed; before any other
        those on the host, if there are too many segments.
    host: the segments on the host alone; None without a host tier.
    forgotten: how many branches were forgotten. deferred: how many sweeps ran out of steps.
    """

    page: int = 1
    slack: int = 0
    limit_segments: int = 500_000
    limit_tokens: int = 32_000_000
    host: HostSegments | None = None

    def __post_init__(self) -> None:
        self.forgotten = 0
        self.deferred = 0
        self._segments: dict[int, _Segment] = {}
        self._leaves: dict[int, _Leaf] = {}  # the least recently used first
        self._key_tokens = 0
        self._unpublished = Unpublished()
        self._on_host = {} if self.host is None else self.host.segments
        self._suspect = False
        self._unswept: list[int] = []

    def __len__(self) -> int:
        return len(self._segments) + len(self._on_host)

    @property
    def settled(self) -> bool:
        """Whether the leaves were checked after the last eviction."""
        is_swept = not (self._suspect or self._unswept)
        return is_swept and (self.host is None or self.host.settled)

    @property
    def changed(self) -> bool:
        """Whether `take` would return anything."""
        return bool(self._unpublished)

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
        depth = self._bring_back(hashes, depth, resident)
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
            if tokens > resident + self.slack or hashes[index] in self._on_host:
                break
            self._store(hashes[index], parent, min(tokens, resident), index == len(hashes) - 1)
            parent = hashes[index]
        if parent is not None and not self._segments[parent].children:
            self._add_leaf(parent, self._drop_leaf(parent) or _Leaf(node, key))
        self._keep_limits()

    def _bring_back(self, hashes: Sequence[int], depth: int, resident: int) -> int:
        """Takes segments after the first `depth` back from the host, as far as their tokens are
        resident; returns how many are held then."""
        while self.host is not None and depth < len(hashes):
            kept = self.host.segments.get(hashes[depth])
            if kept is None or kept.tokens > resident + self.slack:
                break
            self.host.pop(hashes[depth])
            self._store(hashes[depth], kept.parent, min(kept.tokens, resident), kept.measured)
            depth += 1
        return depth

    def _keep_limits(self) -> None:
        while True:
            if self.host and len(self) > self.limit_segments:
                self._unpublished.note(*self.host.forget_oldest())
            elif len(self._leaves) > 1 and (
                len(self) > self.limit_segments or self._key_tokens > self.limit_tokens
            ):
                self._shrink(next(iter(self._leaves)), 0, 0)
            else:
                return
            self.forgotten += 1

    def chain(self, hashes: Iterable[int]) -> list[Stored]:
        """Those of a prompt's segments that are resident: they come first."""
        resident = takewhile(self._segments.__contains__, hashes)
        found = ((segment, self._segments[segment]) for segment in resident)
        return [(segment, entry.parent, entry.tokens) for segment, entry in found]

    def leaves(self) -> Iterator[int]:
        """Nodes at or below the ends of all chains: those used last first, and then those that are
        on the host alone."""
        for leaf in reversed(self._leaves.values()):
            yield leaf.node
        nodes = (self._on_host[leaf].node for leaf in (self.host.leaves if self.host else ()))
        yield from (node for node in nodes if node != UNKNOWN)

    def evicted(self) -> None:
        """Records an eviction on the device, after which leaves must be checked."""
        self._suspect = True

    def sweep(self, tree: Tree, steps: int) -> None:
        """Checks leaves, the least recently used first, until done or out of steps. The last step
        may take as many more as the longest prompt has tokens to match."""
        while steps > 0 and (self._suspect or self._unswept):
            if not self._unswept:
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
            steps -= self._shrink(segment, *tree.match(leaf.key, tokens), tree)
        if self.host is not None:
            for segment, parent in self.host.sweep(tree, steps):
                self._unpublished.note(segment, parent)
        if not self.settled:
            self.deferred += 1

    def clear(self) -> None:
        """Records that the tree was emptied."""
        for table in (self._segments, self._leaves, self._unswept):
            table.clear()
        if self.host is not None:
            self.host.clear()
        self._key_tokens = 0
        self._suspect = False
        self._unpublished.clear()

    def renew(self) -> None:
        """Makes `take` return everything once more, for a receiver that was cleared."""
        on_host = [] if self.host is None else self.host.parents_first()
        self._unpublished.renew((*self._segments, *on_host))

    def take(self, most: int | None = None) -> Changes:
        """What changed since the last call, as the state is now; of at most `most` segments, those
        that changed first. `changed` says whether there are more."""
        on_host = None if self.host is None else self._on_host
        return self._unpublished.take(most, self._segments, on_host)

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
            self._unpublished.note(segment, entry.parent)

    def _store(self, segment: int, parent: int | None, tokens: int, measured: bool) -> None:
        if parent is not None:
            above = self._segments[parent]
            above.children += 1
            leaf = self._drop_leaf(parent)
            if leaf is not None:
                above.node = leaf.node
        self._segments[segment] = _Segment(parent, tokens - tokens % self.page, measured)
        self._unpublished.note(segment, parent)

    def _add_leaf(self, segment: int, leaf: _Leaf) -> None:
        """Adds a leaf as the most recently used."""
        self._leaves[segment] = leaf
        self._key_tokens += len(leaf.key)

    def _drop_leaf(self, segment: int) -> _Leaf | None:
        leaf = self._leaves.pop(segment, None)
        if leaf is not None:
            self._key_tokens -= len(leaf.key)
        return leaf

    def _shrink(self, segment: int, resident: int, node: int, tree: Tree | None = None) -> int:
        """Shortens a leaf's chain to the `resident` tokens, which end at `node`. What the tree
        keeps of the rest goes to the host. Returns how many nodes of the tree were listed."""
        leaf = self._drop_leaf(segment)
        assert leaf is not None, "only leaves shrink"
        lost: list[tuple[int, _Segment]] = []
        current: int | None = segment
        while current is not None:
            entry = self._segments[current]
            if entry.children:
                break
            if 0 < entry.tokens <= resident:
                self._add_leaf(current, _Leaf(node, leaf.key))
                break
            del self._segments[current]
            lost.append((current, entry))
            if entry.parent is not None:
                self._segments[entry.parent].children -= 1
            current = entry.parent
        if self.host is None:
            for left, entry in reversed(lost):
                self._unpublished.note_left(left, entry.parent, is_kept=False)
            return 0
        return self._move(self.host, lost, leaf.node, tree)

    def _move(
        self, host: HostSegments, lost: Sequence[tuple[int, _Segment]], node: int, tree: Tree | None
    ) -> int:
        """Moves a branch that left the device, its last segment first, to the host as far as the
        tree has it. node: one at or below its end."""
        path: Sequence[tuple[int, int]] = ()
        kept: dict[int, int] = {}  # with their nodes
        for segment, entry in lost:
            for known in (node, entry.node):
                if tree and not path and known != UNKNOWN and tree.keeps(known):
                    path = tree.path(known)
            node = UNKNOWN
            at = bisect_left(path, (entry.tokens, 0))
            if entry.tokens and at < len(path):
                kept[segment] = path[at][1]
            elif kept or host.has_below(segment):
                kept[segment] = UNKNOWN
        for segment, entry in reversed(lost):
            if segment in kept:
                moved = HostSegment(entry.parent, entry.tokens, entry.measured, kept[segment])
                host.add(segment, moved)
            self._unpublished.note_left(segment, entry.parent, is_kept=segment in kept)
        if UNKNOWN in kept.values():
            host.evicted()
        return len(path)

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
        if self.host is not None:
            self.host.check()
            for segment, kept in self.host.segments.items():
                assert segment not in self._segments, f"{segment:x} is held twice"
                parent = kept.parent
                assert parent is None or parent in self._segments or parent in self.host.segments
