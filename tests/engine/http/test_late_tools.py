"""Tools that a conversation adds or removes leave the prompt's head as it was.

The tiny model's tokenizer and template, with SGLang's own conversion and rendering.
"""

from __future__ import annotations

import warnings
from collections import Counter
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import HTTPException
from hypothesis import given
from hypothesis import strategies as st

from sgl_ext.compat.template_fitting import Places, with_sayable_roles
from sgl_ext.compat.template_model import Place
from sgl_ext.engine.core.request_context import RequestContext
from sgl_ext.engine.http.rendering import leave_deferred_out
from sgl_ext.engine.http.translation import for_sglang, keep_deferral
from sgl_ext.protocols.registry import of_path
from sgl_ext.reading.protocol import Model
from sgl_ext.reading.rewriting import translate
from sgl_ext.reading.segments import read_chain

MESSAGES, CHAT = "/v1/messages", "/v1/chat/completions"
SEARCH, LOOK = "ToolSearch", "look"
HEAD_ONLY = Places({"system": Place.IN_PLACE}, {"system": Place.LOST})
DEFERRED, INLINE = ("mend", "paint", "sell"), ("dig", "fly")


def tool(name: str, **fields: Any) -> dict[str, Any]:
    properties = {name: {"type": "string"}}
    schema = {"type": "object", "properties": properties}
    return {"name": name, "description": f"To {name}.", "input_schema": schema, **fields}


def line(name: str) -> str:
    """How a message defines a tool."""
    schema = f'{{"type":"object","properties":{{"{name}":{{"type":"string"}}}}}}'
    return (
        f'<function>{{"description":"To {name}.","name":"{name}","parameters":{schema}}}</function>'
    )


class FrontEnd:
    """SGLang's front end with the tiny model's tokenizer and template."""

    def __init__(self, model: Path) -> None:
        with warnings.catch_warnings(action="ignore"):  # SGLang's, while it is imported
            openai = import_module("sglang.srt.entrypoints.openai.serving_chat")
            messages = import_module("sglang.srt.entrypoints.anthropic.serving")
            self._protocol = import_module("sglang.srt.entrypoints.openai.protocol")
            self._anthropic = import_module("sglang.srt.entrypoints.anthropic.protocol")
        self.tokenizer = import_module("transformers").AutoTokenizer.from_pretrained(model)
        self.chat = openai.OpenAIServingChat.__new__(openai.OpenAIServingChat)
        facts: dict[str, Any] = {
            "tokenizer_manager": SimpleNamespace(tokenizer=self.tokenizer),
            "template_manager": SimpleNamespace(
                jinja_template_content_format="string",
                jinja_template_may_reorder_tool_results=False,
                reasoning_config=None,
                python_chat_template=None,
            ),
            "tool_call_parser": "qwen25",
            "chat_encoding_spec": None,
            "_encoding_adapter": None,
            "supports_inline_system": True,
            "is_minimax_m3": False,
            "_tokenizer_auto_adds_specials": False,
            "_prompt_text_round_trip_is_lossy": False,
            "_thinking_requested": lambda request: False,
            "supports_native_reasoning_history": lambda: True,
            "_render_and_encode_chat_template": self._render,
        }
        for name, value in facts.items():
            setattr(self.chat, name, value)
        self._messages = messages.AnthropicServing(self.chat)
        self.takes_system_anywhere = True

    def _render(self, messages: Any, *, tools: Any, **_: Any) -> Any:
        if not self.takes_system_anywhere:
            messages = with_sayable_roles(messages, HEAD_ONLY, Counter())
        options = {"add_generation_prompt": True, "return_dict": False}
        return self.tokenizer.apply_chat_template(messages, tools=tools, **options), None

    def request(self, path: str, body: dict[str, Any]) -> Any:
        body = translate(of_path(path), body, Model()).body
        if path == CHAT:
            return self._protocol.ChatCompletionRequest(**body)
        request = self._anthropic.AnthropicMessagesRequest(**body)
        return self._messages._convert_to_chat_completion_request(request)

    def ids(self, path: str, body: dict[str, Any]) -> list[int]:
        request = self.request(path, body)
        declared = list(request.tools)

        def apply(chat: Any, *given: Any) -> Any:
            return type(chat)._apply_jinja_template(chat, *given)

        tools = [each.model_dump() for each in declared]
        prompt = leave_deferred_out(apply, self.chat, request, tools, False)
        assert request.tools == declared
        return list(prompt.prompt_ids)

    def text(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids))


@pytest.fixture(scope="module")
def front_end(tiny_model: Path) -> FrontEnd:
    return FrontEnd(tiny_model)


def change(kind: str, name: str, *, inline: bool = False) -> dict[str, Any]:
    named = {"type": "tool_reference", "name": name}
    defined = {"type": "tool_definition", "definition": tool(name)}
    return {"type": kind, "tool": defined if inline else named}


