"""What is rendered of known parts is what the template writes, or raises."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sgl_ext_cpu.node import Node

from radix.byte_lru import ENTRY_BYTES, Parts
from sgl_ext.engine.core.counters import counter
from sgl_ext.engine.host_cache import shortcuts
from sgl_ext.engine.host_cache.shortcuts import Message
from sgl_ext.engine.template_cache import rendered as module
from sgl_ext.engine.template_cache.rendered import Rendered
from sgl_ext.engine.template_cache.rendering import Rendering
from sgl_ext.engine.template_cache.rules import Unclear
from sgl_ext.engine.template_cache.runs import Part, Runs
from sgl_ext.engine.template_cache.samples import samples

CHAT = Path(__file__).parents[3] / "launch/cpu/sgl_ext_cpu/chat.jinja"

# Tools stand before the last thing that the user said; whoever does not alternate is refused.
TOOLS_LAST = """
{%- set users = messages | selectattr('role', 'equalto', 'user') | list -%}
{%- set seen = namespace(turns=0, last='') -%}
{%- for message in messages -%}
  {%- if message.role == 'user' and message == users[-1] and tools -%}
    [TOOLS]{{ tools | tojson }}[/TOOLS]
  {%- endif -%}
  {%- if message.role == 'user' -%}
    {%- set seen.turns = seen.turns + 1 -%}
    [INST {{ seen.turns }}]{{ message.content }}[/INST]
  {%- elif message.tool_calls is defined and message.tool_calls -%}
    {%- for call in message.tool_calls -%}
      {%- if loop.first -%}[CALLS]{%- endif -%}
      {{ call.function.name }}:{{ call.function.arguments | tojson }}{{ ', ' if not loop.last }}
    {%- endfor -%}
  {%- elif message.role in ('assistant', 'tool') -%}
    {{ message.content }}{{ eos_token }}
    {%- if message.role == 'assistant' -%}{%- set seen.last = message.content -%}{%- endif -%}
  {%- elif message.role != 'system' -%}
    {{ raise_exception('Only user, assistant and tool, not ' + message.role) }}
  {%- endif -%}
{%- endfor -%}
{{ seen.turns }}|{{ seen.last }}
"""

# A run of results is one turn, told by what is before and behind by index.
NEIGHBOURS = """
{%- macro part(content, at) -%}
  {%- if content is string -%}{{ content | trim }}
  {%- else -%}
    {%- for piece in content or [] -%}
      {%- if piece.type == 'text' -%}{{ piece.text }}
      {%- else -%}{%- set images.count = images.count + 1 -%}<image {{ images.count }}>{%- endif -%}
    {%- endfor -%}
  {%- endif -%}
{%- endmacro -%}
{%- set images = namespace(count=0) -%}
{%- for message in messages -%}
  {%- if message.role == 'tool' -%}
    {%- if not loop.first and messages[loop.index0 - 1].role != 'tool' -%}<results>{%- endif -%}
    {{ part(message.content, 1) }}
    {%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}</results>{%- endif -%}
  {%- else -%}
    {{ '<' ~ message.role ~ '>' ~ part(message.content, 2) }}
  {%- endif -%}
{%- endfor -%}
{{ images.count }}
"""

# What is behind is asked for only where there is something.
GUARDED = """
{%- set names = {'user': 'U', 'assistant': 'A', 'tool': 'T', 'system': 'S'} -%}
{%- set last = namespace(query=-1, tool=none) -%}
{%- for message in messages -%}
  {%- if message.role == 'user' -%}{%- set last.query = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in messages if message.role != 'system' -%}
  {%- set text = message.content if message.content is string else message.content | tojson -%}
  {%- if message.role == 'tool' -%}{%- set shown = text | upper -%}{%- endif -%}
  {{ names[message.role] }}{{ shown if shown is defined else text }}
  {%- if not loop.last -%}
    {%- if loop.nextitem.role == 'tool' -%}>{{ loop.nextitem.content | length }}{%- endif -%}
  {%- endif -%}
  {%- if loop.previtem is defined and loop.previtem.role == message.role -%}={%- endif -%}
  {%- if loop.index0 >= last.query and message.reasoning_content -%}
    ({{ message.reasoning_content.strip() }})
  {%- endif -%}
  {%- if enable_thinking is defined and enable_thinking is false -%}!{%- endif -%}
{%- endfor -%}
"""

# What an iteration does to those behind it.
COUNTED = """
{%- set ns = namespace(open=false, count=0, seen='', absent_too=none) -%}
{%- for message in messages -%}
  {%- set step = loop.revindex0 > 0 -%}
  {%- if message.role == 'tool' and not ns.open -%}{%- set ns.open = true -%}[{%- endif -%}
  {%- if message.role != 'tool' and ns.open -%}{%- set ns.open = false -%}]{%- endif -%}
  {%- for call in message.tool_calls or [] -%}
    {%- set ns.count = ns.count + 1 -%}
    {%- if ns.count > 3 -%}{%- break -%}{%- endif -%}
    {{ ns.count }}.{{ call.function.name }}
  {%- endfor -%}
  {{ message.content if step else 'last' }}
  {%- if message.role == 'user' -%}{%- set ns.seen = ns.fresh ~ message.content -%}{%- endif -%}
  {%- if message.content -%}{%- set ns.fresh = message.role -%}{%- endif -%}
{%- else -%}nothing
{%- endfor -%}
{{ ns.seen }}{{ ns.fresh }}{{ ns.count }}
"""

# Asked for without a look whether it is there: raises, wherever a turn is the last one.
UNGUARDED = """
{%- for message in messages -%}
  {{ message.role }}{{ message.content | tojson }}
  {%- if message.role == 'tool' and loop.nextitem.content < 'b' -%}.{%- endif -%}
{%- endfor -%}
"""

# What goes on from one iteration to the next, and numbers that the chat is told by.
COUNTS_ON = """
{%- set ns = namespace(n=0, open=false, looking=true, query=-1, seen='') -%}
{%- macro tag(role) -%}{%- set ns.seen = role -%}<{{ role }}>{%- endmacro -%}
{%- for message in messages[::-1] -%}
  {%- set at = (messages | length) - loop.index -%}
  {%- set said = message.content if message.content is string else '' -%}
  {%- if ns.looking and message.role == 'user' and not said.startswith('<') -%}
    {%- set ns.looking = false -%}{%- set ns.query = at -%}{%- set ns.said = said -%}
  {%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
  {%- if message.role == 'tool' and not ns.open -%}{%- set ns.open = true -%}[{%- endif -%}
  {%- if message.role != 'tool' and ns.open -%}{%- set ns.open = false -%}]{%- endif -%}
  {%- set ns.n = ns.n + 1 -%}
  {%- if loop.index0 >= ns.query and not loop.last -%}!{%- endif -%}
  {%- if shown is defined and limit is integer and limit < loop.index -%}{{ shown }}{%- endif -%}
  {{ ns.n }}{{ tag(message.role) }}{{ message.content | tojson }}
  {%- if not loop.first and messages[loop.index0 - 1].role == message.role -%}={%- endif -%}
  {%- if message == messages[0] -%}0{%- endif -%}
{%- endfor -%}
{{ ns.n }}{{ ns.open }}{{ ns.seen }}{{ ns.query }}{{ ns.said }}
"""
STYLES = {
    "chat": CHAT.read_text(),
    "tools_last": TOOLS_LAST,
    "neighbours": NEIGHBOURS,
    "guarded": GUARDED,
    "counted": COUNTED,
    "unguarded": UNGUARDED,
    "counts_on": COUNTS_ON,
}


def compiled(source: str) -> Any:
    """As transformers compiles chat templates."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    return shortcuts.compile_template(_compile_jinja_template.__wrapped__, source)


def rendered(source: str, limit_bytes: int = 1 << 22, group: str | None = None) -> Rendered:
    return Rendered(
        compiled(source), source, Parts[Part](limit_bytes), Runs(limit_bytes), lambda: group
    )


def outcome(template: Any, asked: dict[str, Any]) -> str:
    try:
        return "text " + template.render(**asked)
    except Exception as error:
        return repr(error)


text = st.sampled_from(["", "a", " b\n", "<think>\nhm\n</think>\n\nc", "<tool_response>"])
value = st.sampled_from([1, 1.0, True, None, "1", float("nan"), [1], (1,), {"b": 1, "a": 2}])
call = st.builds(
    lambda name, arguments: {"function": {"name": name, "arguments": arguments}},
    st.sampled_from(["read", "write"]),
    st.dictionaries(st.sampled_from("ab"), value, max_size=2),
)
content = st.one_of(
    text, st.none(), st.lists(st.builds(lambda t: {"type": "text", "text": t}, text), max_size=2)
)
message = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool", "tool", "system"]), "content": content},
    optional={"tool_calls": st.lists(call, max_size=3), "reasoning_content": text},
)
odd = st.sampled_from(
    [{"role": "odd", "content": ""}, {"content": "a"}, {"role": "user", "content": [{"type": "x"}]}]
)
some = st.lists(message | message | message | odd, max_size=3)
edit = st.tuples(st.sampled_from(["grow", "grow", "cut", "change", "back", "sort"]), some)
options = st.fixed_dictionaries(
    {"add_generation_prompt": st.booleans()},
    optional={
        "tools": st.none() | st.lists(call, max_size=2),
        "enable_thinking": st.booleans(),
        "eos_token": text,
        "shown": text,
        "limit": st.integers(-1, 9) | st.sampled_from([True, 2.0, None]),
    },
)


