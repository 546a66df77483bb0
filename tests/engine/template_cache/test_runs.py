"""Of iterations that followed each other, as many are known as the same items are there again."""

from __future__ import annotations

import marshal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_ext.engine.template_cache.parts import loops_of
from sgl_ext.engine.template_cache.run_rules import needs_of
from sgl_ext.engine.template_cache.runs import NO_RUN, UNWRITTEN, Course, Part, Run, Runs
from tests.engine.template_cache.test_rendered import compiled

value = st.sampled_from(
    [1, True, 1.0, "", "a", None, [1], (1,), {"a": 1, "b": 2}, {"b": 2, "a": 1}]
)
some_items = st.lists(value, max_size=6)


def written(items: list[Any]) -> tuple[bytes, list[int]]:
    each = [marshal.dumps(item, 2) for item in items]
    return b"".join(each), [len(b"".join(each[: n + 1])) for n in range(len(each))]


def run_of(items: list[Any], fixed: tuple[Any, ...] = (), bounds: tuple[int, ...] = ()) -> Run:
    """Of a loop that writes the number of each item."""
    of_items, ends = written(items)
    course = Course(0, "key", NO_RUN._replace(written=of_items, ends=ends))
    course.parts = [Part(f"{n}.", ()) for n in range(1, len(items))]
    return course.run._replace(fixed=fixed, bounds=bounds)


@given(some_items, some_items, some_items)
def test_items_are_the_same_by_type_and_order(
    both: list[Any], old: list[Any], new: list[Any]
) -> None:
    old, new = both + old, both + new
    pairs = zip(old, new, strict=False)
    alike = [marshal.dumps(one, 2) == marshal.dumps(other, 2) for one, other in pairs]
    same = (*alike, False).index(False)
    assert run_of(old).items_in(written(new)[0]) == same


def test_what_is_behind_an_iteration_must_be_there_again() -> None:
    run = run_of([{}] * 6)
    assert [run.length_in((), (), same) for same in range(7)] == [0, 0, 0, 1, 2, 3, 4]
    assert [run.cut(length).text for length in (0, 1, 4)] == ["", "1.", "1.2.3.4."]


def test_what_decides_must_be_the_same() -> None:
    run = run_of([{}] * 6, fixed=(True, None))
    assert run.length_in((True, None), (), 6) == 4
    assert run.length_in((False, None), (), 6) == 0


@given(st.integers(-2, 9), st.integers(-2, 9))
def test_a_number_is_compared_as_it_was(old: int, new: int) -> None:
    length = run_of([{}] * 8, bounds=(old,)).length_in((), (new,), 8)
    assert length == 6 or old != new
    for at in range(1, 1 + length):
        for same in (int.__lt__, int.__le__, int.__gt__, int.__ge__, int.__eq__):
            assert same(at, old) == same(at, new)


def test_what_was_left_stays_until_something_else_is_left() -> None:
    course = Course(0, "key", NO_RUN)
    left = [(UNWRITTEN, "a"), (1, UNWRITTEN), (UNWRITTEN, UNWRITTEN), (2, "b")]
    course.parts = [Part("", each) for each in left]
    assert course.run.left == [(UNWRITTEN, "a"), (1, "a"), (1, "a")]
    further = Course(0, "key", course.run.cut(1))
    further.parts = [Part("", (UNWRITTEN, "c"))] * 2
    assert further.run.left == [(UNWRITTEN, "a"), (UNWRITTEN, "c")]


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9))))
def test_the_bound_holds(kept: list[tuple[int, int]]) -> None:
    runs = Runs(3 * run_of([{}] * 6).size_bytes)
    for key, length in kept:
        run = run_of([{}] * length)
        runs.keep(key, run)
        runs.check()
        assert runs.find(key) == run
    runs.clear()
    runs.check()
    assert len(runs) == 0


def test_a_run_that_is_too_large_is_forgotten() -> None:
    runs = Runs(run_of([{}] * 3).size_bytes)
    runs.keep("a", run_of([{}] * 3))
    runs.keep("a", run_of([{"b": "c" * 99}] * 3))
    runs.check()
    assert runs.find("a") is None


ALONE = [
    "{% for m in messages if m.role %}{{ m.role }}{% endfor %}",
    "{% for m in messages[1:] %}{{ m.role }}{% endfor %}",
    "{% for m in messages %}{{ loop.length }}{% endfor %}",
    "{% for m in messages %}{{ m.role if loop.revindex > 1 }}{% endfor %}",
    "{% for m in messages %}{% if m == messages[loop.index0 - 2] %}.{% endif %}{% endfor %}",
    "{% for m in messages %}{% if m == messages[loop.index0:] %}.{% endif %}{% endfor %}",
    "{% for m in messages %}{{ 'a' if m in messages }}{% endfor %}",
    "{% for m in messages %}{{ loop.index0 == messages | length }}{% endfor %}",
]


@pytest.mark.parametrize("source", ALONE)
def test_what_the_whole_chat_decides_is_no_run(source: str) -> None:
    environment = compiled(source).environment
    (loop,), _ = loops_of(environment.parse(source), environment.globals)
    assert needs_of(loop) is None
