"""The loops of a template whose iterations write the same for the same item, and what else
decides what they write.

An iteration reads its item, what the template knows outside of the loop, and where it is in the
loop. Of the two latter only values of whole expressions count (`loop.index0 > scan.query`), the
largest that hold nothing that the iteration itself has set: while a conversation grows, these
stay what they are where their parts do not. What it writes into namespaces is an effect.

    {% for message in messages %}     asked: loop.last, tools
      {% set text = ... %}            local: text
      {{ text if loop.last }}         effect: seen.count, which is read too
      {% set seen.count = seen.count + (1 if tools else 0) %}
    {% endfor %}
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass
from typing import NamedTuple

from jinja2 import nodes

from sgl_ext.engine.template_cache.rules import (
    Facts,
    Unclear,
    check_pure,
    constants_of,
    facts_of,
    makes_text,
    stored,
    with_all,
)


class Effect(NamedTuple):
    """An attribute of a namespace that an iteration may set; `is_read`: it depends on it, too."""

    space: str
    attribute: str
    is_read: bool


@dataclass(frozen=True)
class Loop:
    """asked: what decides, beside the item, what an iteration does, as it is at its start."""

    node: nodes.For
    asked: tuple[nodes.Expr, ...]
    effects: tuple[Effect, ...]

    @property
    def spaces(self) -> list[str]:
        """The namespaces of the effects."""
        return sorted({effect.space for effect in self.effects})


def loops_of(
    template: nodes.Template, global_names: Iterable[str]
) -> tuple[list[Loop], list[Unclear]]:
    """The loops that write text and are clear; and why others are not. Raises Unclear."""
    facts = facts_of(template, global_names)
    found, unclear = list[Loop](), list[Unclear]()
    constants = set[str]()
    for statement in template.body:
        constants |= constants_of(template, statement)
        for node in _at_top([statement]):
            if any(True for _ in node.find_all(nodes.Output)):
                try:
                    found.append(_Reader(facts, node, constants).read())
                except Unclear as why:
                    unclear.append(why)
    return found, unclear


def _at_top(statements: Iterable[nodes.Node]) -> Iterable[nodes.For]:
    """The loops that are in no other one, nor in a macro."""
    for node in statements:
        if isinstance(node, nodes.For):
            yield node
        elif isinstance(node, nodes.If):
            for inner in (node.body, node.elif_, node.else_):
                yield from _at_top(inner)


def target_of(node: nodes.For) -> str:
    """The name of a loop's item. Raises Unclear."""
    if node.recursive or not isinstance(node.target, nodes.Name):
        raise Unclear("target")
    return node.target.name


class _Scope(NamedTuple):
    """names: what is set somewhere in it. have: what is set at this place, surely."""

    names: frozenset[str]
    have: frozenset[str]

    def with_(self, names: Set[str]) -> _Scope:
        return _Scope(self.names | names, self.have | names)


