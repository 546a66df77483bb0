"""Residency with a host tier, against a tree whose nodes move between device and host."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from radix.residency import HostSegments, Residency
from radix.residency_changes import Changes
from tests.radix.test_residency import SAID, Engine, Node, Said, TokenTree, prompt

A, B, C, D, E = 0xA, 0xB, 0xC, 0xD, 0xE


class TieredTree(TokenTree):
    """A node is on the device, or only on the host once it was demoted. Its children on the device
    are demoted before it; on the host it stays at least as long as its children. One that comes
    back to the device keeps its copy on the host."""

    def __init__(self) -> None:
        self.demoted: set[int] = set()
        self.copied: set[int] = set()
        super().__init__()

    def insert(self, tokens: tuple[int, ...]) -> tuple[int, int]:
        before = {id(node): node.number in self.demoted for node in self.nodes()}
        had, node = super().insert(tokens)
        for new in self.nodes():  # a split leaves the upper part where the whole was
            below = new.children[0] if new.children else None
            if id(new) not in before and below is not None:
                if before.get(id(below)):
                    self.demoted.add(new.number)
                if below.number in self.copied:
                    self.copied.add(new.number)
        self.demoted -= {number for _, number in self.path(node)}
        return had, node

    def demote(self, choice: int, *, backed: bool = True) -> bool:
        """Evicts a leaf of the device; to the host if it is backed up, as inner nodes are."""
        on_device = [n for n in self.nodes() if n is not self.root and n.number not in self.demoted]
        leaves = [n for n in on_device if not any(c in on_device for c in n.children)]
        if not leaves:
            return False
        leaf = leaves[choice % len(leaves)]
        if backed or leaf.children or leaf.number in self.copied:
            self.demoted.add(leaf.number)
            self.copied.add(leaf.number)
        else:
            self._parent(leaf).children.remove(leaf)
        return True

    def evict_host(self, choice: int) -> bool:
        leaves = [n for n in self.nodes() if n.number in self.demoted and not n.children]
        if leaves:
            leaf = leaves[choice % len(leaves)]
            self._parent(leaf).children.remove(leaf)
        return bool(leaves)

    def evicted(self, node: int) -> bool:
        return node in self.demoted or not self.keeps(node)

    def keeps(self, node: int) -> bool:
        return node in {n.number for n in self.nodes()}

    def path(self, node: int) -> list[tuple[int, int]]:
        current = next(n for n in self.nodes() if n.number == node)
        up: list[Node] = []
        while current is not self.root:
            up.append(current)
            current = self._parent(current)
        found, end = [], 0
        for each in reversed(up):
            end += len(each.tokens)
            found.append((end, each.number))
        return found

    def match(self, key: tuple[int, ...], tokens: int) -> tuple[int, int]:
        kept, node = self.reach(key[:tokens])
        found = [(end, n) for end, n in self.path(node) if n not in self.demoted]
        return (min(kept, found[-1][0]), found[-1][1]) if found else (0, self.root.number)

    def reach(self, tokens: tuple[int, ...]) -> tuple[int, int]:
        """How many tokens are in any tier, and the node that has the last."""
        kept, node, _ = self._walk(tokens)
        return kept, node.number


class TieredEngine(Engine):
    """`on_host` is what a subscriber knows of the host."""

    def __init__(self, **options: int) -> None:
        super().__init__(**options)
        self.tree: TieredTree = TieredTree()
        self.host = HostSegments()
        self.held = Residency(host=self.host, **options)
        self.on_host: dict[int, tuple[int | None, int]] = {}

    def demote(self, choice: int = 0, *, backed: bool = True, steps: int = 1 << 30) -> None:
        if self.tree.demote(choice, backed=backed):
            self.held.evicted()
        self.sweep(steps)

    def evict_host(self, choice: int = 0, *, steps: int = 1 << 30) -> None:
        if self.tree.evict_host(choice):
            self.host.evicted()
        self.sweep(steps)

    def sweep(self, steps: int = 1 << 30) -> None:
        self.held.sweep(self.tree, steps)
        self.held.check()

    def flush(self) -> None:
        super().flush()
        self.tree = TieredTree()

    def hear(self, most: int | None = None) -> Changes:
        changes = super().hear(most)
        if changes.cleared:
            self.on_host.clear()
        for segment in changes.host_removed:
            self._forget_on_host(segment)
        for segment, parent, tokens in changes.host:
            known = parent is None or parent in self.published or parent in self.on_host
            assert known, "a child was published before its parent"
            self.on_host[segment] = (parent, tokens)
        for segment, *_ in changes.stored:
            self.on_host.pop(segment, None)
        return changes

    def _forget_on_host(self, segment: int) -> None:
        self.on_host.pop(segment, None)
        for below in [s for s, (parent, _) in self.on_host.items() if parent == segment]:
            self._forget_on_host(below)

    def tokens(self) -> dict[int, int]:
        return {segment: entry.tokens for segment, entry in self.held._segments.items()}

    def host_tokens(self) -> dict[int, int]:
        return {segment: entry.tokens for segment, entry in self.host.segments.items()}


def two_turns() -> TieredEngine:
    """A conversation of two turns, each a node."""
    engine = TieredEngine()
    engine.run([A], [100], prompt((1, 40)))
    engine.run([A, B], [100, 200], prompt((1, 40), (2, 30)))
    engine.hear()
    return engine


def test_what_the_device_gives_up_is_on_the_host_until_a_request_brings_it_back() -> None:
    engine = two_turns()
    engine.demote()
    assert engine.hear() == Changes(False, [B], [], [], [(B, A, 70)])
    engine.demote()
    assert engine.hear() == Changes(False, [A], [], [], [(A, None, 40)])
    assert (engine.tokens(), engine.host_tokens()) == ({}, {A: 40, B: 70})
    engine.run([A, B], [100, 200], prompt((1, 40), (2, 30)))
    assert engine.hear() == Changes(False, [], [(A, None, 40), (B, A, 70)])
    assert engine.host_tokens() == {}


def test_both_turns_that_left_at_once_are_on_the_host() -> None:
    engine = two_turns()
    engine.tree.demote(0)
    engine.tree.demote(0)
    engine.held.evicted()
    engine.sweep()
    assert engine.hear() == Changes(False, [A], [], [], [(A, None, 40), (B, A, 70)])


def test_what_the_host_evicts_is_removed_from_its_end() -> None:
    engine = two_turns()
    engine.demote()
    engine.demote()
    engine.hear()
    engine.evict_host()
    assert engine.hear().host_removed == [B]
    assert engine.on_host == {A: (None, 40)}
    engine.evict_host()
    assert engine.hear().host_removed == [A]
    assert len(engine.held) == 0


def test_the_rest_stays_on_the_host_if_the_last_turn_had_no_copy() -> None:
    engine = two_turns()
    engine.tree.demote(0, backed=False)
    engine.tree.demote(0)
    engine.held.evicted()
    engine.sweep()
    changes = engine.hear()
    assert (changes.host, changes.host_removed) == ([(A, None, 40)], [B])


def test_without_a_copy_a_segment_is_gone_from_both() -> None:
    engine = two_turns()
    engine.demote(backed=False)
    assert engine.hear() == Changes(False, [B], [], [B], [])


def test_a_segment_inside_a_node_is_on_the_host_as_far_as_the_node_is() -> None:
    engine = TieredEngine()
    engine.run([A, B, C], [100, 200, 400], prompt((1, 80)))
    engine.demote()
    assert engine.host_tokens() == {A: 20, B: 40, C: 80}
    # Another prompt forks within it: what both share is on the device, and the node's rest is not.
    engine.run([A, D], [100, 400], (*prompt((1, 30)), *prompt((2, 50))))
    assert (engine.tokens(), engine.host_tokens()) == ({A: 30, D: 80}, {B: 40, C: 80})
    engine.evict_host()
    assert engine.host_tokens() == {}
    assert engine.tokens() == {A: 30, D: 80}


def test_a_branch_on_the_device_keeps_what_it_shares_there() -> None:
    engine = TieredEngine()
    shared = prompt((1, 40))
    engine.run([A, B], [100, 200], (*shared, *prompt((2, 60))))
    engine.run([A, C], [100, 200], (*shared, *prompt((3, 30))))
    engine.hear()
    engine.demote(0)
    assert engine.hear() == Changes(False, [B], [], [], [(B, A, 100)])
    engine.demote(0)
    engine.demote(0)
    assert engine.host_tokens() == {A: 40, B: 100, C: 70}
    engine.evict_host(0)
    engine.evict_host(0)
    assert engine.host_tokens() == {A: 40}, "the shared part is a leaf on the host now"


def test_a_sweep_out_of_steps_goes_on_with_the_host() -> None:
    engine = TieredEngine()
    for name in range(1, 11):
        engine.run([name], [1], prompt((name, 5)))
        engine.demote()
    for _ in range(10):
        engine.tree.evict_host(0)
    engine.host.evicted()
    engine.held.sweep(engine.tree, 4)
    assert 0 < len(engine.held) < 10
    assert not engine.held.settled
    engine.held.sweep(engine.tree, 40)
    assert (len(engine.held), engine.held.settled) == (0, True)


def test_beyond_the_limit_the_segments_that_came_to_the_host_first_are_forgotten() -> None:
    engine = TieredEngine(limit_segments=3)
    for name in (1, 2, 3, 4):
        engine.run([name], [1], prompt((name, 10)))
        engine.demote()
        engine.hear()
    assert engine.host_tokens().keys() == {2, 3, 4}
    assert engine.held.forgotten == 1
    engine.run([5], [1], prompt((5, 10)))
    assert engine.hear().host_removed == [2]


def test_a_flush_clears_the_host_too() -> None:
    engine = two_turns()
    engine.demote()
    engine.flush()
    assert engine.hear() == Changes(True, [], [])
    assert len(engine.held) == 0


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("run"), SAID, st.integers(1, 60)),
        st.tuples(st.just("demote"), st.integers(0, 9), st.booleans()),
        st.tuples(st.just("evict"), st.integers(0, 9)),
        st.tuples(st.just("burst"), st.integers(0, 9)),
        st.tuples(st.just("hear"), st.integers(1, 3)),
        st.tuples(st.just("renew")),
        st.tuples(st.just("flush")),
    ),
    max_size=40,
)


@given(STEPS, st.sampled_from([1, 4]))
@example(
    [("run", Said((1,)), 6), ("demote", 0, True), ("run", Said((1,)), 1), ("demote", 0, False)], 1
)
@example([("run", Said((4, 1)), 12), ("demote", 0, True), ("run", Said((4,)), 8), ("hear", 1)], 1)
@example(
    [
        *(("run", Said((1, 1)), 8), ("demote", 0, True), ("renew",), ("hear", 1)),
        *(("run", Said((1, 1)), 8), ("hear", 2)),
    ],
    1,
)
def test_no_tier_is_claimed_to_have_more_than_it_has(
    steps: list[tuple[object, ...]], page: int
) -> None:
    engine = TieredEngine(page=page)
    seen: dict[int, set[Said]] = {}
    for step in steps:
        match step:
            case ("run", Said() as said, int(upto)):
                for segment in said.hashes:
                    seen.setdefault(segment, set()).add(said)
                engine.run(said.hashes, said.ends, said.tokens, upto)
            case ("demote", int(choice), bool(backed)):
                engine.demote(choice, backed=backed)
            case ("burst", int(choice)):  # the sweep comes after several evictions
                engine.tree.demote(choice)
                engine.tree.demote(choice + 1, backed=False)
                engine.tree.evict_host(choice)
                engine.held.evicted()
                engine.host.evicted()
                engine.sweep()
            case ("evict", int(choice)):
                engine.evict_host(choice)
            case ("hear", int(most)):
                engine.hear(most)
            case ("renew",):
                engine.published.clear()
                engine.on_host.clear()
                engine.held.renew()
            case _:
                engine.flush()
        for segment, tokens in engine.tokens().items():
            assert tokens <= max(engine.tree.match(s.tokens, 1 << 30)[0] for s in seen[segment])
        for segment, tokens in engine.host_tokens().items():
            assert tokens <= max(engine.tree.reach(s.tokens)[0] for s in seen[segment])
    while engine.held.changed:
        engine.hear(2)
    assert {s: t for s, (_, t) in engine.published.items()} == engine.tokens()
    assert {s: t for s, (_, t) in engine.on_host.items()} == engine.host_tokens()
