"""Residency, against a small tree of tokens that splits and evicts as the one of SGLang does."""

from __future__ import annotations

import sys
from typing import NamedTuple

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from radix.residency import Residency
from radix.residency_changes import Changes
from tests.radix.held import everything

A, B, C, D, E = 0xA, 0xB, 0xC, 0xD, 0xE


class Node:
    def __init__(self, number: int, tokens: tuple[int, ...]) -> None:
        self.number = number
        self.tokens = tokens
        self.children: list[Node] = []


class TokenTree:
    """A compressed tree of token sequences. A split leaves the number with the lower part."""

    def __init__(self) -> None:
        self._numbers = 0
        self.root = self._node(())

    def _node(self, tokens: tuple[int, ...]) -> Node:
        self._numbers += 1
        return Node(self._numbers, tokens)

    def _walk(self, tokens: tuple[int, ...]) -> tuple[int, Node, int]:
        """Tokens that match, the deepest node that has any of them, and how many of its own."""
        at, node, own = 0, self.root, 0
        while own == len(node.tokens):
            following = [c for c in node.children if c.tokens[:1] == tokens[at : at + 1]]
            if not following:
                break
            node = following[0]
            own = next(
                (i for i, t in enumerate(node.tokens) if tokens[at + i : at + i + 1] != (t,)),
                len(node.tokens),
            )
            at += own
        return at, node, own

    def insert(self, tokens: tuple[int, ...]) -> tuple[int, int]:
        """How many tokens were there, and the number of the node that ends them now."""
        had, node, own = self._walk(tokens)
        if own < len(node.tokens) and had < len(tokens):
            upper = self._node(node.tokens[:own])
            parent = self._parent(node)
            parent.children[parent.children.index(node)] = upper
            upper.children, node.tokens = [node], node.tokens[own:]
            node = upper
        if had < len(tokens):
            node.children.append(self._node(tokens[had:]))
            node = node.children[-1]
        return had, node.number

    def _parent(self, node: Node) -> Node:
        return next(n for n in self.nodes() if node in n.children)

    def nodes(self) -> list[Node]:
        found = [self.root]
        for node in found:
            found += node.children
        return found

    def evict_leaf(self, choice: int) -> bool:
        leaves = [n for n in self.nodes() if not n.children and n is not self.root]
        if leaves:
            leaf = leaves[choice % len(leaves)]
            self._parent(leaf).children.remove(leaf)
        return bool(leaves)

    def evicted(self, node: int) -> bool:
        return node not in {n.number for n in self.nodes()}

    def match(self, key: tuple[int, ...], tokens: int) -> tuple[int, int]:
        matched, node, _ = self._walk(key[:tokens])
        return matched, node.number


class Engine:
    """A tree and what is held of it, fed as the engine's adapter does."""

    def __init__(self, **options: int) -> None:
        self.tree = TokenTree()
        self.held = Residency(**options)
        self.published: dict[int, tuple[int | None, int]] = {}

    def run(
        self,
        hashes: list[int],
        ends: list[int],
        tokens: tuple[int, ...],
        upto: int | None = None,
        own: int = 0,
    ) -> None:
        part = tokens[:upto]
        had, node = self.tree.insert(part)
        self.held.add(hashes, ends, key=tokens, resident=len(part), node=node, had=had, own=own)
        self.held.check()

    def evict(self, choice: int, steps: int = 1 << 30) -> None:
        if self.tree.evict_leaf(choice):
            self.held.evicted()
            self.held.sweep(self.tree, steps)
        self.held.check()

    def flush(self) -> None:
        self.tree = TokenTree()
        self.held.clear()
        self.held.check()

    def hear(self, most: int | None = None) -> Changes:
        """Applies what is published, as a subscriber does."""
        changes = self.held.take(most)
        if most is not None:
            assert len(changes.removed) + len(changes.stored) <= most
        if changes.cleared:
            self.published.clear()
        for segment in changes.removed:
            self._forget(segment)
        for segment, parent, tokens in changes.stored:
            assert parent is None or parent in self.published, (
                "a child was published before its parent"
            )
            self.published[segment] = (parent, tokens)
        return changes

    def _forget(self, segment: int) -> None:
        self.published.pop(segment, None)
        for below in [s for s, (parent, _) in self.published.items() if parent == segment]:
            self._forget(below)

    def tokens(self) -> dict[int, int]:
        return {segment: tokens for segment, _, tokens in everything(self.held)}


