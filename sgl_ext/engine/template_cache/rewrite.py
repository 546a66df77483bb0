"""A template that asks, before an iteration of a loop, whether what it writes is known."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

from jinja2 import nodes

from sgl_ext.engine.template_cache.parts import Loop, target_of
from sgl_ext.engine.template_cache.rules import with_all
from sgl_ext.engine.template_cache.run_rules import Needs
from sgl_ext.engine.template_cache.search import Search

# Names that no template has: of what is put in.
PREFIX = "sgl_ext_"
STATE, _HERE, _KNOWN, _NEW = (PREFIX + name for name in ("state", "here", "known", "new"))


def rewrite(
    template: nodes.Template,
    loops: Sequence[Loop],
    needs: Sequence[Needs | None],
    searches: Sequence[Search],
) -> set[str]:
    """Changes the loops to ask `STATE`, and to do what they did only where it does not know what
    comes of it. Gives the attributes that are asked for.

    {% set known = state | run(number, loop, items, namespaces..., needs...)
                   if loop.index0 == 1 else none %}
    {% if known is none %}{% set known = state | find(number, item, namespaces..., asked...) %}
    {% endif %}
    {% if known is none %}{% set new %}...{% endset %}{{ state | keep(new, namespaces...) }}
    {% else %}{{ known }}{% endif %}

    Without what a run needs, the first of these is not there. A loop that only looks for
    something becomes

    {% if loop.first %}...{% elif not goes_on %}{% break %}{% elif hits... %}...{% endif %}
    """
    for search in searches:
        _cut_short(search)
    for number, (loop, needed) in enumerate(zip(loops, needs, strict=True)):
        spaces: list[nodes.Expr] = [nodes.Name(name, "load") for name in loop.spaces]
        here = nodes.Name(_HERE, "load")
        item = nodes.Name(target_of(loop.node), "load")
        asked = [lenient(expression) for expression in loop.asked]
        find = _filter(here, "find", nodes.Const(number), item, *spaces, *asked)
        keep = _filter(here, "keep", nodes.Name(_NEW, "load"), *spaces)
        look_up: list[nodes.Node] = [_set_known(find)]
        if needed is not None:
            values = map(lenient, needed.values)
            course = nodes.Name("loop", "load"), copy.copy(needed.items), *spaces
            run = _filter(here, "run", nodes.Const(number), *course, *values)
            second = nodes.Compare(_of_loop("index0"), [nodes.Operand("eq", nodes.Const(1))])
            first = nodes.CondExpr(second, run, nodes.Const(None))
            look_up = [_set_known(first), _if_unknown(look_up)]
        new: list[nodes.Node] = [
            nodes.AssignBlock(nodes.Name(_NEW, "store"), None, loop.node.body),
            nodes.Output([keep]),
        ]
        loop.node.body = [*look_up, _if_unknown(new, [nodes.Output([nodes.Name(_KNOWN, "load")])])]
    template.body.insert(0, nodes.Assign(nodes.Name(_HERE, "store"), nodes.Name(STATE, "load")))
    for node in with_all(template):
        if getattr(node, "lineno", None) is None:
            node.lineno = 1
    template.set_environment(template.environment)  # type: ignore[arg-type]
    return {
        node.attr
        for each in _all_asked(loops, needs, searches)
        for node in with_all(each)
        if isinstance(node, nodes.Getattr)
    }


def _cut_short(search: Search) -> None:
    node = search.node
    hits: nodes.Expr = nodes.Const(True)
    for hit in reversed(search.hits):
        hits = lenient(hit) if isinstance(hits, nodes.Const) else nodes.And(lenient(hit), hits)
    otherwise = [
        nodes.If(nodes.Not(lenient(search.goes_on)), [nodes.Break()], [], []),
        nodes.If(hits, copy.deepcopy(node.body), [], []),
    ]
    node.body = [nodes.If(_of_loop("first"), node.body, otherwise, [])]


def _all_asked(
    loops: Sequence[Loop], needs: Sequence[Needs | None], searches: Sequence[Search]
) -> Iterable[nodes.Expr]:
    for search in searches:
        yield from (search.goes_on, *search.hits)
    for loop, needed in zip(loops, needs, strict=True):
        yield from loop.asked
        if needed is not None:
            yield from needed.values


def _set_known(value: nodes.Expr) -> nodes.Node:
    return nodes.Assign(nodes.Name(_KNOWN, "store"), value)


def _if_unknown(then: list[nodes.Node], otherwise: Sequence[nodes.Node] = ()) -> nodes.Node:
    is_unknown = nodes.Test(nodes.Name(_KNOWN, "load"), "none", [], [], None, None)
    return nodes.If(is_unknown, then, [], list(otherwise))


def lenient(node: Any) -> Any:
    """A copy of an expression in which an attribute of what is undefined is undefined: whether
    the template would have come to ask for it is not known."""
    if isinstance(node, list):
        return [lenient(inner) for inner in node]
    if not isinstance(node, nodes.Node):
        return node
    if isinstance(node, nodes.Getattr):
        if isinstance(node.node, nodes.Name) and node.node.name == "loop":
            return _of_loop(node.attr)
        return _filter(lenient(node.node), f"attribute_{node.attr}")
    if isinstance(node, nodes.Getitem) and not isinstance(node.arg, nodes.Slice):
        return _filter(lenient(node.node), "item", lenient(node.arg))
    made = copy.copy(node)
    for field in node.fields:
        setattr(made, field, lenient(getattr(node, field)))
    return made


def _of_loop(name: str) -> nodes.Expr:
    return _filter(nodes.Name("loop", "load"), f"loop_{name}")


def _filter(node: nodes.Expr, name: str, *args: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, PREFIX + name, list(args), [], None, None)
