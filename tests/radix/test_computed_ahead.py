"""What was computed ahead and is unread, and how much of the cache it takes from others."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hypothesis import given
from hypothesis import strategies as st

from radix.computed_ahead import ComputedAhead, Unread
from scheduler.prefill import takeable_tokens

POOL = 100


def nothing(_: int) -> bool:
    return False


def test_tokens_count_until_they_are_read_or_evicted() -> None:
    ahead = ComputedAhead()
    ahead.add("ann", 1, 10, is_worthless=True)
    ahead.add("ann", 2, 5, is_worthless=True)
    ahead.add("ben", 3, 7, is_worthless=False)
    assert ahead.unread(nothing) == Unread(22, 15)
    assert ahead.unread(lambda node: node == 1) == Unread(12, 5)
    assert ahead.unread(nothing) == Unread(12, 5), "what was evicted does not come back"
    assert ahead.read("ann") == 0
    assert ahead.unread(nothing) == Unread(7, 0)
    ahead.clear()
    assert ahead.unread(nothing) == Unread()


def test_loaded_tokens_are_counted_until_they_are_read_and_take_no_share() -> None:
    ahead = ComputedAhead(limit=2)
    for name, tokens in (("ann", 10), ("ben", 7), ("ann", 5), ("ben", 0)):
        ahead.load(name, tokens)
    assert ahead.unread(nothing) == Unread()
    assert [ahead.read("ann"), ahead.read("ann"), ahead.read("ben")] == [15, 0, 7]
    for name in ("ann", "ben", "cy"):
        ahead.load(name, 1)
    assert [ahead.read(name) for name in ("ann", "ben", "cy")] == [0, 1, 1]


def test_the_conversations_are_bounded() -> None:
    ahead = ComputedAhead(limit=2)
    for node, name in enumerate(("ann", "ben", "ann", "cy")):
        ahead.add(name, node, 10, is_worthless=True)
    assert ahead.unread(nothing) == Unread(20, 20), "the oldest conversation counts as read"


@dataclass
class Entry:
    """A cached token, a node of its own."""

    conversation: str = ""
    is_guess: bool = False
    is_pinned: bool = False


@dataclass
class Engine:
    """A pool that evicts guesses first, then the least recently used. entries: in that order."""

    most: int
    entries: dict[int, Entry] = field(default_factory=dict)
    ahead: ComputedAhead = field(default_factory=ComputedAhead)
    last: int = 0

    @property
    def free(self) -> int:
        return POOL - len(self.entries)

    def evictable(self) -> list[int]:
        """Nodes in the order of eviction."""
        nodes = [n for n, entry in self.entries.items() if not entry.is_pinned]
        return sorted(nodes, key=lambda node: not self.entries[node].is_guess)

    def put(self, tokens: int, entry: Entry) -> list[Entry]:
        """Stores so many tokens; what was evicted for them."""
        wanted = max(tokens - self.free, 0)
        evicted = [self.entries.pop(node) for node in self.evictable()[:wanted]]
        for _ in range(tokens):
            self.last += 1
            self.entries[self.last] = replace(entry)
        assert self.free >= 0
        return evicted

    def slice(self, tokens: int, entry: Entry) -> list[Entry]:
        """Computes so many tokens ahead; what was evicted for them."""
        evicted = self.put(tokens, entry)
        for node in list(self.entries)[-tokens:]:
            self.ahead.add(entry.conversation, node, 1, is_worthless=entry.is_guess)
        return evicted

    def read(self, conversation: str) -> None:
        """The conversation's request came: what was computed ahead is cache like any other."""
        self.ahead.read(conversation)
        for entry in self.entries.values():
            entry.is_guess &= entry.conversation != conversation

    def unread(self) -> Unread:
        return self.ahead.unread(lambda node: node not in self.entries)

    def usable(self) -> int:
        ahead, worthless = self.unread()
        return (
            self.free
            + worthless
            + takeable_tokens(
                worthless_tokens=worthless,
                evictable_tokens=len(self.evictable()),
                ahead_tokens=ahead,
                most=self.most,
            )
        )


NAMES = st.sampled_from(["ann", "ben", "cy"])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("request"), NAMES, st.integers(1, 30), st.booleans()),
        st.tuples(st.just("slice"), NAMES, st.integers(1, 30), st.booleans()),
    ),
    max_size=60,
)


@given(STEPS, st.sampled_from([0, 5, 20, POOL]))
def test_what_is_computed_ahead_takes_a_share_from_others_and_nothing_from_pins(
    steps: list[tuple[str, str, int, bool]], most: int
) -> None:
    engine = Engine(most)
    for kind, name, tokens, flag in steps:
        if kind == "request":
            pinned = sum(entry.is_pinned for entry in engine.entries.values())
            engine.read(name)
            engine.put(tokens, Entry(is_pinned=flag and pinned + tokens <= POOL // 2))
        elif tokens <= engine.usable():
            before = engine.unread().tokens
            evicted = engine.slice(tokens, Entry(name, is_guess=flag))
            assert not any(entry.is_pinned for entry in evicted)
            # As all that is unread counts, what it has taken together is a share at most, too.
            assert sum(not entry.is_guess for entry in evicted) <= max(most - before, 0)


def test_a_full_pool_stops_it_only_where_nothing_may_be_taken() -> None:
    for most, usable in ((0, 0), (5, 5), (1000, POOL)):
        engine = Engine(most)
        engine.put(POOL, Entry())
        assert engine.usable() == usable
    engine = Engine(5)
    engine.put(POOL, Entry())
    engine.slice(5, Entry("ann", is_guess=True))
    assert engine.usable() == 5, "a guess takes the place of an older one"
    engine.slice(5, Entry("ben", is_guess=True))
    assert engine.unread() == Unread(5, 5)
    engine.read("ben")
    assert engine.usable() == 5, "what was read leaves room for more"