def prompt(*runs: tuple[int, int]) -> tuple[int, ...]:
    """Tokens: of each pair (name, count), `count` tokens that no other name has."""
    return tuple(name * 10_000 + at for name, count in runs for at in range(count))


def test_between_known_ends_an_end_is_estimated_by_bytes() -> None:
    engine = Engine()
    engine.run([A, B, C], [100, 300, 400], prompt((1, 40)))
    assert engine.tokens() == {A: 10, B: 30, C: 40}
    # C is known: what follows is spread over the rest alone.
    engine.run([A, B, C, D, E], [100, 300, 400, 500, 800], prompt((1, 40), (2, 80)))
    assert engine.tokens() == {A: 10, B: 30, C: 40, D: 60, E: 120}


@pytest.mark.parametrize("fork", [12, 38])
def test_where_a_chain_forks_the_tokens_shared_are_measured(fork: int) -> None:
    engine = Engine()
    engine.run([A, B, C], [100, 200, 400], prompt((1, 80)))
    assert engine.tokens()[B] == 40
    engine.hear()
    engine.run([A, B, D], [100, 200, 400], (*prompt((1, fork)), *prompt((2, 80))))
    assert engine.tokens()[B] == fork
    assert engine.tokens()[A] == min(20, fork)
    engine.hear()
    assert engine.published[B] == (A, fork)


def test_a_measured_end_is_lowered_by_later_forks_and_never_raised() -> None:
    engine = Engine()
    engine.run([A, B], [100, 200], prompt((1, 80)))
    for fork, expected in ((30, 30), (36, 30), (20, 20)):
        engine.run([A, fork], [100, 200], (*prompt((1, fork)), *prompt((fork, 50))))
        assert engine.tokens()[A] == expected


def test_an_estimate_is_not_raised_beyond_the_segment_that_differs() -> None:
    engine = Engine()
    engine.run([A, B, C], [10, 90, 100], prompt((1, 100)))
    # The chains differ behind A, the tokens nowhere before the end.
    engine.run([A, D, E], [10, 40, 100], (*prompt((1, 99)), 7))
    assert engine.tokens()[A] == 40


def test_a_prompt_in_parts_is_held_as_far_as_it_has_come() -> None:
    engine = Engine()
    chain = [A, B, C], [100, 200, 400]
    engine.run(*chain, prompt((1, 80)), upto=39)
    assert engine.tokens() == {A: 20}
    engine.run(*chain, prompt((1, 80)), upto=40, own=39)
    assert engine.tokens() == {A: 20, B: 40}
    engine.run(*chain, prompt((1, 80)), own=40)
    assert engine.tokens() == {A: 20, B: 40, C: 80}


def test_only_whole_pages_are_claimed_and_a_last_page_in_part_is_no_obstacle() -> None:
    held = Residency(page=16, slack=15)
    held.add([A, B], [50, 100], key=range(100), resident=96, node=1, had=0)
    assert {s: t for s, _, t in everything(held)} == {A: 48, B: 96}


def test_less_than_a_page_is_not_held() -> None:
    held = Residency(page=16, slack=15)
    held.add([A], [50], key=range(15), resident=0, node=1, had=0)
    assert (len(held), held.changed) == (0, False)


def test_a_bigram_tree_holds_a_token_less_than_the_prompt() -> None:
    held = Residency(slack=1)
    held.add([A], [50], key=range(100), resident=99, node=1, had=0)
    assert everything(held) == [(A, None, 99)]


def test_a_part_that_the_tree_has_whole_measures_nothing() -> None:
    engine = Engine()
    engine.run([A, B, C], [100, 200, 400], prompt((1, 80)))
    engine.run([A, B, D], [100, 200, 400], (*prompt((1, 50)), *prompt((2, 30))), upto=30)
    assert engine.tokens() == {A: 20, B: 40, C: 80}


