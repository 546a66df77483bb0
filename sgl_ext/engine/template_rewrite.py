"""A template that asks, before an iteration of a loop, whether what it writes is known."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from jinja2 import nodes

from sgl_ext.engine.template_parts import Loop, target_of
from sgl_ext.engine.template_rules import with_all

# Names that no template has: of what is put in.
PREFIX = "sgl_ext_"
STATE, _HERE, _KNOWN, _NEW = (PREFIX + name for name in ("state", "here", "known", "new"))


def rewrite(template: nodes.Template, loops: Sequence[Loop]) -> set[str]:
    """Changes the loops to ask `STATE`, and to do what they did only where it does not know what
    comes of it. Gives the attributes that are asked for.

    {% set known = state | find(number, item, namespaces..., asked...) %}
    {% if known is none %}{% set new %}...{% endset %}{{ state | keep(new, namespaces...) }}
    {% else %}{{ known }}{% endif %}
    """
    for number, loop in enumerate(loops):
        spaces: list[nodes.Expr] = [nodes.Name(name, "load") for name in loop.spaces]
        here = nodes.Name(_HERE, "load")
        item = nodes.Name(target_of(loop.node), "load")
        asked = [lenient(expression) for expression in loop.asked]
        find = _filter(here, "find", nodes.Const(number), item, *spaces, *asked)
        keep = _filter(here, "keep", nodes.Name(_NEW, "load"), *spaces)
        loop.node.body = [
            nodes.Assign(nodes.Name(_KNOWN, "store"), find),
            nodes.If(
                nodes.Test(nodes.Name(_KNOWN, "load"), "none", [], [], None, None),
                [
                    nodes.AssignBlock(nodes.Name(_NEW, "store"), None, loop.node.body),
                    nodes.Output([keep]),
                ],
                [],
                [nodes.Output([nodes.Name(_KNOWN, "load")])],
            ),
        ]
    template.body.insert(0, nodes.Assign(nodes.Name(_HERE, "store"), nodes.Name(STATE, "load")))
    for node in with_all(template):
        if getattr(node, "lineno", None) is None:
            node.lineno = 1
    template.set_environment(template.environment)  # type: ignore[arg-type]
    all_asked = (inner for loop in loops for each in loop.asked for inner in with_all(each))
    return {node.attr for node in all_asked if isinstance(node, nodes.Getattr)}


def lenient(node: Any) -> Any:
    """A copy of an expression in which an attribute of what is undefined is undefined: whether
    the template would have come to ask for it is not known."""
    if isinstance(node, list):
        return [lenient(inner) for inner in node]
    if not isinstance(node, nodes.Node):
        return node
    if isinstance(node, nodes.Getattr):
        if isinstance(node.node, nodes.Name) and node.node.name == "loop":
            return _filter(copy.copy(node.node), f"loop_{node.attr}")
        return _filter(lenient(node.node), f"attribute_{node.attr}")
    if isinstance(node, nodes.Getitem) and not isinstance(node.arg, nodes.Slice):
        return _filter(lenient(node.node), "item", lenient(node.arg))
    made = copy.copy(node)
    for field in node.fields:
        setattr(made, field, lenient(getattr(node, field)))
    return made


def _filter(node: nodes.Expr, name: str, *args: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, PREFIX + name, list(args), [], None, None)
