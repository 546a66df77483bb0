"""Loops that only look for something, such as the last query of a chat, and need not look on.

    {% for message in messages[::-1] %}
      {% set index = (messages | length) - 1 - loop.index0 %}
      {% if scan.looking and message.role == 'user' and not message.content.startswith('<') %}
        {% set scan.looking = false %}{% set scan.query = index %}
      {% endif %}
    {% endfor %}

All that such an iteration does is done under one condition, which begins with an attribute of a
namespace. Behind the first iteration, where that is not true the loop is at its end, as nothing
will change it again; and of an iteration for which the beginning of the condition does not hold,
nothing is to be done. That is so if what is left out can raise nothing: what takes no more than
an attribute of a message, or is the same for all of them and was fine for the first.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from jinja2 import nodes

from sgl_ext.engine.template_cache.rules import LOOP, Facts, stored, with_all

_TESTS = frozenset({"defined", "undefined", "none", "string", "mapping", "true", "false"})


@dataclass(frozen=True)
class Search:
    """goes_on: where it is not true, no iteration behind does anything. hits: what must be true
    besides for one to do anything."""

    node: nodes.For
    goes_on: nodes.Expr
    hits: tuple[nodes.Expr, ...]


def searches_of(template: nodes.Template, facts: Facts) -> list[Search]:
    """The loops at the top of a template that only look for something."""
    set_here = stored(template.body)
    found = (_search(node, facts, set_here) for node in template.body)
    return [search for search in found if search is not None]


def _search(node: nodes.Node, facts: Facts, set_here: Set[str]) -> Search | None:
    if not isinstance(node, nodes.For) or node.recursive or node.test or node.else_:
        return None
    if any(True for _ in node.find_all(nodes.Output)) or not isinstance(node.target, nodes.Name):
        return None
    # What the template was given has no item that is undefined.
    over = node.iter.node if _is_slice(node.iter) else node.iter  # type: ignore[attr-defined]
    if not isinstance(over, nodes.Name) or over.name in set_here:
        return None
    *before, last = node.body
    if not isinstance(last, nodes.If) or last.elif_ or last.else_:
        return None
    item, local = node.target.name, stored(node.body)
    for each in before:
        if not isinstance(each, nodes.Assign) or not isinstance(each.target, nodes.Name):
            return None
        if each.target.name == item or each.target.name in facts.namespaces:
            return None
        if not (_is_quiet(each.node, item, facts) or _is_sum(each.node, {item, *local}, facts)):
            return None
    goes_on, *others = _conjuncts(last.test)
    seen = goes_on.node if isinstance(goes_on, nodes.Not) else goes_on
    if not isinstance(seen, nodes.Getattr) or not isinstance(seen.node, nodes.Name):
        return None
    if seen.node.name not in facts.namespaces or seen.node.name in {item, *local}:
        return None
    hits = []
    for other in others:
        if not _is_quiet(other, item, facts) or stored(before) & _names(other):
            break
        hits.append(other)
    return Search(node, goes_on, tuple(hits))


def _is_quiet(node: nodes.Node | None, item: str, facts: Facts) -> bool:
    """Whether an expression can raise nothing, and does nothing."""
    if node is None or isinstance(node, nodes.Const):
        return True
    if isinstance(node, nodes.Name):
        return node.name != "loop" and node.name not in facts.namespaces | facts.functions
    if isinstance(node, nodes.Getattr) and isinstance(node.node, nodes.Name):
        return node.node.name == item or (node.node.name == "loop" and node.attr in LOOP)
    if isinstance(node, nodes.Test):
        quiet = node.name in _TESTS and not (node.args or node.kwargs)
        return (
            quiet and not (node.dyn_args or node.dyn_kwargs) and _is_quiet(node.node, item, facts)
        )
    if isinstance(node, nodes.Operand):
        return node.op in ("eq", "ne") and _is_quiet(node.expr, item, facts)
    plain = (nodes.And, nodes.Or, nodes.Not, nodes.CondExpr, nodes.Compare)
    children = node.iter_child_nodes()
    return isinstance(node, plain) and all(_is_quiet(child, item, facts) for child in children)


def _is_sum(node: nodes.Node, changing: Set[str], facts: Facts) -> bool:
    """Whether an expression adds to the iteration's number what is the same in all of them, so
    that it raises in the first one or in none."""
    if isinstance(node, nodes.Add | nodes.Sub):
        return _is_sum(node.left, changing, facts) and _is_sum(node.right, changing, facts)
    if isinstance(node, nodes.Getattr) and isinstance(node.node, nodes.Name):
        return node.node.name == "loop" and node.attr in ("index", "index0", "length")
    if isinstance(node, nodes.Filter):
        of_one = node.name in ("length", "count") and not (node.args or node.kwargs)
        return of_one and isinstance(node.node, nodes.Name) and _is_sum(node.node, changing, facts)
    if isinstance(node, nodes.Name):
        return node.name not in changing | facts.namespaces | facts.functions | {"loop"}
    return isinstance(node, nodes.Const)


def _is_slice(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)


def _conjuncts(node: nodes.Node) -> list[nodes.Expr]:
    if isinstance(node, nodes.And):
        return [*_conjuncts(node.left), *_conjuncts(node.right)]
    assert isinstance(node, nodes.Expr)
    return [node]


def _names(node: nodes.Node) -> set[str]:
    return {inner.name for inner in with_all(node) if isinstance(inner, nodes.Name)}