def test_a_prompts_end_is_known_and_an_answer_behind_it_does_not_move_it() -> None:
    engine = Engine()
    engine.run([A], [100], prompt((1, 40)))
    engine.tree.insert(prompt((1, 40), (2, 10)))  # the answer
    engine.run([A, B, C], [100, 200, 300], prompt((1, 40), (2, 10), (3, 50)))
    assert engine.tokens() == {A: 40, B: 70, C: 100}


def test_an_eviction_removes_the_topmost_lost_segment_and_keeps_the_rest() -> None:
    engine = Engine()
    shared = prompt((1, 40))
    engine.run([A, B, C], [100, 200, 300], (*shared, *prompt((2, 60))))
    engine.run([A, D], [100, 200], (*shared, *prompt((3, 30))))
    engine.hear()
    engine.evict(0)  # the first branch's own tokens
    assert engine.hear() == Changes(False, [B], [])
    assert engine.tokens() == {A: 40, D: 70}
    engine.evict(0)
    assert engine.hear() == Changes(False, [D], [])
    assert engine.tokens() == {A: 40}
    engine.evict(0)
    assert engine.hear() == Changes(False, [A], [])


def test_an_eviction_below_the_last_segment_removes_nothing() -> None:
    engine = Engine()
    tokens = prompt((1, 40))
    _, node = engine.tree.insert((*tokens, *prompt((2, 9))))
    engine.held.add([A], [100], key=tokens, resident=40, node=node, had=0)
    engine.tree.insert((*tokens, 5))  # the prompt's end is a node of its own now
    engine.hear()
    for _ in range(2):
        engine.evict(0)
        assert engine.tokens() == {A: 40}
    engine.evict(0)
    assert engine.hear().removed == [A]


def test_a_clear_comes_before_later_changes() -> None:
    engine = Engine()
    engine.run([A], [1], prompt((1, 5)))
    engine.hear()
    engine.held.clear()
    engine.held.add([B], [1], key=(1, 2), resident=2, node=1, had=0)
    assert engine.hear() == Changes(True, [], [(B, None, 2)])
    assert engine.published == {B: (None, 2)}
    engine.held.evicted()
    engine.held.clear()
    assert engine.held.settled


def test_a_sweep_out_of_steps_goes_on_with_the_next_leaf_and_is_counted() -> None:
    engine = Engine()
    for name in range(1, 11):
        engine.run([name], [1], prompt((name, 5)))
    engine.evict(9, steps=4)
    assert (len(engine.held), engine.held.deferred, engine.held.settled) == (10, 1, False)
    engine.held.sweep(engine.tree, 4)
    engine.held.sweep(engine.tree, 4)
    assert (len(engine.held), engine.held.deferred, engine.held.settled) == (9, 2, True)


def test_only_leaves_that_lost_their_node_are_matched_and_a_match_takes_steps() -> None:
    asked: list[int] = []

    class Tree:
        def evicted(self, node: int) -> bool:
            return node != 2

        def match(self, key: range, tokens: int) -> tuple[int, int]:
            asked.append(tokens)
            return 0, 0

    held = Residency()
    for name in (1, 2, 3, 4):
        held.add([name], [1], key=range(3000), resident=3000, node=name, had=0)
    held.evicted()
    held.sweep(Tree(), 13)
    assert asked == [3000, 3000]
    held.sweep(Tree(), 13)
    assert asked == [3000] * 3
    assert [segment for segment, *_ in everything(held)] == [2]


def test_nothing_is_measured_before_evictions_are_checked() -> None:
    engine = Engine()
    engine.run([A, B], [100, 200], prompt((1, 40)))
    engine.evict(0, steps=0)
    engine.run([A, C], [100, 200], prompt((1, 20), (2, 20)))
    assert engine.tokens()[A] == 20
    engine.held.sweep(engine.tree, 1 << 30)
    engine.held.check()
    assert engine.tokens() == {A: 20, C: 40}


