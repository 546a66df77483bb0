"""In templates of many kinds, a marked block ends where its text ends."""

from __future__ import annotations

import copy
import json
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_ext.protocols.anthropic import ANTHROPIC
from sgl_ext.protocols.chat import CHAT
from sgl_ext.protocols.responses import RESPONSES
from sgl_ext.reading.places import (
    Located,
    common_prefix,
    first_text,
    last_instruction,
    last_text,
    locate,
)

jinja2 = pytest.importorskip("jinja2")

# Like Qwen's: tools in the system turn after its text, thinking dropped before the last user's
# turn, tool results in a user's turn.
CHATML = """\
{%- if messages[0].role == 'system' or tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}
{%- if tools %}


# Tools

<tools>
{%- for tool in tools %}

{{ tool | tojson }}
{%- endfor %}

</tools>

Call them.
{%- endif %}<|im_end|>
{% endif %}
{%- set ns = namespace(last=0) %}
{%- for m in messages %}
{%- if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'tool' %}<|im_start|>user
<tool_response>
{{ m.content | flat }}
</tool_response><|im_end|>
{% elif m.role == 'assistant' %}<|im_start|>assistant
{% if m.reasoning_content and loop.index0 > ns.last %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ (m.content | flat).split('</think>')[-1].lstrip('\\n') }}
{%- for call in m.tool_calls or [] %}
<tool_call>
{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments }}}
</tool_call>
{%- endfor %}<|im_end|>
{% elif m.role != 'system' or loop.index0 %}<|im_start|>{{ m.role }}
{{ m.content | flat }}<|im_end|>
{% endif %}
{%- endfor %}<|im_start|>assistant
"""
TOOLS_FIRST = """\
{%- if tools %}[TOOLS]{{ tools | tojson }}[/TOOLS]{% endif %}
{%- for m in messages %}<{{ m.role }}>{{ m.content | flat }}
{%- for call in m.tool_calls or [] %}[CALL]{{ call.function | tojson }}{% endfor %}</s>
{%- endfor %}"""
# Like Mistral's: tools before the last user's message.
TOOLS_LAST = """\
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}
{%- if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for m in messages %}
{%- if tools and loop.index0 == ns.last %}[TOOLS]{{ tools | tojson }}[/TOOLS]{% endif %}
{%- if m.role == 'user' %}[INST]{{ m.content | flat }}[/INST]
{%- elif m.tool_calls %}{{ m.content | flat }}[CALLS]
{%- for call in m.tool_calls %}{{ call.function.name }}{{ call.function.arguments }}{% endfor %}</s>
{%- else %}[{{ m.role }}]{{ m.content | flat }}[/{{ m.role }}]{% endif %}
{%- endfor %}"""
TRIMMING = """\
{%- for m in messages %}<{{ m.role }}>{{ m.content | flat | trim }}
{%- if loop.first %}
{%- for tool in tools or [] %}- {{ tool.function.name }}: {{ tool.function.description }}
{% endfor %}
{%- endif %}
{%- for call in m.tool_calls or [] %}{{ call.function.name }}({{ call.function.arguments }})
{%- endfor %}</s>
{%- endfor %}"""
# As Llama's does with what tools returned, with an escaping `tojson`.
ESCAPING = """\
{%- for m in messages %}<{{ m.role }}>{{ m.content | flat | escaped }}
{%- for call in m.tool_calls or [] %}{{ call | escaped }}{% endfor %}</s>
{%- endfor %}"""
TEMPLATES = {
    "chatml": CHATML,
    "tools first": TOOLS_FIRST,
    "tools last": TOOLS_LAST,
    "trimming": TRIMMING,
    "escaping": ESCAPING,
}
located_in = partial(locate, ANTHROPIC)
every_template = pytest.mark.parametrize("template", TEMPLATES)


def flat(content: Any) -> str:
    if isinstance(content, list):
        return "".join(part.get("text", "<img>") for part in content)
    return content or ""


