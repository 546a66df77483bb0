"""What must be as it was for the iterations of a loop to do again, one behind the other, what
they did before.

What an iteration does is decided by its item and by what `sgl_ext.engine.template_cache.parts`
found to be asked for. Of that, most is the same wherever the items up to the next one are the same:
`loop.first`, `loop.previtem`, whether there is a next item and what it is. What is left is

    fixed    values from outside of the loop, and those of namespaces that the loop writes, as they
             are where the run begins
    bounds   what the number of the iteration is compared with: below both an old and a new one,
             a comparison is what it was

A run begins at the second iteration, for which `messages[loop.index0 - 1]` is not the last item.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from jinja2 import nodes

from sgl_ext.engine.template_cache.parts import Loop, target_of
from sgl_ext.engine.template_cache.rules import stored

_COUNTERS = {"index0": 0, "index": 1}
_LOCAL = frozenset({*_COUNTERS, "first", "last", "previtem", "nextitem", "depth", "depth0"})


class Bound(NamedTuple):
    """What the iteration's number is compared with, of which the first iteration's is `base`."""

    base: int
    value: nodes.Expr


@dataclass
class Needs:
    """What a run depends on beside the items."""

    items: nodes.Name
    fixed: list[nodes.Expr] = field(default_factory=list)
    bounds: list[Bound] = field(default_factory=list)

    @property
    def values(self) -> Iterator[nodes.Expr]:
        """All that is asked for where a run begins."""
        yield from self.fixed
        yield from (bound.value for bound in self.bounds)


def needs_of(loop: Loop) -> Needs | None:
    """None: the loop depends on how many items there are, or goes through something else than
    all items of what has a name."""
    node = loop.node
    if not isinstance(node.iter, nodes.Name) or node.test is not None:
        return None
    if node.iter.name in stored([node.target, *node.body]):
        return None
    needs = Needs(node.iter)
    item = target_of(node)
    return needs if all(_read(each, item, needs) for each in loop.asked) else None


def _read(node: nodes.Node, item: str, needs: Needs) -> bool:
    """Takes down what an expression depends on. Whether a run can depend on it."""
    if isinstance(node, nodes.Name) and node.name in ("loop", item):
        return node.name == item
    if isinstance(node, nodes.Getattr) and _is_loop(node.node):
        return node.attr in _LOCAL
    if isinstance(node, nodes.Getitem) and node.node == needs.items and _is_beside(node.arg):
        return True
    bound = _bound(node, item)
    if bound is not None:
        if bound not in needs.bounds:
            needs.bounds.append(bound)
        return True
    if isinstance(node, nodes.Expr) and _is_path(node, item):
        if node == needs.items:
            return False
        if node not in needs.fixed:
            needs.fixed.append(node)
        return True
    return all(_read(child, item, needs) for child in node.iter_child_nodes())


def _bound(node: nodes.Node, item: str) -> Bound | None:
    if not isinstance(node, nodes.Compare) or len(node.ops) != 1:
        return None
    operand = node.ops[0]
    for one, other in ((node.expr, operand.expr), (operand.expr, node.expr)):
        for name, base in _COUNTERS.items():
            if _is_number(one, name) and _is_path(other, item):
                return Bound(base, other)
    return None


def _is_path(node: nodes.Node, item: str) -> bool:
    """Whether it is a name from outside or something in it, which can be asked for at any time."""
    if isinstance(node, nodes.Getitem):
        at = node.arg.node if isinstance(node.arg, nodes.Neg) else node.arg
        return isinstance(at, nodes.Const) and _is_path(node.node, item)
    if isinstance(node, nodes.Getattr):
        return _is_path(node.node, item)
    return isinstance(node, nodes.Name) and node.name not in ("loop", item)


def _is_beside(node: nodes.Node) -> bool:
    """Whether it is the number of this item, of the one before or of the one behind."""
    if isinstance(node, nodes.Add | nodes.Sub):
        by_one = isinstance(node.right, nodes.Const) and node.right.value == 1
        return by_one and _is_number(node.left, "index0")
    return _is_number(node, "index0") or _is_number(node, "index")


def _is_number(node: nodes.Node, name: str) -> bool:
    return isinstance(node, nodes.Getattr) and _is_loop(node.node) and node.attr == name


def _is_loop(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Name) and node.name == "loop"
