"""The hooks that translate for SGLang, with its own requests and front ends."""

from __future__ import annotations

import warnings
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest

from sgl_ext.engine.core.request_context import RequestContext, put_on
from sgl_ext.engine.http.translation import convert_messages, keep_budget, model_of, name_namespaces
from sgl_ext.reading.protocol import Model
from tests.sglang_versions import needs_group

TOOLS = [{"type": "namespace", "name": "agents", "tools": [{"type": "function", "name": "spawn"}]}]


def front_end(**facts: Any) -> Any:
    config = SimpleNamespace(is_multimodal=facts.pop("sees", False))
    usual = {"reasoning_parser": None, "tool_call_parser": "qwen25"}
    tokenizer = SimpleNamespace(chat_template=facts.pop("chat_template", "{{ messages }}"))
    manager = SimpleNamespace(model_config=config, tokenizer=tokenizer)
    templates = SimpleNamespace(python_chat_template=facts.pop("python_chat_template", None))
    served = {"tokenizer_manager": manager, "template_manager": templates}
    return SimpleNamespace(**{**served, **usual, **facts})


def test_a_model_s_abilities_are_read_from_its_front_end() -> None:
    assert model_of(None) == Model()
    assert model_of(front_end()) == Model(thinks=False, sees=False)
    assert model_of(front_end(reasoning_parser="qwen3", sees=True)) == Model()
    muse = model_of(front_end(tool_call_parser="muse"))
    assert muse.takes_namespaces
    assert muse.has_phases
    assert muse.defers_tools
    granite = "{% if not tool.defer_loading %}{{ tool }}{% endif %}"
    assert model_of(front_end(chat_template=granite)).defers_tools
    assert model_of(front_end(python_chat_template=object())).defers_tools
    assert model_of(front_end(use_harmony=True, tool_server=object())).runs_tools
    assert model_of(front_end(use_harmony=True)).has_phases


@needs_group("namespaces")
@pytest.mark.parametrize(("parser", "is_named"), [("qwen25", True), ("muse", False)])
async def test_calls_are_answered_by_the_names_that_the_client_gave(
    parser: str, is_named: bool
) -> None:
    with warnings.catch_warnings(action="ignore"):  # SGLang's, while it is imported
        serving = import_module("sglang.srt.entrypoints.openai.serving_responses")
        protocol = import_module("sglang.srt.entrypoints.openai.protocol")
    request = protocol.ResponsesRequest(input="a")
    raw = SimpleNamespace(state=SimpleNamespace())
    put_on(raw, RequestContext(body={"tools": TOOLS}))

    async def create(_: Any, created: Any, __: Any) -> Any:
        return created

    created = await name_namespaces(create, front_end(tool_call_parser=parser), request, raw)
    names = created._tool_state.names
    assert bool(names) is is_named
    item = serving.OpenAIServingResponses._make_tool_call_item("agents__spawn", "{}", set(), names)
    named = {"namespace": "agents", "name": "spawn"} if is_named else {"name": "agents__spawn"}
    assert named.items() <= item.model_dump().items()


def test_an_answer_may_have_all_of_its_budget() -> None:
    def two_less(request: Any) -> dict[str, Any]:
        limit = request.max_output_tokens
        return {"max_new_tokens": None if limit is None else limit - 2}

    for limit in (1, 16, None):
        params = keep_budget(two_less, SimpleNamespace(max_output_tokens=limit))
        assert params["max_new_tokens"] == limit


def test_thinking_and_text_of_an_answer_are_one_text_in_the_next_turn() -> None:
    def part(kind: str, text: str = "") -> Any:
        return SimpleNamespace(type=kind, text=text)

    def turn(role: str, *parts: Any) -> Any:
        return SimpleNamespace(role=role, content=list(parts))

    said = turn("assistant", part("text", "<think>\nHm.\n</think>\n\n"), part("text", "I look."))
    seen = turn("assistant", part("text", "a"), part("image_url"))
    question = turn("user", part("text", "a"), part("text", "b"))
    chat = SimpleNamespace(messages=[question, said, seen])
    serving: Any = None
    assert convert_messages(lambda *_: chat, serving, None) is chat
    assert said.content == "<think>\nHm.\n</think>\n\nI look."
    assert len(seen.content) == len(question.content) == 2
