"""What an engine that ends stores: what matters most first, each node once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from sgl_ext.engine.tiers.leaving import Leaving


class Place(NamedTuple):
    node_id: int


class Tree:
    """A tree of nodes, each with its parent, as the cache and its core. room: of host memory, in
    nodes. copied: nodes with a host copy."""

    def __init__(self, parents: dict[int, int | None], copied: set[int], room: int) -> None:
        self.tree_core = self
        self.ongoing_backup: list[int] = []
        self.stored: list[int] = []
        self._parents = parents
        self._copied = set(copied)
        self._room = room

    def collect_path_info(self, ends: Sequence[int]) -> tuple[tuple[Place, ...], ...]:
        (node,) = ends
        path: list[Place] = []
        at: int | None = node
        while at is not None:
            parent = self._parents[at]
            path.insert(0, Place(at))
            at = parent
        return (tuple(path),)

    def is_backuped(self, node: int) -> bool:
        return node in self._copied

    def backup_node_for_write_back(self, node: int) -> bool:
        if not self._room:
            return False
        self._room -= 1
        self._copied.add(node)
        self.write_backup_storage(node)
        return True

    def write_backup_storage(self, node: int) -> None:
        self.ongoing_backup.append(node)

    def write(self) -> None:
        """The storage's thread has written all, so host memory may be evicted."""
        self.stored += self.ongoing_backup
        self._room += len(self.ongoing_backup)
        self.ongoing_backup = []


def store(tree: Any, nodes: Sequence[int]) -> list[int]:
    leaving, steps = Leaving(tree, nodes), 0
    while not leaving.step():
        tree.write()
        steps += 1
        assert steps < 1000
    return list(tree.stored)


CHAIN = {1: None, 2: 1, 3: 2, 4: 1}


def test_the_first_prefix_is_stored_first_and_from_its_beginning() -> None:
    assert store(Tree(CHAIN, {1, 2}, 10), [3, 4]) == [1, 2, 3, 4]
    assert store(Tree(CHAIN, set(), 10), [4, 3]) == [1, 4, 2, 3]


def test_what_is_gone_or_has_no_room_ends_nothing() -> None:
    assert store(Tree(CHAIN, set(CHAIN), 0), [9, 4]) == [1, 4]
    assert store(Tree(CHAIN, set(), 0), [3, 4]) == []
    assert store(Tree(CHAIN, set(), 1), [3, 4]) == [1, 2, 3, 4], "as room comes free"


@given(st.data())
def test_all_that_has_room_is_stored_once(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 20))
    parents = {
        n: data.draw(st.none() | st.integers(1, n - 1)) if n > 1 else None
        for n in range(1, count + 1)
    }
    nodes = data.draw(st.lists(st.integers(1, count + 2), max_size=20))
    copied = data.draw(st.sets(st.integers(1, count)))
    stored = store(Tree(parents, copied, data.draw(st.integers(1, 5))), nodes)
    assert len(stored) == len(set(stored))
    wanted = set[int]()
    for node in nodes:
        at: int | None = node if node in parents else None
        while at is not None:
            wanted.add(at)
            at = parents[at]
    assert set(stored) == wanted
    assert all(stored.index(p) < stored.index(n) for n, p in parents.items() if n in stored and p)
