"""What a client said is in the prompt once and in order, with the template of every family."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import sgl_ext_cpu

from sgl_ext.balancer.conversations.contexts import Block
from sgl_ext.balancer.conversations.expansion import insert_context
from sgl_ext.compat.template_fitting import Places, Plan, fitted, with_sayable_roles
from sgl_ext.compat.template_model import Place
from sgl_ext.compat.templates import make_plan
from sgl_ext.engine.core.request_context import RequestContext, entered
from sgl_ext.protocols.registry import of_path
from sgl_ext.reading.places import locate
from tests.compat.conversations import Writer
from tests.compat.front_end import CHAT, MESSAGES, RESPONSES, FrontEnd

FOLDER = Path(sgl_ext_cpu.__file__).parent / "templates"
FAMILIES = sorted(file.stem for file in FOLDER.glob("*.jinja"))
PATHS = (MESSAGES, CHAT, RESPONSES)
CONTEXT_TOOL = {"name": "xetool", "description": "", "input_schema": {"type": "object"}}
CONVERSATIONS = {
    "a developer's message first": ["developer+", "user+"],
    "a context and a developer's message": ["system+", "developer", "user+", "answer:s", "user"],
    "instructions between turns": [
        *("system", "user", "answer:s", "system", "user"),
        *("answer:s", "developer+", "user", "system", "answer:s", "user", "developer"),
    ],
    "thinking": ["user", "answer:ts", "user", "answer:ts", "user"],
    "a loop of tools": [
        *("system", "user", "answer:tsc", "answer:tc", "answer:sc", "answer:s", "user"),
    ],
    "instructions in a loop": [
        *("system", "user", "answer:tc", "system", "answer:sc", "developer"),
        *("answer:s", "user"),
    ],
    "parallel calls": ["system", "user", "answer:tscc", "answer:cc", "answer:s", "user"],
    "a user who interrupts": ["system", "user", "answer:sc", "user"],
}


@cache
def front_end(family: str, *, fits: bool = True) -> FrontEnd:
    source = (FOLDER / f"{family}.jinja").read_text()
    return FrontEnd(source, "gpt-oss" if family == "harmony" else "qwen3", fits=fits)


def faults(family: str, path: str, turns: list[str], *, fits: bool = True) -> dict[str, Any]:
    """What a prompt lost, says twice, has in another order, or prints as a list."""
    written = Writer(path).write(turns)
    prompt = front_end(family, fits=fits).prompt(path, written.body)
    said = [*written.texts, *written.keys]
    places = [prompt.find(text) for text in written.texts if text in prompt]
    found = {
        "lost": [text for text in said if text not in prompt],
        "twice": [text for text in [*said, *written.thoughts] if prompt.count(text) > 1],
        "moved": places != sorted(places),
        "printed": "'type': 'text'" in prompt or "'type': 'output_text'" in prompt,
    }
    return {what: fault for what, fault in found.items() if fault}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("about", CONVERSATIONS)
def test_each_text_is_in_the_prompt_once_and_in_order(family: str, about: str) -> None:
    for path in PATHS:
        assert faults(family, path, CONVERSATIONS[about]) == {}, path


def test_without_fitting_these_templates_lose_texts() -> None:
    turns = CONVERSATIONS["a developer's message first"]
    for family in ("qwen3", "glm46", "minimax_m2", "deepseek_v31"):
        assert "lost" in faults(family, CHAT, turns, fits=False)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("path", [MESSAGES, CHAT])
def test_marked_blocks_are_found_where_they_were_put(family: str, path: str) -> None:
    written = Writer(path).write(CONVERSATIONS["instructions between turns"])
    serving = front_end(family)
    places = [
        (("messages", i, len(content) - 1) if isinstance(content, list) else ("messages", i))
        for i, content in enumerate(each["content"] for each in written.body["messages"])
    ]
    places = places[path == CHAT :]  # the system text ends with the tools
    located = locate(of_path(path), written.body, places, lambda body: serving.prompt(path, body))
    ends = [None if end is None else located.text[:end][-5:] for end in located.ends]
    assert None not in ends
    assert set(ends) <= set(written.texts)
    assert sorted(located.ends, key=lambda end: end or 0) == list(located.ends)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_prompt_of_each_turn_begins_with_the_one_before(family: str) -> None:
    turns = CONVERSATIONS["instructions between turns"]
    for path in PATHS:
        before = ""
        for end in (2, 5, 8, 11):
            written = Writer(path).write(turns[:end])
            prompt = front_end(family).prompt(path, written.body)
            assert prompt.startswith(before), path
            before = prompt[: prompt.rfind(written.texts[-1]) + 5]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("role", ["system", "developer"])
def test_a_context_is_in_the_prompt_with_the_request_s_own_words(family: str, role: str) -> None:
    blocks = (
        Block("rules", "text", "stable", "", "xarul"),
        Block("tools", "tools", "stable", "", [CONTEXT_TOOL]),
        Block("notes", "text", "project", "", "xbnot"),
        Block("now", "text", "runtime", None, None),
    )
    for path in PATHS:
        written = Writer(path).write([f"{role}+", "user+"])
        body, _ = insert_context(of_path(path), written.body, blocks, {"now": "xcnow"})
        prompt = front_end(family).prompt(path, body)
        said = ["xarul", "xbnot", *written.texts[:2], "xcnow", *written.texts[2:]]
        places = [prompt.find(text) for text in said]
        assert -1 not in places
        assert places == sorted(places)
        assert all(prompt.count(text) == 1 for text in said)
        assert "'type': 'text'" not in prompt
        assert prompt.rfind("xetool") < prompt.find("xcnow")  # a changed text leaves the tools


def test_what_a_template_cannot_say_is_refused_by_name() -> None:
    serving = FrontEnd(
        "{% for m in messages %}{{ m.content if loop.first or m.role != 'assistant' }}"
        "{{ m.tool_calls[0].function.arguments if m.tool_calls and loop.index0 == 1 }}{% endfor %}"
    )
    plan = make_plan(serving.chat)
    assert plan is not None
    assert plan.unsayable == {"text beside calls", "parallel calls"}
    body = Writer(CHAT).write(["user", "answer:sc"]).body
    with pytest.raises(ValueError, match="loses text beside calls"):
        serving.prompt(CHAT, body)
    assert serving.prompt(CHAT, Writer(CHAT).write(["user", "answer:c"]).body)


def test_translations_are_counted_and_nothing_given_is_modified() -> None:
    plan = make_plan(front_end("qwen35").chat)
    assert plan is not None
    given = [
        {"role": "developer", "content": "a"},
        {"role": "user", "content": "b"},
        {"role": "system", "content": "c"},
    ]
    counts: Counter[str] = Counter()
    told = fitted(given, plan, counts)
    assert [message["role"] for message in told] == ["system", "user"]
    assert told[1]["content"] == "b\n\n<system-reminder>\nc\n</system-reminder>"
    assert given[1] == {"role": "user", "content": "b"}
    assert counts == {"developer_message": 1, "system_message": 1}
    assert fitted(given[1:2], plan, Counter()) == given[1:2]


def test_later_instructions_become_reminders_at_the_same_place() -> None:
    said = [
        {"role": "system", "content": "first"},
        {"role": "user", "content": "Go on."},
        {"role": "system", "content": [{"type": "text", "text": text} for text in "AB"]},
        {"role": "assistant", "content": "ok"},
        {"role": "system", "content": "C"},
        {"role": "tool", "content": "done", "tool_call_id": "t"},
        {"role": "assistant", "content": "ok"},
        {"role": "system", "content": "D"},
    ]
    counts: Counter[str] = Counter()
    head = Places({"system": Place.IN_PLACE}, {"system": Place.LOST})
    given = with_sayable_roles(said, head, counts)
    assert [message["role"] for message in given] == [
        *("system", "user", "assistant", "tool", "assistant", "user")
    ]
    texts = [message["content"] for message in given]
    assert texts[1] == "Go on.\n\n<system-reminder>\nA\nB\n</system-reminder>"
    assert texts[3] == "done\n\n<system-reminder>\nC\n</system-reminder>"
    assert texts[5] == "<system-reminder>\nD\n</system-reminder>"
    assert counts == {"system_message": 3}


def test_a_template_without_instructions_gets_them_in_the_user_s_turn() -> None:
    model = make_plan(front_end("devstral").chat)
    assert model is not None
    serving = FrontEnd(
        "{% for m in messages %}{{ raise_exception('no') if m.role == 'system' }}"
        "[{{ m.role }}]{{ m.content }}{% endfor %}"
    )
    plan = make_plan(serving.chat)
    assert isinstance(plan, Plan)
    assert plan.model.first["system"] is Place.REFUSED
    prompt = serving.prompt(CHAT, Writer(CHAT).write(["system", "user"]).body)
    assert prompt == "[user]<system-reminder>\nwaaqx\n</system-reminder>\n\nwabqx"


def test_thinking_is_given_in_the_field_that_a_template_reads() -> None:
    serving = front_end("harmony")
    plan = make_plan(serving.chat)
    assert plan is not None
    assert plan.thinking_field == "thinking"
    for path in PATHS:
        written = Writer(path).write(["user", "answer:tc"])
        with entered(RequestContext()):
            assert serving.prompt(path, written.body).count(written.thoughts[0]) == 1


@pytest.mark.parametrize("family", ["qwen3", "glm46", "minimax_m2", "kimi_k2_thinking", "gemma4"])
@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_what_a_parser_leaves_of_the_template_s_own_text_is_not_there_twice(
    family: str, path: str
) -> None:
    serving = front_end(family)
    plan = make_plan(serving.chat)
    assert plan is not None
    frame = plan.frame
    assert frame.before_thinking
    written = Writer(path).write(["user", "answer:tc"])
    plain = serving.prompt(path, written.body)
    thought = written.thoughts[0]
    start = "".join(frame.before_thinking.partition("<think>")[1:])
    left = json.dumps(written.body).replace(
        f'"{thought}"', json.dumps(start + thought + frame.after_thinking)
    )
    assert serving.prompt(path, json.loads(left)) == plain


def test_calls_have_the_ids_that_a_template_takes() -> None:
    made = make_plan(front_end("qwen3").chat)
    assert made is not None
    plan = Plan(replace(made.model, wants_short_ids=True))
    said = [
        {"role": "assistant", "content": "", "tool_calls": [{"id": "call_1"}, {"id": "abcd12345"}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "a"},
        {"role": "tool", "tool_call_id": "abcd12345", "content": "b"},
    ]
    counts: Counter[str] = Counter()
    given = fitted(said, plan, counts)
    ids = [call["id"] for call in given[0]["tool_calls"]]
    assert [message.get("tool_call_id") for message in given[1:]] == ids
    assert ids[1] == "abcd12345"
    assert (len(ids[0]), ids[0].isalnum()) == (9, True)
    assert counts["call_id"] == 2


def test_calls_have_the_names_that_the_model_gave_them() -> None:
    serving = FrontEnd((FOLDER / "kimi_k2.jinja").read_text())
    made = make_plan(serving.chat)
    assert made is not None
    call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": {}}}
    given = [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [call, {**call, "id": "functions.look:1"}],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "a"},
    ]
    counts: Counter[str] = Counter()
    told = fitted(given, replace(made, numbers_calls=True), counts)
    assert [each["id"] for each in told[0]["tool_calls"]] == [
        "functions.look:0",
        "functions.look:1",
    ]
    assert told[1]["tool_call_id"] == "functions.look:0"
    assert counts["call_id"] == 1
