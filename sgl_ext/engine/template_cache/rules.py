"""What may be in a template whose loops are looked at, and what of it is pure.

Pure: the same output for the same values, no effect, nothing that is told of by identity.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from jinja2 import nodes


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


LOOP = _words("index index0 revindex revindex0 first last length previtem nextitem depth depth0")
# Filters that give what can be read once only.
_ONCE = _words("map select reject selectattr rejectattr batch slice unique reverse items")
_FILTERS = _ONCE | _words(
    "abs capitalize count d default dictsort e escape first float format indent int join last "
    "length list lower max min replace round safe sort string sum title tojson trim truncate "
    "upper wordcount wordwrap"
)
_TESTS = _words(
    "boolean defined divisibleby even false float in integer iterable lower mapping none number "
    "odd sequence string true undefined upper == != > >= < <= eq equalto ne gt greaterthan ge "
    "lt lessthan le"
)
_METHODS = _words(
    "capitalize casefold count endswith find format get index isalnum isalpha isascii isdecimal "
    "isdigit islower isnumeric isspace istitle isupper items join keys ljust lower lstrip "
    "partition removeprefix removesuffix replace rfind rindex rjust rpartition rsplit rstrip "
    "split splitlines startswith strip swapcase title upper values zfill"
)
_FUNCTIONS = frozenset({"dict", "namespace", "raise_exception", "range"})
_TEXTS = _words("tojson string format join indent wordwrap")
_NAMED_BY = {"map": 0, "select": 0, "reject": 0, "selectattr": 1, "rejectattr": 1}
_EXPRESSIONS = (
    nodes.Name,
    nodes.NSRef,
    nodes.Literal,
    nodes.Pair,
    nodes.Keyword,
    nodes.CondExpr,
    nodes.Filter,
    nodes.Test,
    nodes.Call,
    nodes.Getattr,
    nodes.Getitem,
    nodes.Slice,
    nodes.Concat,
    nodes.Compare,
    nodes.Operand,
    nodes.BinExpr,
    nodes.UnaryExpr,
)
# What Jinja gives to macros and blocks.
_SPECIAL = frozenset({"caller", "varargs", "kwargs", "self", "super"})


class Unclear(Exception):
    """What a template does is not understood here."""


@dataclass(frozen=True)
class Facts:
    """What holds for all of a template.

    macros: those that stand at its top, by name.
    functions: names of what can only be called.
    namespaces: names of what `set` may write into. Each is known by one name in a scope.
    """

    macros: dict[str, nodes.Macro]
    functions: frozenset[str]
    namespaces: frozenset[str]


def facts_of(template: nodes.Template, global_names: Iterable[str]) -> Facts:
    """Raises Unclear where functions, namespaces or what can be read once go from hand to hand."""
    macros = {node.name: node for node in template.body if isinstance(node, nodes.Macro)}
    defined = [node.name for node in template.find_all(nodes.Macro)]
    if sorted(defined) != sorted(macros):
        raise Unclear("macros")
    spaces = {node.name for node in template.find_all(nodes.NSRef)}
    for node in template.find_all(nodes.Assign):
        if isinstance(node.target, nodes.Name) and _is_namespace(node.node):
            spaces.add(node.target.name)
    facts = Facts(macros, frozenset(global_names) | macros.keys(), frozenset(spaces))
    for parent in (template, *template.find_all(nodes.Node)):
        for child in parent.iter_child_nodes():
            _check_hands(facts, parent, child)
    return facts


def _check_hands(facts: Facts, parent: nodes.Node, child: nodes.Node) -> None:
    if _is_namespace(child) and not (
        isinstance(parent, nodes.Assign) and isinstance(parent.target, nodes.Name)
    ):
        raise Unclear("namespace")
    if _is_read_once(child) and not (
        (isinstance(parent, nodes.Filter) and not _passes(parent) and parent.node is child)
        or (isinstance(parent, nodes.For) and parent.iter is child)
        or (isinstance(parent, nodes.Filter) and _is_read_once(parent) and parent.node is child)
    ):
        raise Unclear("generator")
    if not isinstance(child, nodes.Name):
        return
    if child.name in facts.functions:
        called = isinstance(parent, nodes.Call) and parent.node is child
        asked = isinstance(parent, nodes.Test) and parent.name in ("defined", "undefined")
        if child.ctx != "load" or not (called or asked):
            raise Unclear(child.name)
    elif child.name in facts.namespaces:
        if child.ctx == "load":
            clear = isinstance(parent, nodes.Getattr)
        else:
            clear = isinstance(parent, nodes.Assign) and _is_namespace(parent.node)
        if not clear:
            raise Unclear(child.name)


def _is_namespace(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Call) and (
        isinstance(node.node, nodes.Name) and node.node.name == "namespace"
    )


def _passes(node: nodes.Filter) -> bool:
    """Whether a filter may give what it got."""
    return node.name in ("default", "d")


def _is_read_once(node: nodes.Node | None) -> bool:
    if not isinstance(node, nodes.Filter):
        return False
    return node.name in _ONCE or (_passes(node) and _is_read_once(node.node))


def check_pure(facts: Facts, node: nodes.Node) -> None:
    """Raises Unclear if an expression's node, without what is in it, is not known to be pure."""
    if not isinstance(node, _EXPRESSIONS):
        raise Unclear(type(node).__name__)
    if isinstance(node, nodes.Name) and node.name in _SPECIAL:
        raise Unclear(node.name)
    if isinstance(node, nodes.Call):
        _check_call(facts, node)
    elif isinstance(node, nodes.Test):
        _check_among(node.name, _TESTS)
    elif isinstance(node, nodes.Filter):
        _check_filter(node)
    for child in node.iter_child_nodes():
        if not _is_loop(child):
            continue
        if not isinstance(node, nodes.Getattr) or node.attr not in LOOP:
            raise Unclear("loop")


