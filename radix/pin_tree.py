"""The pinned prefixes as one tree of tokens, in which tokens that prefixes share count once.

Pins nest and fork. The tree holds each token of their union once, on compressed edges:

    edge     |--- a ---------|--- b -----|          pins   1: a      2: a + b
                             |--- c ---|                   3: a + c

A key is the token ids, 8 bytes each, so edges are compared as memory, and bisection finds where
two diverge. They diverge at page boundaries, as in the cache whose tokens are counted here. A
node ends at a pin, at a fork, or where the tokens of two owners meet: tokens are charged to the
owner that pinned them first, for as long as any pin needs them.

Spaces share nothing. A pin is only a number here.

Invariants, asserted by `check`: every leaf is a pin; a node without a pin has several children,
or one whose edge is charged to another owner; a space without pins has no root; the counts of
tokens and charges are those of the edges.
"""

from collections.abc import Hashable, Set
from dataclasses import dataclass, field

TOKEN_BYTES = 8


@dataclass(slots=True, eq=False)
class _Node:
    """The prefix of the parent plus the tokens of `edge`. Only a root has no parent."""

    edge: bytes
    owner: str
    parent: "_Node | None"
    space: Hashable
    pin: int | None = None
    children: "dict[bytes, _Node]" = field(default_factory=dict)  # by their first page

    @property
    def tokens(self) -> int:
        return len(self.edge) // TOKEN_BYTES

    @property
    def uses(self) -> int:
        """The number of children and pins that need the node."""
        return len(self.children) + (self.pin is not None)


class PinTree:
    """The union of all pinned prefixes, whose keys are whole pages of `page` tokens."""

    def __init__(self, page: int = 1) -> None:
        self.tokens = 0  # of all edges
        self._step = page * TOKEN_BYTES
        self._roots: dict[Hashable, _Node] = {}
        self._nodes: dict[int, _Node] = {}  # by pin
        self._charges: dict[str, int] = {}

    @property
    def pins(self) -> Set[int]:
        return self._nodes.keys()

    @property
    def owners(self) -> Set[str]:
        """Those who are charged for tokens."""
        return self._charges.keys()

    def tokens_of(self, owner: str) -> int:
        """The number of tokens that the owner is charged for."""
        return self._charges.get(owner, 0)

    def find(self, space: Hashable, key: bytes, tokens: int | None = None) -> list[int]:
        """The pins on prefixes of the key's first `tokens`, the shortest first."""
        root = self._roots.get(space)
        if root is None:
            return []
        end = len(key) if tokens is None else min(len(key), tokens * TOKEN_BYTES)
        path, _ = self._walk(root, key, end)
        return [node.pin for node in path if node.pin is not None]

    def place_of(self, pin: int) -> tuple[Hashable, bytes]:
        """A pin's space and key."""
        node: _Node | None = self._nodes[pin]
        space, edges = self._nodes[pin].space, []
        while node is not None:
            edges.append(node.edge)
            node = node.parent
        return space, b"".join(reversed(edges))

    def insert(self, space: Hashable, key: bytes, pin: int, owner: str) -> None:
        """Adds a pin at the end of `key`, where there must be none."""
        root = self._roots.get(space)
        if root is None:
            root = self._roots[space] = _Node(b"", "", None, space)
        path, at = self._walk(root, key, len(key))
        node = path[-1]
        child = node.children.get(key[at : at + self._step])
        if child is not None:
            shared = _common(child.edge, key, at, self._step)
            node = self._split(child, shared)
            at += shared
        if at < len(key):
            leaf = _Node(key[at:], owner, node, space)
            node.children[leaf.edge[: self._step]] = leaf
            self._charge(owner, leaf.tokens)
            node = leaf
        assert node.pin is None, "pinned already"
        node.pin = pin
        self._nodes[pin] = node

    def remove(self, pin: int) -> None:
        """Removes a pin and the tokens that no other pin needs."""
        node = self._nodes.pop(pin)
        node.pin = None
        while node.parent is not None and not node.uses:
            del node.parent.children[node.edge[: self._step]]
            self._charge(node.owner, -node.tokens)
            node = node.parent
        if node.parent is not None:
            self._merge(node)
        elif not node.children:
            del self._roots[node.space]

    def _charge(self, owner: str, tokens: int) -> None:
        self.tokens += tokens
        charge = self._charges.pop(owner, 0) + tokens
        if charge:
            self._charges[owner] = charge

    def _walk(self, root: _Node, key: bytes, end: int) -> tuple[list[_Node], int]:
        """The nodes on the path of `key[:end]`, and the bytes of the last one's prefix."""
        node, at, path = root, 0, [root]
        while at < end:
            child = node.children.get(key[at : at + self._step])
            if child is None or not key.startswith(child.edge, at, end):
                break
            node, at = child, at + len(child.edge)
            path.append(node)
        return path, at

    def _split(self, node: _Node, length: int) -> _Node:
        """Cuts a node's edge after `length` bytes; returns the new node above it."""
        assert node.parent is not None, "a root has no edge"
        upper = _Node(node.edge[:length], node.owner, node.parent, node.space)
        node.parent.children[upper.edge[: self._step]] = upper
        node.edge, node.parent = node.edge[length:], upper
        upper.children[node.edge[: self._step]] = node
        return upper

    def _merge(self, node: _Node) -> None:
        """Joins a node and its only child if neither a pin nor an owner separates them.

        Otherwise every short pin that ever forked from a long edge would leave a cut in it.
        """
        if node.pin is not None or len(node.children) != 1 or node.parent is None:
            return
        (child,) = node.children.values()
        if child.owner == node.owner:
            child.edge, child.parent = node.edge + child.edge, node.parent
            node.parent.children[child.edge[: self._step]] = child

    def check(self) -> None:
        """Asserts the invariants."""
        charges: dict[str, int] = {}
        pins: dict[int, _Node] = {}
        for space, root in self._roots.items():
            assert root.space == space
            assert root.children, "a space without pins"
            nodes = [root]
            for node in nodes:
                for first, child in node.children.items():
                    assert child.parent is node
                    assert child.edge[: self._step] == first
                    assert len(child.edge) > 0
                    assert len(child.edge) % self._step == 0
                    charges[child.owner] = charges.get(child.owner, 0) + child.tokens
                    nodes.append(child)
                if node.pin is not None:
                    pins[node.pin] = node
                elif node is not root:
                    owners = {child.owner for child in node.children.values()}
                    assert len(node.children) > 1 or owners - {node.owner}, "an unneeded node"
        assert pins == self._nodes
        assert charges == self._charges
        assert self.tokens == sum(charges.values())