def turn(number: int, kind: str, name: str) -> list[dict[str, Any]]:
    """What a client adds to the conversation: an answer, and its own next message."""
    if kind == "load":
        call = {"type": "tool_use", "id": f"t{number}", "name": SEARCH, "input": {"query": name}}
        found = [{"type": "tool_reference", "tool_name": name}]
        result = {"type": "tool_result", "tool_use_id": f"t{number}", "content": found}
        return [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    inline = kind == "tool_addition" and name in INLINE
    return [
        {"role": "assistant", "content": f"Answer {number}."},
        {"role": "user", "content": f"Question {number}."},
        {"role": "system", "content": [change(kind, name, inline=inline)]},
    ]


TURNS = st.one_of(
    st.tuples(st.just("load"), st.sampled_from(DEFERRED)),
    st.tuples(st.just("tool_addition"), st.sampled_from([*DEFERRED, *INLINE])),
    st.tuples(st.just("tool_removal"), st.sampled_from([LOOK, *DEFERRED])),
)


@given(turns=st.lists(TURNS, min_size=1, max_size=6), anywhere=st.booleans())
def test_each_turn_continues_the_one_before_and_defines_each_tool_once(
    front_end: FrontEnd, turns: list[tuple[str, str]], anywhere: bool
) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Begin."}]
    named: list[str] = []
    before: list[int] = []
    order: list[str] = []
    for number, (kind, name) in enumerate([("", ""), *turns]):
        if kind:
            messages += turn(number, kind, name)
        if kind in ("load", "tool_addition") and name not in order:
            order.append(name)
        if name in DEFERRED and name not in named:  # declared from the turn that needs it on
            named.append(name)
        tools = [tool(LOOK), *(tool(each, defer_loading=True) for each in named), tool(SEARCH)]
        body = {"model": "m", "max_tokens": 5, "tools": tools, "messages": messages}
        front_end.takes_system_anywhere = anywhere
        ids = front_end.ids(MESSAGES, body)
        assert ids[: len(before)] == before
        before = ids
    prompt = front_end.text(before)
    places = [prompt.find(line(name)) for name in order]
    assert -1 not in places
    assert places == sorted(places)
    assert all(prompt.count(line(name)) == 1 for name in order)
    removals = [name for kind, name in turns if kind == "tool_removal"]
    assert prompt.count("is no longer available. Do not call it.") == len(removals)


def test_a_tool_that_is_added_can_be_named_and_parsed(front_end: FrontEnd) -> None:
    messages = [{"role": "user", "content": "Begin."}, *turn(1, "tool_addition", "fly")]
    for name in ("fly", LOOK):
        body = {"model": "m", "max_tokens": 5, "tools": [tool(LOOK)], "messages": messages}
        choice = {"type": "tool", "name": name}
        request = front_end.request(MESSAGES, {**body, "tool_choice": choice})
        assert request.tool_choice.function.name == name
        effective = front_end.chat._effective_tools(request)
        assert [each.function.name for each in effective] == [LOOK, "fly"]
        assert effective[1].function.parameters == tool("fly")["input_schema"]


@pytest.mark.usefixtures("extension")
def test_a_tool_that_was_removed_stays_in_the_prompt_and_is_not_allowed(
    front_end: FrontEnd,
) -> None:
    messages = [{"role": "user", "content": "Begin."}, *turn(1, "tool_removal", LOOK)]
    tools = [tool(LOOK), tool("mend")]
    body = {"model": "m", "max_tokens": 5, "tools": tools, "messages": messages}
    assert f'"name": "{LOOK}"' in front_end.text(front_end.ids(MESSAGES, body))
    context = RequestContext(MESSAGES, body)
    for_sglang(SimpleNamespace(), context)
    assert context.allowed_tools == {"mend"}
    again = RequestContext(
        MESSAGES, {**body, "messages": [*messages, *turn(2, "tool_addition", LOOK)]}
    )
    for_sglang(SimpleNamespace(), again)
    assert again.allowed_tools is None
    named = {**body, "tool_choice": {"type": "tool", "name": LOOK}}
    with pytest.raises(HTTPException, match=f"'{LOOK}' was removed"):
        for_sglang(SimpleNamespace(), RequestContext(MESSAGES, named))


def test_a_later_definition_of_a_tool_replaces_an_earlier_one(front_end: FrontEnd) -> None:
    second = {**tool("fly"), "description": "To fly higher."}
    defined = {"type": "tool_definition", "definition": second}
    messages = [
        {"role": "user", "content": "Begin."},
        *turn(1, "tool_addition", "fly"),
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "Go on."},
        {"role": "system", "content": [{"type": "tool_addition", "tool": defined}]},
    ]
    body = {"model": "m", "max_tokens": 5, "tools": [tool(LOOK)], "messages": messages}
    flying = [each for each in front_end.request(MESSAGES, body).tools if each.defer_loading]
    assert [each.function.description for each in flying] == ["To fly higher."]
    prompt = front_end.text(front_end.ids(MESSAGES, body))
    assert line("fly") in prompt
    assert "To fly higher." in prompt


