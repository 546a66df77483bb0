"""The tree of pinned prefixes, against the plain set of all of them."""

from __future__ import annotations

import sys
from array import array
from collections import Counter
from collections.abc import Hashable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radix.pin_tree import PinTree, Trial

Tokens = tuple[int, ...]
Prefixes = dict[tuple[Hashable, Tokens], str]


def key(tokens: Sequence[int]) -> bytes:
    return array("q", tokens).tobytes()


class Model:
    """Every prefix of every pin, with its owner: one for each token."""

    def __init__(self) -> None:
        self.pins: dict[int, tuple[Hashable, Tokens]] = {}
        self.charged: Prefixes = {}

    def insert(self, space: Hashable, tokens: Tokens, pin: int, owner: str) -> None:
        self.pins[pin] = (space, tokens)
        for end in range(1, len(tokens) + 1):
            self.charged.setdefault((space, tokens[:end]), owner)

    def remove(self, *pins: int) -> None:
        for pin in pins:
            del self.pins[pin]
        self.charged = self.without()

    def without(self, *left_out: int) -> Prefixes:
        needed = {
            (space, tokens[:end])
            for pin, (space, tokens) in self.pins.items()
            if pin not in left_out
            for end in range(1, len(tokens) + 1)
        }
        return {prefix: owner for prefix, owner in self.charged.items() if prefix in needed}

    def find(self, space: Hashable, tokens: Tokens) -> list[int]:
        found = [
            (len(pinned), pin)
            for pin, (its_space, pinned) in self.pins.items()
            if its_space == space and tokens[: len(pinned)] == pinned
        ]
        return [pin for _, pin in sorted(found)]


def charges(prefixes: Prefixes) -> dict[str, int]:
    owners = list(prefixes.values())
    return {owner: owners.count(owner) for owner in OWNERS}


OWNERS = ("ann", "ben")
spaces = st.sampled_from(["", "lora"])
runs = st.lists(st.integers(0, 1), min_size=1, max_size=7).map(tuple)
insertions = st.tuples(spaces, runs, st.sampled_from(OWNERS))


@given(st.lists(st.one_of(insertions, st.integers(0, 20)), max_size=30))
def test_the_tree_has_exactly_the_prefixes_of_its_pins(steps: list[object]) -> None:
    tree, model = PinTree(), Model()
    for pin, step in enumerate(steps):
        if isinstance(step, tuple):
            space, tokens, owner = step
            if (space, tokens) in model.pins.values():
                continue
            model.insert(space, tokens, pin, owner)
            tree.insert(space, key(tokens), pin, owner)
        elif isinstance(step, int) and model.pins:
            gone = list(model.pins)[step % len(model.pins)]
            model.remove(gone)
            tree.remove(gone)
        tree.check()
        assert tree.tokens == len(model.charged)
        assert {owner: tree.tokens_of(owner) for owner in OWNERS} == charges(model.charged)
        for space, tokens in model.pins.values():
            for longer in (tokens, (*tokens, 0), (*tokens, 1, 1)):
                assert tree.find(space, key(longer)) == model.find(space, longer)
                for end in range(len(longer)):
                    assert tree.find(space, key(longer), end) == model.find(space, longer[:end])
    for pin in list(model.pins):
        tree.remove(pin)
    tree.check()
    assert_nothing_left(tree)


@given(
    st.lists(insertions, min_size=1, max_size=12, unique_by=lambda step: step[:2]),
    st.lists(st.integers(0, 11), max_size=20),
)
def test_a_trial_counts_the_tokens_that_removals_would_leave(
    steps: list[tuple[str, Tokens, str]], choices: list[int]
) -> None:
    tree, model = PinTree(), Model()
    for pin, (space, tokens, owner) in enumerate(steps):
        tree.insert(space, key(tokens), pin, owner)
        model.insert(space, tokens, pin, owner)
    trial, left_out = Trial(tree), set[int]()
    for choice in choices:
        pin = choice % len(steps)
        (trial.restore if pin in left_out else trial.remove)(pin)
        left_out ^= {pin}
        left = model.without(*left_out)
        assert trial.tokens == len(left)
        assert {owner: trial.tokens_of(owner) for owner in OWNERS} == charges(left)
    assert tree.tokens == len(model.charged), "a trial changes nothing"
    tree.check()


def assert_nothing_left(tree: PinTree) -> None:
    assert tree.tokens == 0
    assert not any((tree._roots, tree._nodes, tree._charges))


def nodes(tree: PinTree) -> int:
    found = list(tree._roots.values())
    for node in found:
        found += node.children.values()
    return len(found)


def test_removed_forks_leave_no_cuts() -> None:
    tree = PinTree()
    tree.insert("", key(range(1000)), 0, "ann")
    size = nodes(tree)
    for pin in range(1, 1000):
        tree.insert("", key([*range(pin), -1]), pin, "ben")
    for pin in range(1, 1000):
        tree.remove(pin)
    tree.check()
    assert nodes(tree) == size
    assert tree.find("", key(range(1000))) == [0]


def test_tokens_stay_charged_to_the_owner_that_pinned_them_first() -> None:
    tree = PinTree()
    tree.insert("", key(range(10)), 1, "ann")
    tree.insert("", key(range(30)), 2, "ben")
    tree.insert("", key([*range(5), 99]), 3, "ben")
    assert (tree.tokens_of("ann"), tree.tokens_of("ben")) == (10, 21)
    tree.remove(1)
    assert (tree.tokens_of("ann"), tree.tokens_of("ben")) == (10, 21)
    tree.remove(2)
    assert (tree.tokens_of("ann"), tree.tokens_of("ben")) == (5, 1)


def test_tokens_are_compared_whole() -> None:
    """Ids that have bytes in common are different tokens all the same."""
    tree = PinTree()
    tree.insert("", key([1, 0x0101]), 1, "")
    tree.insert("", key([1, 0x0201]), 2, "")
    assert tree.tokens == 3
    assert tree.find("", key([0x0100, 1])) == []


def test_a_second_pin_on_the_same_prefix_is_a_bug() -> None:
    tree = PinTree()
    tree.insert("", key([1]), 1, "")
    with pytest.raises(AssertionError, match="pinned already"):
        tree.insert("", key([1]), 2, "")


def test_a_long_prompt_is_compared_as_memory() -> None:
    """No step may run once per token: prompts have hundreds of thousands."""
    tokens = array("q", range(1_000_000))
    long = tokens.tobytes()
    tokens[999_990] = -1
    forked = tokens.tobytes()
    tree = PinTree()
    calls = Counter[str]()
    sys.setprofile(lambda _, event, __: calls.update([event]))
    try:
        tree.insert("", long, 1, "")
        found = tree.find("", long)
        tree.insert("", forked, 2, "")
    finally:
        sys.setprofile(None)
    assert found == [1]
    assert tree.tokens == 1_000_010
    assert calls.total() < 500
