"""Clients' regular expressions are searched for in linear time."""

from __future__ import annotations

import importlib
import re
import warnings
from types import ModuleType
from typing import Any

import pytest

from sgl_ext.compat.sampler import use_linear_regex
from sgl_ext.engine import sglang_api
from sgl_ext.engine.fields.patterns import LinearRegex, wrong_pattern


@pytest.mark.parametrize("pattern", ["(a+)+$", "(.*)*(.*)*(.*)*x", "(a|aa)+b", "(a?){500}a{500}"])
def test_a_pattern_that_would_backtrack_ends(pattern: str) -> None:
    assert wrong_pattern(pattern) is None
    # Python's `re` would take longer than the universe is old.
    LinearRegex.search(pattern, "a" * 20_000 + "\x00")


@pytest.mark.parametrize("pattern", ["(?=a)b", "(?<!a)b", r"(a)\1", "a{1001}", "(", "a" * 257])
def test_a_pattern_that_cannot_be_linear_is_refused(pattern: str) -> None:
    assert wrong_pattern(pattern)


@pytest.mark.parametrize(
    ("pattern", "text"), [("b+", "abbc"), ("é$", "café"), (r"\d{3}", "a 123"), ("^x", "ax")]
)
def test_it_finds_what_python_finds(pattern: str, text: str) -> None:
    assert bool(LinearRegex.search(pattern, text)) == bool(re.search(pattern, text))


def test_a_wrong_pattern_raises_what_sglang_catches() -> None:
    with pytest.raises(LinearRegex.error):
        LinearRegex.search("(", "a")


def test_sglang_searches_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings(action="ignore"):  # SGLang's, while it is imported
        request = sglang_api.Req
    module = importlib.import_module(request.__module__)
    monkeypatch.setattr(module, "re", re)
    use_linear_regex(request, module)
    assert vars(module)["re"] is LinearRegex


def test_another_way_to_search_stops_the_start() -> None:
    class Other:
        def _check_str_based_finish(self) -> Any: ...

    with pytest.raises(RuntimeError, match="stop_regex in another way"):
        use_linear_regex(Other, ModuleType("other"))