def test_what_cannot_be_offered_is_said(front_end: FrontEnd) -> None:
    web = {"type": "web_search_20250305", "name": "web_search"}
    changed = [
        {"type": "tool_reference", "name": "nowhere"},
        {"type": "mcp_tool_reference", "name": "post", "server_name": "mail"},
        {"type": "mcp_toolset_reference", "server_name": "files"},
        {"type": "tool_definition", "definition": web},
    ]
    blocks = [{"type": "tool_addition", "tool": each} for each in changed]
    messages = [{"role": "user", "content": "Begin."}, {"role": "system", "content": blocks}]
    body = {"model": "m", "max_tokens": 5, "tools": [tool(LOOK)], "messages": messages}
    prompt = front_end.text(front_end.ids(MESSAGES, body))
    for name in ("nowhere", "post", "files", "web_search"):
        assert f"The tool {name} is not available." in prompt
    assert translate(of_path(MESSAGES), body, Model()).counts["tool_addition"] == len(changed)


def test_deferred_tools_of_chat_completions_are_defined_by_references(front_end: FrontEnd) -> None:
    names = ("mend", "paint")
    functions = [{"name": n, "description": f"To {n}.", "parameters": {}} for n in names]
    tools = [{"type": "function", "function": functions[0]}]
    tools.append({"type": "function", "function": functions[1], "defer_loading": True})
    call = {"id": "c", "type": "function", "function": {"name": "mend", "arguments": "{}"}}
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Begin."}]
    plain = front_end.ids(CHAT, {"model": "m", "tools": tools[:1], "messages": messages})
    assert front_end.ids(CHAT, {"model": "m", "tools": tools, "messages": messages}) == plain
    found = {"role": "tool", "tool_call_id": "c"}
    messages += [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {**found, "content": [{"type": "tool_reference", "name": "paint"}]},
    ]
    ids = front_end.ids(CHAT, {"model": "m", "tools": tools, "messages": messages})
    assert ids[: len(plain)] == plain
    assert '"name":"paint"' in front_end.text(ids)


def test_routing_expects_the_head_that_the_prompt_has() -> None:
    messages = [{"role": "user", "content": "Begin."}]
    plain = {"model": "m", "tools": [tool(LOOK)], "messages": messages}
    more = {**plain, "tools": [tool("mend", defer_loading=True), tool(LOOK)]}
    chains = [read_chain(of_path(MESSAGES), body) for body in (plain, more)]
    assert chains[0].hashes == chains[1].hashes


def test_items_of_responses_bring_tools_along() -> None:
    mend = {"type": "function", "name": "mend", "description": "To mend.", "parameters": {}}
    note = {"type": "custom", "name": "note", "description": "To note."}
    crm = {"type": "namespace", "name": "crm", "description": "CRM.", "tools": [mend]}
    brought = {"type": "additional_tools", "role": "developer", "tools": [mend, note]}
    searched = [
        {"type": "tool_search_call", "call_id": "s", "arguments": {"goal": "crm"}},
        {"type": "tool_search_output", "call_id": "s", "tools": [crm, mend]},
    ]
    user = {"role": "user", "content": "Go on."}
    body = {"input": [user, brought, user, *searched], "tools": [{**mend, "name": "look"}]}
    found = translate(of_path("/v1/responses"), body, Model())
    offered = [(each["name"], bool(each.get("defer_loading"))) for each in found.body["tools"]]
    assert offered == [("look", False), ("mend", True), ("note", True), ("crm__mend", True)]
    first, _, call, second = found.body["input"][1:]
    assert first["role"] == second["role"] == "developer"
    assert '"name":"mend"' in first["content"]
    assert '"name":"note"' in first["content"]
    assert call["content"] == '[tool_search was called with {"goal":"crm"}]'
    assert '"name":"crm__mend"' in second["content"]
    assert "The tool mend is available." in second["content"]
    assert found.counts["additional_tools"] == found.counts["tool_search_output"] == 1


def test_responses_keep_the_mark_of_deferred_tools() -> None:
    asked = [SimpleNamespace(name="look", defer_loading=None)]
    asked.append(SimpleNamespace(name="mend", defer_loading=True))

    def convert(_: Any, request: Any) -> Any:
        names = [each.name for each in request.tools]
        return [
            SimpleNamespace(function=SimpleNamespace(name=name, defer_loading=None))
            for name in names
        ]

    tools = keep_deferral(convert, SimpleNamespace(), SimpleNamespace(tools=asked))  # type: ignore[arg-type]
    assert [each.function.defer_loading for each in tools] == [None, True]