@pytest.mark.parametrize("style", STYLES)
@settings(max_examples=12, deadline=None)
@given(st.lists(st.tuples(edit, options), min_size=1, max_size=7), st.booleans())
def test_it_writes_and_raises_what_the_template_does(
    style: str, edits: list[tuple[tuple[str, list[Any]], dict[str, Any]]], as_messages: bool
) -> None:
    plain = _plain.setdefault(style, compiled(STYLES[style]))
    made = _made.setdefault(style, rendered(STYLES[style]))
    made._failed = 0
    chat: list[Any] = [{"role": "user", "content": "a"}]
    kept = [chat]
    for (what, more), asked in edits:
        if what == "grow":
            chat = chat + more
        elif what == "cut":
            chat = chat[: len(chat) // 2 + 1]
        elif what == "change":
            chat = more[:1] + chat[1:]
        elif what == "back":
            chat = kept[0] + more
        else:
            chat = [dict(sorted(one.items())) for one in chat]
        kept.append(chat)
        sent = copy.deepcopy(chat)
        messages = list(map(Message, sent)) if as_messages else sent
        asked = {**asked, "messages": messages}
        assert outcome(made, asked) == outcome(plain, asked)
        assert not made.is_off


_plain: dict[str, Any] = {}
_made: dict[str, Rendered] = {}


@pytest.mark.parametrize("style", sorted(STYLES.keys() - {"unguarded"}))
def test_a_known_message_is_not_rendered_again(style: str) -> None:
    made = rendered(STYLES[style])
    assert not made.unclear
    chat = [{"role": "user", "content": "go"}]
    for step in range(12):
        chat.append({"role": "assistant", "content": f"step {step}"})
        chat.append({"role": "tool", "content": f"result {step}"})
        before = _known_and_new()
        made.render(messages=copy.deepcopy(chat), add_generation_prompt=True)
        known, new = (now - then for now, then in zip(_known_and_new(), before, strict=True))
    assert known + new == len(chat)
    assert new <= 4


def _known_and_new() -> tuple[float, float]:
    told = counter("template_parts")
    return tuple(told.labels(name)._value.get() for name in ("known", "new"))  # type: ignore


@pytest.mark.parametrize("style", ["chat", "tools_last", "neighbours", "counts_on"])
def test_iterations_known_to_follow_each_other_are_not_looked_up(
    style: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_up = list[int]()
    find = Rendering.find

    def counted(self: Rendering, number: int, *args: Any) -> str | None:
        looked_up.append(number)
        return find(self, number, *args)

    monkeypatch.setattr(Rendering, "find", counted)
    made, plain = rendered(STYLES[style]), compiled(STYLES[style])
    chat: list[dict[str, Any]] = [{"role": "system", "content": "s"}]
    chat += [{"role": "user", "content": "go"}]
    for step in range(12):
        chat.append({"role": "assistant", "content": f"step {step}", "tool_calls": []})
        chat.append({"role": "tool", "content": f"result {step}"})
        looked_up.clear()
        asked = {"messages": copy.deepcopy(chat), "add_generation_prompt": True, "limit": 30}
        assert made.known(asked) == plain.render(asked)
    # The first item, the one behind which there was none, and the two that are new.
    assert len(looked_up) == 4


GROWING = [
    "{% for m in messages %}a{{ m.a }}{% endfor %}|{% for m in messages %}b{{ m.a }}{% endfor %}"
    "|{% for m in messages if m.a %}c{{ m.a }}{% endfor %}",
    # Of the first one, the item before is the last.
    "{% for m in messages %}{{ m.a }}{{ '!' if messages[loop.index0 - 1].a == 3 }}{% endfor %}",
    "{% for m in messages %}{{ m.a }}"
    "{{ '!' if not loop.last and messages[loop.index].a == 3 }}{% endfor %}",
    "{% for m in messages %}{{ m.a }}"
    "{{ '!' if not loop.last and messages[loop.index0 + 1].a == 3 }}{% endfor %}",
    "{% for m in messages %}{{ m.a }}"
    "{{ '!' if loop.last }}{{ loop.nextitem.a if not loop.last }}{% endfor %}",
    "{% for m in messages %}{{ m.a }}{{ '!' if loop.index < x }}{% endfor %}",
    "{% for m in messages %}{{ m.a }}{{ '!' if loop.index0 != x }}{% endfor %}",
    "{% for m in messages %}{{ m.a }}{{ '!' if x >= loop.index }}{{ x > loop.index0 }}{% endfor %}",
    "{% for m in messages %}{{ m.a }}{{ '!' if loop.index0 in [1, x, 3] }}{% endfor %}",
    "{% set n = namespace(x=x) %}{% for m in messages %}{{ '!' if loop.index > n.x }}{{ m.a }}"
    "{% set n.y = m.a %}{% endfor %}{{ n.y }}",
    "{% set n = namespace(a=x) %}{% for m in messages %}{{ n.a }}{% if m.a %}"
    "{% set n.a = m.a %}{% endif %}{% endfor %}{{ n.a }}",
    # What is no JSON, in between.
    "{% for m in messages %}{{ '!' if (loop.nextitem or '').upper }}{{ m.a }}{% endfor %}",
]


@pytest.mark.parametrize("source", GROWING)
def test_a_chat_that_grows_is_gone_through_as_before(source: str) -> None:
    made, plain = rendered(source), compiled(source)
    items: list[Any] = [{"a": n % 4} for n in range(12)]
    items[4] = "text"
    for old in range(8):
        for new in range(8):
            for x, length in ((old, 8), (new, 6), (new, 12), (new, 9)):
                asked = {"messages": copy.deepcopy(items[:length]), "x": x}
                assert made.known(asked) == plain.render(asked)


def test_a_run_ends_where_its_loop_does() -> None:
    made = rendered(GROWING[0])
    messages = [{"a": n} for n in range(9)]
    made.known({"messages": messages})
    runs = [run for run, _ in made._runs._known._made.values()]
    assert [(len(run.ends), len(run.text_ends)) for run in runs] == [(9, 7), (9, 7)]


def test_a_new_query_leaves_the_parts_that_it_does_not_change() -> None:
    made = rendered(STYLES["chat"])
    chat: list[dict[str, Any]] = [{"role": "user", "content": "go"}]
    for step in range(10):
        thought = {"reasoning_content": "hm"} if step == 9 else {}
        chat.append({"role": "assistant", "content": f"step {step}", **thought})
        chat.append({"role": "tool", "content": f"result {step}"})
    made.render(messages=chat)
    made.render(messages=[*chat, {"role": "user", "content": "and"}])
    before = _known_and_new()
    made.render(messages=[*chat, {"role": "user", "content": "and"}, chat[1]])
    assert _known_and_new()[1] - before[1] <= 2


def test_proven_on_the_samples() -> None:
    for style in STYLES:
        made = rendered(STYLES[style])
        made.prove(samples())
        assert not made.is_off


CLOCKS = [
    "{% for m in messages %}{{ strftime_now('%f') }}{{ m.content }}{% endfor %}",
    "{% set now = strftime_now %}{% for m in messages %}{{ now('%f') }}{% endfor %}",
    "{% macro at() %}{{ strftime_now('%f') }}{% endmacro %}"
    "{% for m in messages %}{{ at() }}{% endfor %}",
    "{% for m in messages %}{{ m.content | random }}{% endfor %}",
    "{% set n = cycler(1, 2) %}{% for m in messages %}{{ n.next() }}{% endfor %}",
    "{% set n = joiner() %}{% for m in messages %}{{ n() }}{{ m.content }}{% endfor %}",
    "{% for m in messages %}{{ loop.changed(m.role) }}{% endfor %}",
    "{% for m in messages recursive %}{{ loop(m.parts) }}{% endfor %}",
    "{% for m in messages %}{% if m.role == 'x' %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "{% for m in messages %}{% filter upper %}{{ m.content }}{% endfilter %}{% endfor %}",
    "{% for m in messages %}{% include 'x' %}{% endfor %}",
    "{% set all = messages | map(attribute='content') %}"
    "{% for m in messages %}{{ all | first }}{% endfor %}",
    "{% set a = namespace(n=0) %}{% set b = a %}"
    "{% for m in messages %}{% set b.n = b.n + 1 %}{{ a.n }}{% endfor %}",
    "{% macro f(s) %}{% set s.n = s.n + 1 %}{% endmacro %}{% set a = namespace(n=0) %}"
    "{% for m in messages %}{{ f(a) }}{{ a.n }}{% endfor %}",
    "{% set x = 1 %}{% macro f() %}{{ m.content }}{% endmacro %}"
    "{% for m in messages %}{{ f() }}{% endfor %}",
    "{% for m in messages %}{{ m is sameas messages[0] }}{% endfor %}",
    "{% set ns = namespace(last='') %}{% for m in messages if m.role != ns.last %}"
    "{{ loop.last }}{% set ns.last = m.role %}{% endfor %}",
    "{{ messages | tojson }}",
]


@pytest.mark.parametrize("source", CLOCKS)
def test_what_is_not_clear_is_rendered_whole(source: str) -> None:
    with pytest.raises(Unclear):
        rendered(source)


def test_a_loop_that_is_not_clear_leaves_the_others() -> None:
    source = (
        "{% set day = strftime_now('%Y') %}"
        "{% for t in tools %}{{ strftime_now('%f') }}{% endfor %}"
        "{% for m in messages %}{{ day }}{{ m.content }}{% endfor %}"
    )
    made = rendered(source)
    assert len(made.loops) == len(made.unclear) == 1


EXACT = [
    # A value's type is one of its properties, and so is the order of keys.
    ("{% for m in messages %}{{ x }}{{ m.a }}{% endfor %}", [1, True, 1.0, "1", None, -0.0, 0.0]),
    (
        "{% for m in messages %}{{ x }}{% endfor %}",
        [[1], (1,), {"a": 1, "b": 2}, {"b": 2, "a": 1}, float("nan"), "a" * 99, "b" * 99],
    ),
    # A name that is set in the loop, perhaps, is the one outside, perhaps.
    ("{% for m in messages %}{% if m.a %}{% set x = 2 %}{% endif %}{{ x }}{% endfor %}", [1, 3]),
    ("{% for m in messages %}{% for x in [7] %}{{ x }}{% endfor %}{{ x }}{% endfor %}", [1, 3]),
    ("{% for m in messages %}{{ x }}{% set x = 2 %}{{ x }}{% endfor %}", [1, 3]),
    ("{% for m in messages %}{% set y %}{{ x }}{% endset %}{{ y }}{% endfor %}", [1, 3]),
    ("{% for m in messages %}{{ {'k': [x]}.k[0] ~ m.a }}{{ 'abc'[:x] }}{% endfor %}", [1, 2]),
    (
        "{% for m in messages %}{{ 'abc'[(m.a or 0) | int:x] }}{{ m.a if x > 1 }}{% endfor %}",
        [1, 2],
    ),
    ("{% for m in messages %}{{ loop.revindex0 }}{{ loop.length }}{{ x }}{% endfor %}", [1]),
    (
        "{% for m in messages %}{% for t in x | selectattr('a') %}{{ t.a }}{% endfor %}"
        "{% endfor %}",
        [[{"a": 1}], [{"a": 2}], []],
    ),
    ("{% for m in messages %}{{ range(x) | list | length }}{% endfor %}", [1, 2]),
    # What makes text is asked for what it makes it of.
    (
        "{% for m in messages %}{{ y ~ m.a }}{{ x.strip() }}{{ x | tojson }}{{ x + 'c' if m.a }}"
        "{{ x.split('b')[0] }}{% for k in x.split('a') %}{{ k }}{% endfor %}{% endfor %}",
        [" a", "a ", "bab"],
    ),
    # A macro reads what is outside, too.
    (
        "{% macro f(a, b=x) %}{{ a }}{{ b }}{{ y }}{% endmacro %}{% set y = x %}"
        "{% for m in messages %}{{ f(m.a) }}{% endfor %}",
        [1, 2],
    ),
    # What is written may be no more than looked at behind the loop.
    (
        "{% set n = namespace(a=x) %}{% for m in messages %}.{% if m.a %}"
        "{% set n.a = m.a %}{% endif %}{% endfor %}{{ n.a }}",
        [1, 2],
    ),
    (
        "{% set n = namespace() %}{% for m in messages %}.{% if x > 1 %}"
        "{% set n.a = [m.a] %}{% endif %}{% endfor %}{{ n.a is defined }}{{ n.a }}",
        [1, 2, 3],
    ),
    (
        "{% set n = namespace(a=x) %}{% for m in messages %}{% if n.a > 1 %}.{% endif %}"
        "{% if m.a %}{% set n.a = 9 %}{% endif %}{% endfor %}{{ n.a }}",
        [2, 3],
    ),
    (
        "{% set n = namespace(a=x) %}{% macro up() %}{% set n.a = n.a + 1 %}{% endmacro %}"
        "{% for m in messages %}{{ up() }}{{ n.a }}{% endfor %}{{ n.a }}",
        [1, 2],
    ),
]


@pytest.mark.parametrize(("source", "values"), EXACT)
def test_what_decides_is_told_apart(source: str, values: list[Any]) -> None:
    made, plain = rendered(source), compiled(source)
    for messages in ([{"a": 1}, {"a": 0}], [{"a": True}, {"a": 0.0}, {}], [{"a": 0}]):
        for x in [*values, *values]:
            asked = {"messages": messages, "x": x}
            assert made.known(asked) == plain.render(**asked)
    assert len(made._parts) > 0


def test_what_is_not_there_is_not_none() -> None:
    made = rendered("{% for m in messages %}{{ x }}{{ m.a }}{% endfor %}")
    messages = [{"a": 1}]
    assert made.known({"messages": messages, "x": None}) == "None1"
    assert made.known({"messages": messages}) == "1"
    assert made.known({"messages": [{"a": None}]}) == "None"
    assert made.known({"messages": [{}]}) == ""


def test_what_is_no_json_is_rendered_each_time() -> None:
    source = "{% for m in messages %}{{ m.a }}{{ x }}{% endfor %}"
    made = rendered(source)
    for value in (Path("a"), Path("b")):
        assert made.known({"messages": [{"a": value}], "x": 1}) == f"{value}1"
        assert made.known({"messages": [{"a": 1}], "x": value}) == f"1{value}"
    assert len(made._parts) == 0


def test_so_much_is_known_and_no_more() -> None:
    made = rendered("{% for m in messages %}{{ m.a * 100 }}{% endfor %}", 4 * (ENTRY_BYTES + 400))
    for n in range(40):
        made.render(messages=[{"a": str(n)}, {"a": "x" * n}])
        made._parts.check()
    assert 2 <= len(made._parts) <= 4


def test_what_one_group_sent_is_new_to_another() -> None:
    asking: list[str | None] = [None]
    source = "{% for m in messages %}{{ m.a }}{% endfor %}"
    made = Rendered(
        compiled(source), source, Parts[Part](1 << 20), Runs(1 << 20), lambda: asking[0]
    )
    new = []
    for group in ("one", "other", None, "", "one"):
        asking[0] = group
        before = _known_and_new()
        made.render(messages=[{"a": 1}])
        new.append(_known_and_new()[1] - before[1])
    assert new == [1, 1, 1, 1, 0]


def test_what_one_group_has_gone_through_is_new_to_another() -> None:
    asking: list[str | None] = [None]
    source = "{% for m in messages %}{{ m.a }}{% endfor %}"
    runs = Runs(1 << 20)
    made = Rendered(compiled(source), source, Parts[Part](1), runs, lambda: asking[0])
    known = []
    for group in ("one", "other", None, "", "one"):
        asking[0] = group
        before = _known_and_new()
        made.render(messages=[{"a": 1}, {"a": 2}, {"a": 3}, {"a": 4}])
        known.append(_known_and_new()[0] - before[0])
    assert known == [0, 0, 0, 0, 2]
    assert len(runs) == 4


def test_a_difference_turns_it_off() -> None:
    source = "{% for m in messages %}{{ m.a }}{% endfor %}"
    made = rendered(source)
    asked = {"messages": [{"a": 1}]}
    made.check(asked, "1")
    assert not made.is_off
    before = counter("template_off").labels("differs")._value.get()
    made.check(asked, "2")
    assert made.is_off
    assert counter("template_off").labels("differs")._value.get() == before + 1
    known = _known_and_new()
    assert made.render(**asked) == "1"
    assert _known_and_new() == known


def test_a_rendering_is_checked_once_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    made = rendered("{% for m in messages %}{{ m.a }}{% endfor %}")
    now, checked = [made._checked_s], list[str]()
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])

    class Now:
        def __init__(self, target: Any, args: tuple[Any, str], daemon: bool) -> None:
            self.args = args

        def start(self) -> None:
            checked.append(self.args[1])

    monkeypatch.setattr(module.threading, "Thread", Now)
    start_s = now[0]
    for seconds in (1, 59, 60, 61, 119, 120):
        now[0] = start_s + seconds
        made.render(messages=[{"a": seconds}])
    assert checked == ["60", "120"]


