"""What a template does is seen in what it renders, by made-up templates of known behaviour."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import jinja2
import pytest

from sgl_ext.compat.template_model import Lists, Opening, Place, Render, Tools, observe

_TOOLS = "{% for t in tools %}({{ t.function.name }}){% endfor %}"
_CALLS = "{% for c in m.tool_calls %}<{{ c.function.name }}{{ c.function.arguments }}>{% endfor %}"
_ALL = "[{{ m.role }}]{{ m.reasoning_content }}{{ m.content }}" + _CALLS
PLAIN = _TOOLS + "{% for m in messages %}" + _ALL + "{% endfor %}"


def render_with(template: str) -> Render:
    environment = jinja2.Environment()

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment.globals["refuse"] = refuse
    compiled = environment.from_string(template)

    def render(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
        return compiled.render(messages=messages, tools=tools) + "[assistant]"

    return render


def facts(template: str) -> dict[str, Any]:
    return asdict(observe(render_with(template)))


def test_a_template_that_shows_everything_in_order() -> None:
    assert facts(PLAIN) == {
        "first": {"system": Place.IN_PLACE, "developer": Place.IN_PLACE},
        "later": {"system": Place.IN_PLACE, "developer": Place.IN_PLACE},
        "lists": dict.fromkeys(("system", "developer", "user", "assistant", "tool"), Lists.PRINTED),
        "tools": Tools.FIRST,
        "thinking": Place.IN_PLACE,
        "loop_thinking": Place.IN_PLACE,
        "has_calls": True,
        "has_text_with_calls": True,
        "has_parallel_calls": True,
        "has_user_after_results": True,
        "has_call_ids": False,
        "wants_short_ids": False,
        "opening": Opening.KEPT,
        "grows_by_turns": True,
        "grows_in_loops": True,
        "needs_descriptions": False,
    }


@pytest.mark.parametrize(
    ("template", "place"),
    [
        ("{% for m in messages if m.role != 'developer' %}{{ m.content }} {% endfor %}", "lost"),
        (
            "{% for m in messages %}{% if m.role == 'developer' %}{{ refuse('who?') }}{% endif %}"
            "{{ m.content }} {% endfor %}",
            "refused",
        ),
        (
            "{% for m in messages if m.role == 'developer' %}{{ m.content }} {% endfor %}"
            "{% for m in messages if m.role != 'developer' %}{{ m.content }} {% endfor %}",
            "moved to the head",
        ),
        (
            "{% for m in messages if m.role != 'developer' %}{{ m.content }} {% endfor %}"
            "{% for m in messages if m.role == 'developer' %}{{ m.content }} {% endfor %}",
            "moved to the end",
        ),
    ],
)
def test_a_role_is_found_where_its_text_is(template: str, place: str) -> None:
    model = observe(render_with(template))
    assert model.later["developer"] == place
    assert model.later["system"] == Place.IN_PLACE
    first = "in place" if place == "moved to the head" else place
    assert model.first["developer"] == first


def test_a_message_that_only_the_last_place_keeps_is_not_in_place() -> None:
    template = "{% for m in messages %}{% if m.role != 'system' or loop.last or loop.first %}"
    model = observe(render_with(template + "{{ m.content }} {% endif %}{% endfor %}"))
    assert model.later["system"] == Place.LOST


@pytest.mark.parametrize(
    ("content", "lists"),
    [
        ("{{ m.content }}", Lists.PRINTED),
        ("{{ m.content | tojson }}", Lists.PRINTED),
        ("{{ m.content if m.content is string else m.content[0].text }}", Lists.PARTLY),
        ("{{ m.content if m.content is string else '' }}", Lists.LOST),
        ("{{ m.content + '' }}", Lists.REFUSED),
        (
            "{% if m.content is string %}{{ m.content }}{% else %}"
            "{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}",
            Lists.WHOLE,
        ),
    ],
)
def test_lists_of_parts_are_whole_or_not(content: str, lists: Lists) -> None:
    model = observe(render_with("{% for m in messages %}" + content + "{% endfor %}"))
    assert model.lists["user"] == lists


@pytest.mark.parametrize(
    ("template", "tools"),
    [
        ("{{ messages[0].content }}" + _TOOLS + PLAIN.removeprefix(_TOOLS), Tools.AFTER_SYSTEM),
        (
            "{% for m in messages %}{% if loop.last %}"
            + _TOOLS
            + "{% endif %}"
            + _ALL
            + "{% endfor %}",
            Tools.LAST,
        ),
        (PLAIN.removeprefix(_TOOLS), Tools.ABSENT),
    ],
)
def test_tools_are_found_where_they_stand(template: str, tools: Tools) -> None:
    assert observe(render_with(template)).tools == tools


def test_what_a_template_leaves_out_of_the_history_is_seen() -> None:
    dropped = observe(
        render_with(
            _TOOLS + "{% for m in messages %}[{{ m.role }}]"
            "{% if loop.index0 > messages | length - 2 %}{{ m.reasoning_content }}{% endif %}"
            "{% if m.tool_calls %}<{{ m.tool_calls[0].id }}>{% else %}{{ m.content }}{% endif %}"
            "{% endfor %}"
        )
    )
    assert dropped.thinking == Place.LOST
    assert dropped.loop_thinking == Place.LOST
    assert not dropped.has_text_with_calls
    assert not dropped.has_parallel_calls
    assert dropped.has_call_ids
    assert dropped.grows_in_loops


def test_thinking_that_goes_when_the_loop_goes_on_changes_the_prompt() -> None:
    shown_once = "{% if loop.index0 > messages | length - 3 %}{{ m.reasoning_content }}{% endif %}"
    model = observe(render_with(PLAIN.replace("{{ m.reasoning_content }}", shown_once)))
    assert model.loop_thinking == Place.IN_PLACE
    assert not model.grows_in_loops


def test_a_template_that_needs_tools_is_observed_with_them() -> None:
    needs = "{% if not tools %}{{ refuse('no') }}{% endif %}" + PLAIN
    assert facts(needs) == facts(PLAIN)


def test_a_template_that_wants_short_ids_of_calls_is_observed_with_them() -> None:
    strict = (
        "{% for c in m.tool_calls if c.id | length != 9 %}{{ refuse('no') }}{% endfor %}" + _ALL
    )
    found = facts(PLAIN.replace(_ALL, strict))
    assert found == facts(PLAIN) | {"wants_short_ids": True}
    shown = strict.replace("{{ c.function.name }}", "{{ c.function.name }}{{ c.id }}")
    assert facts(PLAIN.replace(_ALL, shown))["has_call_ids"]


@pytest.mark.parametrize(
    ("shown", "opening"), [("", "lost in the next prompt"), ("[thought]", "lost without thinking")]
)
def test_what_opens_an_answer_may_be_lost(shown: str, opening: str) -> None:
    answer = f"{{{{ '{shown}' + m.reasoning_content if m.reasoning_content }}}}"
    render = render_with(PLAIN.replace("{{ m.reasoning_content }}", answer))
    model = observe(lambda messages, tools: render(messages, tools) + "[thought]")
    assert model.opening == opening


def test_a_template_that_renders_no_user_is_an_error() -> None:
    with pytest.raises(ValueError, match="renders no user's message"):
        observe(render_with("{{ refuse('no') }}"))


@pytest.mark.parametrize(
    "answer",
    [
        "{{ m.content if not m.tool_calls }}",
        "{{ m.content if not m.tool_calls or not messages[loop.index + 1 :] }}",
    ],
)
def test_a_text_beside_a_call_must_stay_ahead_of_the_result_and_after_the_answer(
    answer: str,
) -> None:
    template = "{% for m in messages %}" + answer + _CALLS + "{% endfor %}"
    assert not facts(template)["has_text_with_calls"]


def test_a_system_text_in_the_last_user_s_turn_is_moved_to_the_end() -> None:
    template = (
        "{% for m in messages if m.role != 'system' %}"
        "{{ messages[0].content if loop.last }}{{ m.content }}{% endfor %}"
    )
    assert facts(template)["first"]["system"] is Place.END
