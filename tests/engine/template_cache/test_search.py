"""A loop that only looks for something is left as soon as it can do nothing more, and no sooner."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_ext.engine.template_cache.rendered import Rendered
from sgl_ext.engine.template_cache.rules import facts_of
from sgl_ext.engine.template_cache.search import searches_of
from tests.engine.template_cache.test_rendered import CHAT, compiled, outcome, rendered

BEGIN = "{%- set s = namespace(on=true, off=false, at=-1, n=0, said='') -%}"
END = "{% for m in messages %}.{% endfor %}{{ s.at }}|{{ s.n }}|{{ s.said }}|{{ s.on }}"
HIT = "{% set s.on = false %}{% set s.at = loop.index0 %}{% set s.said = m.content %}"

# The condition's beginning, and how much of what follows in it is asked ahead.
SHORT = {
    "{% for m in messages %}{% if s.on and m.role == 'user' %}"
    + HIT
    + "{% endif %}{% endfor %}": 1,
    "{% for m in messages[::-1] %}{% set at = messages | length - 1 - loop.index0 %}"
    "{% set text = m.content if m.content is string else '' %}"
    "{% if s.on and m.role == 'user' and m.a is defined and not text.startswith('a') %}"
    "{% set s.on = false %}{% set s.at = at %}{% set s.said = text %}{% endif %}{% endfor %}": 2,
    "{% for m in messages %}{% if not s.off %}{% set s.n = s.n + 1 %}"
    "{% if m.role == 'user' %}{% set s.off = true %}{% endif %}{% endif %}{% endfor %}": 0,
    "{% for m in messages %}{% if s.on and m.a.b == 1 %}" + HIT + "{% endif %}{% endfor %}": 0,
    "{% for m in messages %}{% if s.on and 'a' in m.content and m.role == 'user' %}"
    + HIT
    + "{% endif %}{% endfor %}": 0,
    "{% for m in messages %}{% set text = m.content %}{% if s.on and text == 'a' %}"
    + HIT
    + "{% endif %}{% endfor %}": 0,
    "{% for m in messages %}{% if s.on and m.role == role %}" + HIT + "{% endif %}{% endfor %}": 1,
    "{% for m in messages %}{% set at = loop.index0 + n %}{% if s.on and (m.role == 'user' or "
    "m.content is none) %}{% set s.on = false %}{% set s.at = at %}{% endif %}{% endfor %}": 1,
}

# In each, an iteration behind the last hit does something, or may raise.
WHOLE = [
    "{% for m in messages %}{% set t = m.content + 'x' %}{% if s.on and m.role == 'user' %}"
    "{% set s.on = false %}{% endif %}{% endfor %}",
    "{% for m in messages %}{% set s.n = s.n + 1 %}{% if s.on %}{% set s.on = false %}{% endif %}"
    "{% endfor %}",
    "{% for m in messages %}{% if s.on %}{% set s.on = false %}{% else %}{% set s.n = s.n + 1 %}"
    "{% endif %}{% endfor %}",
    "{% for m in messages %}{% if s.on %}{% set s.on = false %}{% elif m.role %}"
    "{% set s.n = s.n + 1 %}{% endif %}{% endfor %}",
    "{% set all = messages | map(attribute='a') | list %}{% for m in all %}{% set t = m.b %}"
    "{% if s.on %}{% set s.on = false %}{% endif %}{% endfor %}",
    "{% for m in messages %}{% set t = m.a.b %}{% if s.on %}{% set s.on = false %}{% endif %}"
    "{% endfor %}",
    "{% for m in messages %}{% set t = 'a' in m.content %}{% if s.on %}{% set s.on = false %}"
    "{% endif %}{% endfor %}",
    "{% for m in messages %}{% set t = m.content | length %}{% if s.on %}{% set s.on = false %}"
    "{% endif %}{% endfor %}",
    "{% for m in messages %}{% set c = m.content %}{% set t = c + 1 %}{% if s.on %}"
    "{% set s.on = false %}{% endif %}{% endfor %}",
    "{% for m in messages %}{% set t = m.role < m.content %}{% if s.on %}{% set s.on = false %}"
    "{% endif %}{% endfor %}",
    "{% for m in messages %}{% set t = n.x if m.role == 'tool' else 1 %}{% if s.on %}"
    "{% set s.on = false %}{% endif %}{% endfor %}",
    "{% for m in messages %}{% set t = (n + 'a') if m.role == 'tool' else 1 %}{% if s.on %}"
    "{% set s.on = false %}{% endif %}{% endfor %}",
    "{% for m in messages %}{% if m.role == 'tool' or s.on %}{% set s.n = s.n + 1 %}"
    "{% set s.on = false %}{% endif %}{% endfor %}",
    "{% for m in messages %}{% if loop.last and m.role %}{% set s.at = loop.index0 %}{% endif %}"
    "{% endfor %}",
    "{% for m in messages %}{% if m.on %}{% set s.n = s.n + 1 %}{% endif %}{% endfor %}",
    "{% for m in messages if m.content < 'b' %}{% if s.on %}{% set s.on = false %}{% endif %}"
    "{% endfor %}",
    "{% for m in messages | reverse %}{% if s.on %}{% set s.on = false %}{% endif %}{% endfor %}",
]

content = st.sampled_from(["a", "b", "", None, 1, ["a"]])
message = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "tool", "tool"])},
    optional={"content": content, "a": st.sampled_from([{"b": 1}, {}, "a"]), "on": st.booleans()},
)
item = st.one_of(message, message, message, st.sampled_from([None, "user", 1, [], {}]))
given_too = st.fixed_dictionaries(
    {}, optional={"n": st.sampled_from([1, "a"]), "role": st.sampled_from(["user", "tool", 1])}
)
_both: dict[str, tuple[Rendered, Any]] = {}


def both(source: str) -> tuple[Rendered, Any]:
    if source not in _both:
        _both[source] = rendered(BEGIN + source + END), compiled(BEGIN + source + END)
    return _both[source]


@pytest.mark.parametrize("source", [*SHORT, *WHOLE])
@settings(max_examples=25, deadline=None)
@given(st.lists(item, min_size=1, max_size=7), given_too)
def test_it_finds_and_raises_what_the_template_does(
    source: str, messages: list[Any], also: dict[str, Any]
) -> None:
    made, plain = both(source)
    made._failed = 0
    asked = {"messages": messages, **also}
    assert outcome(made, asked) == outcome(plain, asked)
    assert not made.is_off


@pytest.mark.parametrize(("source", "hits"), SHORT.items())
def test_what_can_do_no_more_is_left(source: str, hits: int) -> None:
    (search,) = searches_in(BEGIN + source + END)
    assert len(search.hits) == hits


@pytest.mark.parametrize("source", WHOLE)
def test_what_may_do_more_is_gone_through(source: str) -> None:
    assert searches_in(BEGIN + source + END) == []


class Counted(list[Any]):
    """Tells how many of it were gone through."""

    gone = 0

    def __iter__(self) -> Iterator[Any]:
        for each in super().__iter__():
            self.gone += 1
            yield each


def test_a_loop_is_left_behind_the_hit() -> None:
    source = BEGIN + next(iter(SHORT)) + "{% for m in [1] %}{{ s.at }}{% endfor %}"
    messages = Counted({"role": "user" if n == 2 else "tool"} for n in range(9))
    assert rendered(source).known({"messages": messages}) == "2"
    assert messages.gone == 4


class Odd:
    """What may not be asked for anything."""

    def __getattribute__(self, name: str) -> Any:
        raise KeyError(name)


def test_nothing_is_asked_of_what_is_behind_the_last_hit() -> None:
    source = BEGIN + next(iter(SHORT)) + "{% for m in [1] %}{{ s.at }}{% endfor %}"
    found = [{"role": "tool"}, {"role": "user"}, {"role": "tool"}]
    assert rendered(source).known({"messages": [*found, Odd()]}) == "1"
    assert rendered(source).known({"messages": [found[0], Odd()]}) is None


def test_the_search_for_the_last_query_is_one() -> None:
    (search,) = searches_in(CHAT.read_text())
    assert len(search.hits) == 1


def searches_in(source: str) -> list[Any]:
    environment = compiled(source).environment
    tree = environment.parse(source)
    return searches_of(tree, facts_of(tree, environment.globals))