def test_a_wrong_part_fails_the_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rendering, "_value", lambda self, value: 0)
    made = rendered(STYLES["counted"])
    made.prove(samples())
    assert made.is_off


def test_what_cannot_be_asked_is_given_up_after_some_times() -> None:
    made = rendered(STYLES["unguarded"])
    plain = compiled(STYLES["unguarded"])
    asked = {"messages": [{"role": "user", "content": "a"}]}
    for _ in range(module._MOST_FAILED):
        assert not made.is_off
        assert made.render(**asked) == plain.render(**asked)
    assert made.is_off


def test_what_the_template_refuses_does_not_count_as_failed() -> None:
    made = rendered(STYLES["chat"])
    for _ in range(2 * module._MOST_FAILED):
        with pytest.raises(Exception, match="unknown role"):
            made.render(messages=[{"role": "user", "content": ""}, {"role": "odd"}])
    assert not made.is_off


def test_start_takes_the_templates_of_a_tokenizer() -> None:
    from transformers.utils.chat_template_utils import _compile_jinja_template

    clear = "{% for m in messages %}{{ m.content }} {% endfor %}"
    unclear = "{% for m in messages %}{{ strftime_now('%Y') }}{% endfor %}"

    class Tokenizer:
        def __init__(self) -> None:
            self.chat_template = {"default": clear, "tool_use": unclear}

    before = counter("template_off").labels("unclear")._value.get()
    module.start(Tokenizer(), 1 << 20)
    assert counter("template_off").labels("unclear")._value.get() == before + 1
    known = _known_and_new()
    asked = {"messages": [{"content": "a"}, {"content": "b"}]}
    assert _compile_jinja_template(clear).render(**asked) == "a b "
    assert sum(_known_and_new()) == sum(known) + 2
    assert len(_compile_jinja_template(unclear).render(**asked)) == 8


@pytest.mark.engine
def test_engines_render_only_what_is_new(node: Node) -> None:
    def told(name: str) -> float:
        return node.metric(f'sgl_ext_template_parts_total{{from="{name}"}}')

    messages = [{"role": "user", "content": "Begin"}]
    for turn in range(3):
        known, new = told("known"), told("new")
        body = {"model": "tiny", "max_tokens": 2, "messages": messages}
        node.post("/v1/messages", {**body, "system": "Short."}).raise_for_status()
        messages += [{"role": "assistant", "content": f"{turn}"}, {"role": "user", "content": "On"}]
    assert told("known") - known >= 3
    assert told("new") - new <= 4