def tojson(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


_environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
_environment.filters.update(flat=flat, tojson=tojson, escaped=json.dumps)
_compiled = {name: _environment.from_string(source) for name, source in TEMPLATES.items()}


def chat_body(body: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """The messages and tools of a body of OpenAI's, made of one of Anthropic's as engines do."""
    tools = [
        tool
        if "function" in tool
        else {
            "type": "function",
            "function": {
                "name": tool["name"],
                "description": tool.get("description", ""),
                "parameters": tool["input_schema"],
            },
        }
        for tool in body.get("tools", [])
    ]
    system = body.get("system", [])
    texts = [system] if isinstance(system, str) else [block["text"] for block in system]
    messages: list[Any] = [{"role": "system", "content": "\n".join(texts)}] if texts else []
    for message in body["messages"]:
        messages += converted(message)
    return messages, tools


def converted(message: dict[str, Any]) -> list[Any]:
    content = message["content"]
    if not isinstance(content, list) or "tool_calls" in message:
        return [message]
    before: list[Any] = []
    new: dict[str, Any] = {"role": message["role"]}
    parts: list[Any] = []
    for block in content:
        if block["type"] == "thinking":
            new["reasoning_content"] = block["thinking"]
        elif block["type"] == "tool_use":
            function = {"name": block["name"], "arguments": json.dumps(block["input"])}
            new.setdefault("tool_calls", []).append({"type": "function", "function": function})
        elif block["type"] == "tool_result":
            if parts:
                before.append({"role": "user", "content": parts})
                parts = []
            before.append({"role": "tool", "content": block.get("content")})
        else:
            parts.append(block)
    return [*before, new | {"content": parts}] if parts or "tool_calls" in new else before


class Renderer:
    """Renders bodies as an engine with some template does, and counts how often."""

    def __init__(self, template: str) -> None:
        self._template = template
        self.calls = 0

    def __call__(self, body: Any) -> str:
        self.calls += 1
        messages, tools = chat_body(body)
        return _compiled[self._template].render(messages=messages, tools=tools or None)


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def tool(name: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {"path": {"type": "string"}}}
    return {"name": name, "description": f"It does {name}.", "input_schema": schema}


def use(name: str, path: str) -> dict[str, Any]:
    return {"type": "tool_use", "id": name, "name": name, "input": {"path": path}}


def result(content: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "Read", "content": content}


IMAGE = {"type": "image", "source": {"type": "base64", "data": "AA=="}}
BODY: dict[str, Any] = {
    "tools": [tool("Read"), tool("Bash"), tool("Grep")],
    "system": [text("You help."), text("Folder: /a \n")],
    "messages": [
        {"role": "user", "content": [text("Note the date. "), text("Find the bug.\n\n")]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Where may it be?"},
                text("Looking.\n"),
                use("Read", "first.py"),
                use("Read", "second.py"),
            ],
        },
        {"role": "user", "content": [result("def f(): ... "), result([text("def g():"), IMAGE])]},
        {"role": "assistant", "content": "It is in f."},
        {"role": "user", "content": "Mend it. "},
    ],
}
# What comes next, as a client sends it: what was, and more.
LONGER = BODY | {
    "messages": [
        *BODY["messages"],
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "So."}, text("Done.")]},
        {"role": "user", "content": "Thanks."},
    ]
}
TEXTS = [
    (("system", 0), "You help.", "Folder"),
    (("system", 1), "Folder: /a", "Note the date"),
    (("messages", 0, 0), "Note the date.", "Find the bug"),
    (("messages", 0, 1), "Find the bug.", "Looking"),
    (("messages", 1, 1), "Looking.", "first.py"),
    (("messages", 2, 0), "def f(): ...", "def g()"),
    (("messages", 3), "It is in f.", "Mend it"),
    (("messages", 4), "Mend it.", "Done."),
]


def without_tools(body: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in body.items() if key != "tools"}


@every_template
@pytest.mark.parametrize(("place", "last_words", "next_words"), TEXTS)
def test_a_text_ends_after_its_last_words(
    template: str, place: Any, last_words: str, next_words: str
):
    body, longer = without_tools(BODY), without_tools(LONGER)
    render = Renderer(template)
    located = located_in(body, [place], render)
    assert render.calls == 1
    assert located.text == render(body)
    prefix = located.text[: located.ends[0]]
    assert prefix.endswith(last_words)
    assert next_words not in prefix
    assert render(longer).startswith(prefix)


@every_template
def test_all_texts_are_found_in_one_rendering(template: str):
    render = Renderer(template)
    before = copy.deepcopy(BODY)
    places = [place for place, _, _ in TEXTS if place[0] != "system"]
    located = located_in(BODY, places, render)
    assert render.calls == 1
    assert located.text == render(BODY)
    assert list(located.ends) == [located_in(BODY, [place], render).ends[0] for place in places]
    assert list(located.ends) == sorted(set(located.ends))
    assert before == BODY