class _Reader:
    """Reads one loop."""

    def __init__(self, facts: Facts, node: nodes.For, constants: Set[str]) -> None:
        self._facts = facts
        self._node = node
        self._constants = frozenset(constants)
        self._item = target_of(node)
        set_here = stored(node.body)
        self._mixes = self._item not in set_here
        self._locals = frozenset(set_here | {self._item})
        self._in_macro = False
        self._asked: list[nodes.Expr] = []
        self._macros: dict[str, nodes.Macro] = {}
        self._read: set[tuple[str, str]] = set()
        self._written: set[tuple[str, str]] = set()

    def read(self) -> Loop:
        """Raises Unclear."""
        self._reach(self._node.body, self._locals)
        self._check_test()
        self._block(self._node.body, _Scope(self._locals, frozenset({self._item})))
        self._in_macro = True
        for macro in self._macros.values():
            scope = _Scope(frozenset(_names_in(macro)), frozenset(_parameters(macro)))
            for default in macro.defaults:
                self._expression(default, scope)
            self._block(macro.body, scope)
        effects = [Effect(*each, each in self._read) for each in sorted(self._written)]
        return Loop(self._node, tuple(self._asked), tuple(effects))

    def _check_test(self) -> None:
        """What chooses the items is asked ahead by `loop.last`: whatever an iteration has written
        must not change it."""
        for node in with_all(self._node.test) if self._node.test is not None else ():
            check_pure(self._facts, node)
            of_a_name = isinstance(node, nodes.Call | nodes.Getattr) and node.node
            if isinstance(of_a_name, nodes.Name) and (
                isinstance(node, nodes.Call) or of_a_name.name in dict(self._written)
            ):
                raise Unclear("test")

    def _reach(self, statements: Iterable[nodes.Node], local: frozenset[str]) -> None:
        """Finds the macros that are called and the namespaces that are read and written."""
        for node in (node for statement in statements for node in with_all(statement)):
            if isinstance(node, nodes.NSRef) and node.name not in local:
                self._written.add((node.name, node.attr))
            elif isinstance(node, nodes.Getattr) and isinstance(node.node, nodes.Name):
                self._read.add((node.node.name, node.attr))
            elif isinstance(node, nodes.Call) and isinstance(node.node, nodes.Name):
                name = node.node.name
                macro = self._facts.macros.get(name)
                if macro is not None and name not in self._macros:
                    self._macros[name] = macro
                    self._reach([*macro.defaults, *macro.body], frozenset(_names_in(macro)))

    def _block(self, statements: Iterable[nodes.Node], scope: _Scope, depth: int = 0) -> _Scope:
        """The scope behind the statements."""
        for node in statements:
            if isinstance(node, nodes.Output):
                for inner in node.nodes:
                    self._expression(inner, scope)
            elif isinstance(node, nodes.Assign):
                self._expression(node.node, scope)
                scope = self._set(node.target, scope)
            elif isinstance(node, nodes.AssignBlock) and node.filter is None:
                self._block(node.body, scope, depth)
                scope = self._set(node.target, scope)
            elif isinstance(node, nodes.If):
                scope = self._branches(node, scope, depth)
            elif isinstance(node, nodes.For) and not node.recursive:
                self._expression(node.iter, scope)
                inside = scope.with_({"loop", *stored([node.target])})
                if node.test is not None:
                    self._expression(node.test, inside)
                self._block(node.body, inside, depth + 1)
                for name in (n for s in node.else_ for n in s.find_all(nodes.Name)):
                    if name.name == "loop":
                        raise Unclear("loop")
                self._block(node.else_, scope, depth)
            elif not (isinstance(node, nodes.Break | nodes.Continue) and depth):
                raise Unclear(type(node).__name__)
        return scope

    def _branches(self, node: nodes.If, scope: _Scope, depth: int) -> _Scope:
        behind = []
        for branch in (node, *node.elif_):
            self._expression(branch.test, scope)
            behind.append(self._block(branch.body, scope, depth).have)
        behind.append(self._block(node.else_, scope, depth).have)
        return scope._replace(have=frozenset.intersection(*behind))

    def _set(self, target: nodes.Node, scope: _Scope) -> _Scope:
        names = stored([target])
        for node in with_all(target):
            if isinstance(node, nodes.NSRef):
                of_the_loop = self._in_macro and node.name in self._locals
                if (node.name in scope.names and node.name not in scope.have) or (
                    of_the_loop and node.name not in scope.names
                ):
                    raise Unclear(node.name)
            elif not isinstance(node, nodes.Name | nodes.Tuple):
                raise Unclear("target")
        return scope._replace(have=scope.have | names)

    def _expression(self, node: nodes.Node, scope: _Scope) -> None:
        """Asks for what is decided outside of the iteration."""
        check_pure(self._facts, node)
        names = {name.name for name in _loads(node)} - scope.have - self._constants
        if isinstance(node, nodes.Name):
            if names and node.name not in self._facts.functions:
                self._ask(node)
        elif not names:
            self._check_all(node)
        elif not makes_text(node) and (self._is_outer(node, scope) or self._is_mixed(node, scope)):
            self._check_all(node)
            self._ask(node)
        elif isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr):
            for child in (node.node.node, *node.args, *node.kwargs):
                self._expression(child, scope)
        else:
            for child in node.iter_child_nodes():
                self._expression(child, scope)

    def _check_all(self, node: nodes.Node) -> None:
        for inner in node.find_all(nodes.Node):
            check_pure(self._facts, inner)

    def _ask(self, node: nodes.Node) -> None:
        assert isinstance(node, nodes.Expr)
        if self._in_macro:
            # In a macro these names are not those of the loop.
            for name in _loads(node):
                if name.name in self._locals or name.name == "loop":
                    raise Unclear(name.name)
        if node not in self._asked:
            self._asked.append(node)

    def _is_outer(self, node: nodes.Node, scope: _Scope) -> bool:
        """Whether it can be known at the start of an iteration."""
        if isinstance(node, nodes.Slice) or not isinstance(node, nodes.Expr):
            return False
        return self._is_start(node) and all(name.name not in scope.names for name in _loads(node))

    def _is_mixed(self, node: nodes.Node, scope: _Scope) -> bool:
        """Whether it compares the item with what is outside, to no more than yes or no."""
        if self._in_macro or not self._mixes or not self._is_start(node):
            return False
        if isinstance(node, nodes.Compare):
            plain = all(op.op in ("eq", "ne", "in", "notin") for op in node.ops)
        else:
            plain = isinstance(node, nodes.Test)
        names = {name.name for name in _loads(node)}
        return (
            plain
            and not any(True for _ in node.find_all((nodes.Call, nodes.Filter, nodes.BinExpr)))
            and names & scope.names <= {self._item}
        )

    def _is_start(self, node: nodes.Node) -> bool:
        """Whether no function is called and nothing is read that the iteration may set."""
        for inner in with_all(node):
            if isinstance(inner, nodes.Call) and isinstance(inner.node, nodes.Name):
                return False
            if (
                isinstance(inner, nodes.Getattr)
                and isinstance(inner.node, nodes.Name)
                and (inner.node.name, inner.attr) in self._written
                and inner is not node
            ):
                return False
        return True


def _loads(node: nodes.Node) -> Iterable[nodes.Name]:
    for inner in with_all(node):
        if isinstance(inner, nodes.Name) and inner.ctx == "load":
            yield inner


def _parameters(macro: nodes.Macro) -> set[str]:
    return stored(macro.args)


def _names_in(macro: nodes.Macro) -> set[str]:
    return _parameters(macro) | stored(macro.body)
