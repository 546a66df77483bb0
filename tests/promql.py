"""What an expression in PromQL needs of the metrics: names, labels, and labels that match.

    labels_of('sum by (job) (rate(x_total{a="b"}[5m]))', {"x_total": {"a"}})   {"job"}

An expression whose labels do not exist, or whose two sides have different labels, is valid and
has no result. So `labels_of` raises AssertionError for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Set
from typing import Any

import promql_parser as promql

Known = Mapping[str, Set[str]]
SCRAPED = frozenset({"job", "instance"})
"""Labels that Prometheus gives every series."""
_RANKING = ("topk", "bottomk")
_SETS = ("and", "or", "unless")
_VARIABLE = re.compile(r"\$__(?:rate_interval|interval|range)")


def parsed(expression: str) -> Any:
    """The syntax tree. Grafana's own variables for times are replaced. Raises ValueError."""
    return promql.parse(_VARIABLE.sub("5m", expression))


def names_in(expression: str) -> set[str]:
    """The metrics that an expression reads."""
    return {selector.name for selector in _selectors(parsed(expression))}


def _selectors(node: Any) -> Iterator[Any]:
    if isinstance(node, promql.VectorSelector):
        yield node
    elif isinstance(node, promql.MatrixSelector):
        yield node.vector_selector
    elif isinstance(node, promql.BinaryExpr):
        yield from _selectors(node.lhs)
        yield from _selectors(node.rhs)
    elif isinstance(node, promql.Call):
        for argument in node.args:
            yield from _selectors(argument)
    elif hasattr(node, "expr"):
        yield from _selectors(node.expr)


def labels_of(expression: str, known: Known) -> set[str] | None:
    """The labels of an expression's result, None for a scalar.

    known: the labels of each metric, `le` included, without those of SCRAPED.
    """
    return _labels(parsed(expression), known)


def _labels(node: Any, known: Known) -> set[str] | None:
    if isinstance(node, promql.VectorSelector):
        return _selected(node, known)
    if isinstance(node, promql.MatrixSelector):
        return _selected(node.vector_selector, known)
    if isinstance(node, promql.BinaryExpr):
        return _joined(node, known)
    if isinstance(node, promql.AggregateExpr):
        return _aggregated(node, known)
    if isinstance(node, promql.Call):
        return _called(node, known)
    return _labels(node.expr, known) if hasattr(node, "expr") else None


def _selected(selector: Any, known: Known) -> set[str]:
    assert selector.name in known, f"no metric is {selector.name}"
    labels = known[selector.name] | SCRAPED
    for matcher in selector.matchers.matchers:
        is_absent = matcher.value == "" and "Not" not in str(matcher.op)
        assert matcher.name in labels or is_absent, f"{selector.name} has no {matcher.name}"
    return set(labels)


def _called(call: Any, known: Known) -> set[str] | None:
    found = [_labels(argument, known) for argument in call.args]
    vectors = [labels for labels in found if labels is not None]
    if call.func.name == "vector":
        return set()
    if call.func.name == "histogram_quantile":
        assert "le" in vectors[0], "a quantile needs the label le"
        return vectors[0] - {"le"}
    assert len(vectors) <= 1, f"{call.func.name} is not known here"
    return vectors[0] if vectors else None


def _aggregated(node: Any, known: Known) -> set[str]:
    labels = _labels(node.expr, known)
    assert labels is not None, "an aggregation of a scalar"
    if str(node.op) in _RANKING:
        return labels
    if node.modifier is None:
        return set()
    named = set(node.modifier.labels)
    assert named <= labels, f"nothing has {named - labels}"
    assert "By" in str(node.modifier.type), "`without` is not known here"
    return named


def _joined(node: Any, known: Known) -> set[str] | None:
    left, right = _labels(node.lhs, known), _labels(node.rhs, known)
    if left is None or right is None:
        return right if left is None else left
    matching = None if node.modifier is None else node.modifier.matching
    if matching is not None:
        assert "Include" in str(matching.type), "only `on` is known here"
        assert set(matching.labels) <= left & right, f"not on both sides: {matching.labels}"
        added = set(node.modifier.group_labels or ())
        assert added <= right, f"not on the right side: {added - right}"
        return left | added
    if str(node.op) == "or":
        return left | right
    assert left == right, f"{left} and {right} match nothing"
    return left