@every_template
def test_thinking_that_a_template_drops_does_not_move_an_end(template: str):
    render = Renderer(template)
    for size in (2, 3, 5):
        body = BODY | {"messages": BODY["messages"][:size]}
        located = located_in(body, [("messages", 1, 1)], render)
        assert located.text == render(body)
        assert located.text[: located.ends[0]].endswith("Looking.")


def test_thinking_that_a_template_cuts_out_of_a_text_does_not_move_an_end():
    answer = {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nIt is in f.\n"}
    body = {
        "messages": [{"role": "user", "content": "Hi"}, answer, {"role": "user", "content": "?"}]
    }
    located = located_in(body, [("messages", 1)], Renderer("chatml"))
    assert "Hm." not in located.text
    assert located.text[: located.ends[0]].endswith("<|im_start|>assistant\nIt is in f.")


@pytest.mark.parametrize("template", ["chatml", "tools first", "tools last", "trimming"])
def test_a_tool_ends_before_the_next_begins(template: str):
    render = Renderer(template)
    located = located_in(BODY, [("tools", k) for k in range(3)], render)
    assert located.text == render(BODY)
    assert render.calls <= 7
    assert None not in located.ends
    for end, own, later in zip(
        located.ends, ("Read", "Bash", "Grep"), ("Bash", "Grep", "Call them"), strict=True
    ):
        prefix = located.text[:end]
        assert f"It does {own}." in prefix
        assert f"It does {later}." not in prefix
        assert not prefix.endswith(('"function', '"name": "', "- "))
        if template != "tools last":
            assert render(LONGER).startswith(prefix)


def test_a_tool_in_openais_form_ends_where_its_text_ends():
    tools = chat_body(BODY)[1]

    def strict(body: Any) -> str | None:
        openais = all(tool["function"]["parameters"] for tool in body["tools"])
        return Renderer("chatml")(body) if openais else None

    located = locate(CHAT, BODY | {"tools": tools}, [("tools", 1)], strict)
    assert located.text[: located.ends[0]].endswith(f"{tojson(tools[1])}\n")


def test_a_single_tool_ends_where_its_text_ends():
    body = BODY | {"tools": BODY["tools"][:1]}
    located = located_in(body, [("tools", 0)], Renderer("tools first"))
    assert located.text[: located.ends[0]].endswith('"string"}}}}}')


def test_a_mark_on_the_system_prompt_covers_tools_that_are_rendered_after_it():
    render = Renderer("chatml")
    places = [("system", 0), ("system", 1), ("tools", 2)]
    first, last, tools = located_in(BODY, places, render).ends
    assert render.calls == 2
    assert last == tools
    assert render(BODY)[:first].endswith("You help.")
    for head in ({"system": "You help."}, {"messages": [text_message("system", "You help.")]}):
        body = {"messages": [], "tools": BODY["tools"]} | head
        body["messages"] = [*body["messages"], *BODY["messages"]]
        place = ("system",) if "system" in head else ("messages", 0)
        located = located_in(body, [place, ("tools", 2)], render)
        assert located.ends[0] == located.ends[1] is not None
        assert located.text == render(body)


def test_the_search_for_the_conversation_does_not_change_the_prompt():
    body = BODY | {"messages": [{"role": "user", "content": "\n  Hi"}]}
    for template in TEMPLATES:
        assert located_in(body, [("system", 1)], render := Renderer(template)).text == render(body)


def text_message(role: str, words: str) -> dict[str, Any]:
    return {"role": role, "content": [text(words)]}


@pytest.mark.parametrize("template", ["tools first", "tools last"])
def test_a_mark_on_the_system_prompt_does_not_reach_into_the_conversation(template: str):
    located = located_in(BODY, [("system", 1)], Renderer(template))
    assert located.text[: located.ends[0]].endswith("Folder: /a")


@every_template
def test_a_call_ends_before_the_next_begins(template: str):
    render = Renderer(template)
    first, last, answer = located_in(
        BODY, [("messages", 1, 2), ("messages", 1, 3), ("messages", 2, 0)], render
    ).ends
    prompt = render(BODY)
    assert prompt[:first].count("first.py") == 1
    assert "second.py" not in prompt[:first]
    assert prompt[:last].count("second.py") == 1
    assert "def f" not in prompt[:last]
    assert first < last < answer
    assert render(LONGER).startswith(prompt[:last])


@every_template
def test_a_call_at_the_end_of_the_prompt_ends_before_what_may_follow(template: str):
    calling = {"role": "assistant", "content": [text("So."), use("Read", "a.py")]}
    body = {"messages": [text_message("user", "Hi"), calling]}
    render = Renderer(template)
    prefix = render(body)[: located_in(body, [("messages", 1, 1)], render).ends[0]]
    assert prefix.count("a.py") == 1
    assert "assistant" not in prefix.rpartition("a.py")[2]
    answered = [*body["messages"], text_message("user", "Stop.")]
    assert render({"messages": answered}).startswith(prefix)


def test_a_call_is_found_by_a_cut_if_a_template_rejects_a_further_call():
    render = Renderer("trimming")

    def strict(body: Any) -> str | None:
        calls = [len(message.get("tool_calls", [])) for message in chat_body(body)[0]]
        return None if max(calls) > 2 else render(body)

    located = located_in(BODY, [("messages", 1, 2), ("messages", 1, 3)], strict)
    assert located.text[: located.ends[0]].endswith('first.py"})')
    assert located.text[: located.ends[1]].endswith('second.py"})</s>')
    last = BODY | {"messages": BODY["messages"][:2]}
    assert located_in(last, [("messages", 1, 3)], strict).ends == (None,)


@pytest.mark.parametrize("content", [None, "Looking. ", [text("Looking.")]])
def test_a_chat_message_ends_after_its_calls(content: Any):
    call = {"type": "function", "function": {"name": "Read", "arguments": '{"path": "a.py"}'}}
    messages = [
        text_message("user", "Hi"),
        {"role": "assistant", "content": content, "tool_calls": [call]},
        {"role": "tool", "content": "def f()"},
    ]
    located = located_in({"messages": messages}, [("messages", 1)], Renderer("trimming"))
    assert located.text[: located.ends[0]].endswith('Read({"path": "a.py"})')


@every_template
@pytest.mark.parametrize("content", [[text("See:"), IMAGE], [IMAGE], "", [], None, " "])
def test_a_result_that_does_not_end_with_a_text_has_an_end(template: str, content: Any):
    messages = [*BODY["messages"][:2], {"role": "user", "content": [result(content)]}]
    body = {"messages": messages}
    render = Renderer(template)
    located = located_in(body, [("messages", 1, 3), ("messages", 2, 0)], render)
    call, end = located.ends
    assert located.text == render(body)
    assert call < end < len(located.text)
    if isinstance(content, list):
        assert located.text[:end].endswith(flat(content))
    longer = {"messages": [*messages, {"role": "assistant", "content": "Good."}]}
    assert render(longer).startswith(located.text[:end])


@every_template
def test_an_image_ends_before_the_text_after_it(template: str):
    messages = [{"role": "user", "content": [text("See:"), IMAGE, text("What is it?")]}]
    located = located_in({"messages": messages}, [("messages", 0, 1)], Renderer(template))
    assert located.text[: located.ends[0]].endswith("See:<img>")


def test_a_blank_text_gets_no_marker_in_the_prompt():
    def render(body: Any) -> str:
        said = [message["content"] for message in body["messages"]]
        return "".join(f"<turn>{words}</turn>" for words in said if words.strip())

    messages = [{"role": "user", "content": words} for words in ("Hi", " ", "Bye")]
    located = located_in({"messages": messages}, [("messages", 1), ("messages", 2)], render)
    assert located.text == "<turn>Hi</turn><turn>Bye</turn>"
    assert located.text[: located.ends[1]].endswith("Bye")


def test_an_image_at_the_end_of_the_prompt_has_an_end():
    messages = [{"role": "user", "content": [text("See:"), IMAGE]}]
    for place in (("messages", 0, 1), ("messages", 0)):
        located = located_in({"messages": messages}, [place], Renderer("chatml"))
        assert located.text[: located.ends[0]].endswith("See:<img>")


def test_a_block_that_is_not_rendered_has_no_end():
    body = BODY | {"messages": [*BODY["messages"], {"role": "user", "content": "x"}]}

    def blind(body: Any) -> str:
        return Renderer("escaping")(body | {"messages": body["messages"][:1], "system": "You"})

    places = [("system", 0), ("messages", 3), ("messages", 1, 3), ("tools", 1)]
    assert located_in(body, places, blind).ends == (None,) * 4


def test_a_block_that_is_rendered_twice_has_no_end():
    def twice(body: Any) -> str:
        return body["messages"][0]["content"] + "|" + body["messages"][0]["content"]

    body = {"messages": [{"role": "user", "content": "Hi"}]}
    assert located_in(body, [("messages", 0)], twice) == Located("Hi|Hi", (None,))


def test_a_body_that_cannot_be_rendered_has_no_ends():
    def broken(body: Any) -> str:
        raise RuntimeError("no template")

    body = {"messages": [text_message("user", "Hi")], "tools": BODY["tools"]}
    for render in (broken, lambda body: None, lambda body: 5):
        assert located_in(body, [("messages", 0), ("tools", 0)], render) == Located(
            "", (None, None)
        )


def test_a_template_that_breaks_a_marker_yields_no_text():
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    broken = located_in(body, [("messages", 0)], lambda body: body["messages"][0]["content"][:-1])
    assert broken == Located("", (None,))


@pytest.mark.parametrize(
    "place",
    [
        *((), ("x",), ("tools",), ("tools", 9), ("tools", -1), ("tools", "a"), ("system", 7)),
        *(("messages", 99), ("messages", 0, 99), ("messages", "a"), ("messages", -1)),
        ("messages", 0, 0, 0),
    ],
)
def test_a_place_outside_the_body_has_no_end(place: Any):
    located = located_in(BODY, [place, ("messages", 4)], Renderer("chatml"))
    assert located.ends[0] is None
    assert located.ends[1] is not None


def test_odd_bodies_and_places_raise_nothing():
    assert located_in(BODY, [([],)], Renderer("chatml")) == Located("", (None,))
    places = [("tools", 0), ("system", 0), ("system",), ("messages", 0), ("messages", 0, 0)]
    for body in (
        None,
        [],
        5,
        {},
        {"messages": 5},
        {"messages": [5]},
        {"system": [5], "tools": [5]},
    ):
        assert len(located_in(body, places, lambda body: str(body)).ends) == len(places)


@given(st.text(max_size=30), st.text(max_size=30), st.text(max_size=30))
def test_common_prefix_is_the_length_of_the_common_prefix(shared: str, left: str, right: str):
    count = common_prefix(shared + left, shared + right)
    assert count >= len(shared)
    assert (shared + left)[:count] == (shared + right)[:count]
    assert (shared + left)[: count + 1] != (shared + right)[: count + 1] or left == right


words = st.text(min_size=1, max_size=12) | st.sampled_from(
    ["</think>", '"\n', " a ", "zq", "{{ x }}"]
)
spoken = words.filter(str.strip)
contents = spoken | st.lists(spoken.map(text), min_size=1, max_size=3)


@given(st.sampled_from(sorted(TEMPLATES)), st.lists(contents, min_size=1, max_size=5), contents)
def test_any_text_is_found_and_the_prompt_is_the_real_one(
    template: str, spoken: list[Any], system: Any
):
    roles = ["user", "assistant"] * 3
    messages = [{"role": role, "content": said} for role, said in zip(roles, spoken, strict=False)]
    body = {"system": system, "messages": messages}
    places: list[Any] = []
    for i, said in enumerate(spoken):
        blocks = range(len(said)) if isinstance(said, list) else [None]
        places += [("messages", i) if j is None else ("messages", i, j) for j in blocks]
    render = Renderer(template)
    located = located_in(body, places, render)
    assert located.text == render(body)
    ends = [end for end in located.ends if end is not None]
    assert ends == sorted(ends)
    assert len(ends) == len(places) or template == "chatml"


@pytest.mark.parametrize("key", ["content", "output"])
def test_the_parts_of_a_response_s_items_are_found(key: str) -> None:
    def render(body: Any) -> str:
        turns = [f"<s>{body['instructions']}"]
        for item in body["input"]:
            parts = item.get("content") or item["output"]
            turns.append("|".join(str(part.get("text", "<image>")) for part in parts))
        return "".join(f"[{turn}]" for turn in turns)

    items = [
        {"role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
        {key: [{"type": "input_image"}, {"type": "input_text", "text": "a"}]},
        {"role": "user", "content": [{"type": "input_text", "text": "b "}]},
    ]
    body = {"instructions": "You help.", "input": items}
    places: list[Any] = [("input", 0, "content", 0), ("input", 1, key, 0), ("input", 1, key, 1)]
    places += [("input", 2, "content", 0), ("input", 2, "content", 7)]
    located = locate(RESPONSES, body, places, render)
    ends = [located.text[:end] if end else None for end in located.ends]
    first = "[<s>You help.][Be brief."
    image = f"{first}][<image>|"
    assert ends == [first, image, f"{image}a", f"{image}a][b", None]
    assert last_text(body, places[3]) == "b "
    assert last_text(body, places[2]) is None
    assert last_instruction(body) == ("input", 0)
    assert first_text(body) == (None if key == "output" else ("input", 1, "content", 1, "text"))