@pytest.mark.parametrize("limit", ["limit_segments", "limit_tokens"])
def test_beyond_a_limit_the_branch_unused_for_longest_is_forgotten(limit: str) -> None:
    engine = Engine(**{limit: 3 if limit == "limit_segments" else 30})
    for name in (1, 2, 3):
        engine.run([name], [1], prompt((name, 10)))
    engine.run([1], [1], prompt((1, 10)))
    engine.hear()
    engine.run([4], [1], prompt((4, 10)))
    assert engine.held.forgotten == 1
    assert engine.hear().removed == [2]
    assert engine.tokens().keys() == {1, 3, 4}


def test_a_segment_that_comes_back_between_two_parts_of_the_changes_brings_nothing_else_back() -> (
    None
):
    engine = Engine()
    engine.run([A], [100], prompt((1, 20)))
    engine.run([A, B], [100, 200], prompt((1, 20), (2, 20)))
    engine.hear()
    engine.evict(0)
    engine.evict(0)
    engine.hear(1)
    engine.run([A], [100], prompt((1, 20)))
    while engine.held.changed:
        engine.hear(1)
    assert engine.published.keys() == {A}


class Said(NamedTuple):
    """A request: its messages, each a name; names decide texts, hashes and tokens."""

    names: tuple[int, ...]

    @property
    def hashes(self) -> list[int]:
        return [hash(self.names[: at + 1]) & 0xFFFFFFFF for at in range(len(self.names))]

    @property
    def ends(self) -> list[int]:
        return [sum(10 + 7 * name for name in self.names[: at + 1]) for at in range(len(self))]

    def __len__(self) -> int:
        return len(self.names)

    @property
    def tokens(self) -> tuple[int, ...]:
        # A header that all share, tokens in no fixed ratio to bytes, an end that no other has.
        lengths = [(name, 1 + name * name % 11) for name in self.names]
        return (*range(3), *prompt(*lengths), 999_999)


SAID = st.lists(st.integers(1, 4), min_size=1, max_size=5).map(lambda names: Said(tuple(names)))
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("run"), SAID, st.integers(1, 60)),
        st.tuples(st.just("evict"), st.integers(0, 9)),
        st.tuples(st.just("hear"), st.integers(1, 3)),
        st.tuples(st.just("renew")),
        st.tuples(st.just("flush")),
    ),
    max_size=40,
)


@given(STEPS, st.sampled_from([1, 4]))
@example(
    [("run", Said((1,)), 4), ("run", Said((4, 3)), 10), ("run", Said((4,)), 10), ("evict", 8)], 1
)
def test_the_claims_equal_the_resident_tokens(steps: list[tuple[object, ...]], page: int) -> None:
    engine = Engine(page=page)
    seen: dict[int, set[Said]] = {}

    def resident(segment: int, *, ends: bool = False) -> int:
        """The resident tokens of a prompt with the segment; `ends`: of the one that ends there."""
        with_it = (s for s in seen[segment] if not ends or s.hashes[-1] == segment)
        return max((engine.tree.match(s.tokens, 1 << 30)[0] for s in with_it), default=sys.maxsize)

    for step in steps:
        before = engine.tokens()
        match step:
            case ("run", Said() as said, int(upto)):
                for segment in said.hashes:
                    seen.setdefault(segment, set()).add(said)
                engine.run(said.hashes, said.ends, said.tokens, upto)
                held = engine.tokens()
                assert before.keys() <= held.keys()
                if upto >= len(said.tokens):
                    assert said.hashes[-1] in held
            case ("evict", int(choice)):
                engine.evict(choice)
                for segment in before.keys() - engine.tokens().keys():
                    # A prompt that ends there claimed its own last token, too.
                    most, own = resident(segment), resident(segment, ends=True)
                    assert before[segment] == 0 or min(most, own) < before[segment]
            case ("hear", int(most)):
                engine.hear(most)
            case ("renew",):
                engine.published.clear()
                engine.held.renew()
            case _:
                engine.flush()
        for segment, tokens in engine.tokens().items():
            assert tokens <= resident(segment)
    while engine.held.changed:
        engine.hear(2)
    held = everything(engine.held)
    assert engine.published == {s: (parent, tokens) for s, parent, tokens in held}