def makes_text(node: nodes.Node) -> bool:
    """Whether an expression makes new text of what it has, so that what it has is less to compare;
    or is of several that may be asked for one by one."""
    if isinstance(node, nodes.Filter):
        return node.name in _TEXTS | _ONCE
    of_texts = (nodes.Add, nodes.Concat, nodes.Mod, nodes.Mul, nodes.CondExpr, nodes.Call)
    return isinstance(node, of_texts)


def is_yes_or_no(node: nodes.Node) -> bool:
    """Whether an expression is true or false, whatever it is of."""
    if isinstance(node, nodes.And | nodes.Or):
        return is_yes_or_no(node.left) and is_yes_or_no(node.right)
    if isinstance(node, nodes.Getattr) and _is_loop(node.node):
        return node.attr in ("first", "last")
    return isinstance(node, nodes.Not | nodes.Compare | nodes.Test)


def _is_loop(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Name) and node.name == "loop"


def _check_call(facts: Facts, node: nodes.Call) -> None:
    if node.dyn_args is not None or node.dyn_kwargs is not None:
        raise Unclear("call")
    if isinstance(node.node, nodes.Getattr):
        _check_among(node.node.attr, _METHODS)
    elif isinstance(node.node, nodes.Name):
        _check_among(node.node.name, _FUNCTIONS | facts.macros.keys())
    else:
        raise Unclear("call")


def _check_filter(node: nodes.Filter) -> None:
    _check_among(node.name, _FILTERS)
    if node.dyn_args is not None or node.dyn_kwargs is not None:
        raise Unclear(node.name)
    named = node.args[_NAMED_BY[node.name] :] if node.name in _NAMED_BY else []
    if named:
        name = named[0].value if isinstance(named[0], nodes.Const) else None
        _check_among(name, _FILTERS if node.name == "map" else _TESTS)


def _check_among(name: str | None, known: Collection[str]) -> None:
    if name not in known:
        raise Unclear(name)


def with_all(node: nodes.Node) -> Iterator[nodes.Node]:
    """A node and all in it."""
    yield node
    yield from node.find_all(nodes.Node)


def stored(statements: Iterable[nodes.Node]) -> set[str]:
    """The names that statements set."""
    return {
        node.name
        for statement in statements
        for node in with_all(statement)
        if isinstance(node, nodes.Name) and node.ctx != "load"
    }


def constants_of(template: nodes.Template, statement: nodes.Node) -> set[str]:
    """The names to which a statement gives what they are from there on."""
    if not isinstance(statement, nodes.Assign) or not isinstance(statement.target, nodes.Name):
        return set()
    of_one = isinstance(statement.node, nodes.Const | nodes.Tuple)
    parts = with_all(statement.node)
    if not of_one or not all(isinstance(node, nodes.Const | nodes.Tuple) for node in parts):
        return set()
    names = [n.name for n in template.find_all(nodes.Name) if n.ctx != "load"]
    return {statement.target.name} if names.count(statement.target.name) == 1 else set()