class Trial:
    """What a tree would hold without some of its pins. It is valid until the tree changes."""

    def __init__(self, tree: PinTree) -> None:
        self.tokens = tree.tokens
        self._tree = tree
        self._nodes = tree._nodes
        self._uses: dict[_Node, int] = {}  # where they differ from the tree's
        self._freed: dict[str, int] = {}  # by owner

    def tokens_of(self, owner: str) -> int:
        """The number of tokens that the owner would be charged for."""
        return self._tree.tokens_of(owner) - self._freed.get(owner, 0)

    def remove(self, pin: int) -> None:
        """Leaves out one more pin."""
        node = self._nodes[pin]
        while node.parent is not None:
            uses = self._uses[node] = self._uses.get(node, node.uses) - 1
            if uses:
                return
            self._free(node, node.tokens)
            node = node.parent

    def restore(self, pin: int) -> None:
        """Undoes a removal."""
        node = self._nodes[pin]
        while node.parent is not None:
            self._uses[node] += 1
            if self._uses[node] > 1:
                return
            self._free(node, -node.tokens)
            node = node.parent

    def _free(self, node: _Node, tokens: int) -> None:
        self.tokens -= tokens
        self._freed[node.owner] = self._freed.get(node.owner, 0) + tokens


def _common(edge: bytes, key: bytes, at: int, step: int) -> int:
    """The length in bytes, in whole steps, of the common prefix of `edge` and `key[at:]`."""
    low, high = 0, min(len(edge), len(key) - at) // step
    while low < high:
        middle = (low + high + 1) // 2
        if key.startswith(edge[low * step : middle * step], at + low * step):
            low = middle
        else:
            high = middle - 1
    return low * step
