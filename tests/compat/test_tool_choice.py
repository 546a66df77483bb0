"""The prompt and the grammar of each choice of tools."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from sgl_ext.compat import tool_choice
from sgl_ext.compat.tool_choice import constrain_calls, hold_choice, join_schema, keep_tools
from sgl_ext.engine.core.counters import counter
from sgl_ext.engine.core.request_context import RequestContext, enter, entered
from tests.compat.test_call_formats import accepts, parser_of, written

pytestmark = pytest.mark.filterwarnings("ignore:max_tokens is deprecated")
NAMES = ("look", "write")
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
ANSWER = '{"n": 1}'
FORM = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
LOOK: Any = {"type": "function", "function": {"name": "look"}}


@pytest.fixture(autouse=True)
def context() -> Iterator[None]:
    with entered(RequestContext()):
        yield


def chat_request(choice: Any, form: Any = None) -> Any:
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest

    tools = [{"type": "function", "function": {"name": name}} for name in NAMES]
    fields = {"messages": [], "tools": tools, "tool_choice": choice, "response_format": form}
    return ChatCompletionRequest(model="m", **fields)


class Prepared:
    """A chat completion on its way through SGLang's conversion, by what the hooks see of it."""

    def __init__(
        self,
        choice: Any,
        *,
        parser: str | None = "qwen25",
        backend: str = "xgrammar",
        allowed: frozenset[str] | None = None,
        form: Any = None,
        keeps: bool = True,
        withdrawn: frozenset[str] = frozenset(),
    ) -> None:
        context = RequestContext(
            "/v1/chat/completions",
            keeps_tools=keeps,
            allowed_tools=allowed,
            withdrawn_tools=withdrawn,
        )
        enter(context)
        self.shown: list[str] = []
        self._serving: Any = SimpleNamespace(
            tool_call_parser=parser,
            reasoning_parser="qwen3",
        )
        self.request = chat_request(choice, form)
        before = {what: self._count(what) for what in ("tool_choice", "answer_schema")}
        args = SimpleNamespace(grammar_backend=backend)
        with patch.object(tool_choice, "in_effect", lambda: args):
            processed = hold_choice(self._process, self._serving, self.request, False)
        self.counted = {what for what, times in before.items() if self._count(what) > times}
        self.constraint = processed.tool_call_constraint

    def _count(self, what: str) -> float:
        series = counter("choices_without_grammar").labels("/v1/chat/completions", what)
        value: float = series._value.get()
        return value

    def _process(self, serving: Any, request: Any, _: Any) -> Any:
        """As `OpenAIServingChat._process_messages` does it."""
        choice, constraint, tools = request.tool_choice, None, None
        if choice != "none":
            tools = [tool.model_dump() for tool in request.tools]
            if not isinstance(choice, str):
                tools = [t for t in tools if t["function"]["name"] == choice.function.name]
            if serving.tool_call_parser:
                parser = parser_of(serving.tool_call_parser)
                original = type(parser).get_structure_constraint
                constraint = constrain_calls(original, parser, choice, True, False)
        keep_tools(self._render, serving, request, tools, False)
        return SimpleNamespace(tool_call_constraint=constraint)

    def _render(self, serving: Any, request: Any, tools: Any, _: Any) -> None:
        self.shown = [tool["function"]["name"] for tool in tools or ()]

    @property
    def params(self) -> dict[str, Any]:
        from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest

        original = ChatCompletionRequest.to_sampling_params
        options = {"stop": [], "model_generation_config": {}}
        params: dict[str, Any] = join_schema(
            original, self.request, **options, tool_call_constraint=self.constraint
        )
        return params

    def accepts(self, text: str) -> bool:
        form = self.params["structural_tag"]
        return accepts(json.loads(form)["format"], text)


ALLOWED = frozenset({"look"})


@pytest.mark.parametrize(
    ("choice", "allowed"),
    [("auto", None), ("none", None), (LOOK, None), ("auto", ALLOWED), ("required", ALLOWED)],
)
def test_every_choice_has_the_same_prompt(choice: Any, allowed: Any) -> None:
    prepared = Prepared(choice, allowed=allowed)
    assert prepared.shown == [*NAMES]
    assert not prepared.counted


def test_the_option_restores_sglangs_prompts() -> None:
    assert Prepared("none", keeps=False).shown == []
    assert Prepared("none", keeps=False).constraint is None
    assert Prepared(LOOK, keeps=False).shown == ["look"]


def test_no_call_is_possible_without_a_choice() -> None:
    prepared = Prepared("none")
    assert prepared.accepts("I need not look.")
    assert not prepared.accepts(written("look"))
    assert "json_schema" in Prepared("none", form=FORM).params
    assert Prepared("none", form=FORM).params.get("structural_tag") is None


def test_only_allowed_tools_can_be_called() -> None:
    auto, required = Prepared("auto", allowed=ALLOWED), Prepared("required", allowed=ALLOWED)
    assert auto.accepts("I need not look.")
    assert auto.accepts(written("look"))
    assert not auto.accepts(written("write"))
    for forced in (required, Prepared(LOOK)):
        assert forced.accepts("\n\n" + written("look"))
        assert not forced.accepts(written("write"))
        assert not forced.accepts("I need not look.")


def test_a_schema_allows_a_call_or_an_answer() -> None:
    prepared = Prepared("auto", form=FORM)
    assert prepared.params.get("json_schema") is None
    assert prepared.accepts(ANSWER)
    assert prepared.accepts(written("write"))
    assert not prepared.accepts("I need not look.")
    limited = Prepared("auto", form=FORM, allowed=ALLOWED)
    assert limited.accepts(ANSWER)
    assert not limited.accepts(written("write"))
    forced = Prepared(LOOK, form=FORM).params  # SGLang has 400 for it
    assert forced.get("json_schema") is None
    assert "look" in forced["structural_tag"]


@pytest.mark.parametrize("name", ["glm45", "glm47", "minimax-m2", "spark25"])
def test_a_schema_allows_calls_that_only_begin_in_a_known_way(name: str) -> None:
    prepared = Prepared("auto", parser=name, form=FORM)
    assert prepared.accepts(ANSWER)
    assert not prepared.accepts("I need not look.")
    assert not prepared.counted


def test_without_a_grammar_the_prompt_has_the_allowed_tools_only() -> None:
    for parser, backend in (("llama3", "xgrammar"), ("qwen25", "llguidance"), (None, "xgrammar")):
        none = Prepared("none", parser=parser, backend=backend)
        assert (none.shown, none.constraint) == ([], None)
        assert none.counted == {"tool_choice"}
        limited = Prepared("auto", parser=parser, backend=backend, allowed=ALLOWED)
        assert limited.shown == ["look"]
        assert limited.counted == {"tool_choice"}
    generic = Prepared("auto", parser="glm45", allowed=ALLOWED)
    assert (generic.shown, generic.counted) == (["look"], {"tool_choice"})
    native = Prepared(LOOK, parser="hunyuan")
    assert (native.shown, native.counted) == (["look"], {"tool_choice"})


@pytest.mark.parametrize("parser", ["qwen25", "llama3"])
def test_a_tool_that_the_conversation_removed_stays_in_the_prompt(parser: str) -> None:
    prepared = Prepared("auto", parser=parser, allowed=ALLOWED, withdrawn=frozenset({"write"}))
    assert prepared.shown == [*NAMES]


def test_a_schema_without_a_grammar_of_calls_is_counted() -> None:
    prepared = Prepared("auto", parser="llama3", form=FORM)
    assert prepared.counted == {"answer_schema"}
    assert prepared.params["json_schema"]


def test_a_clients_own_grammar_stays() -> None:
    prepared = Prepared("none")
    prepared.request.regex = "a+"
    assert prepared.params["regex"] == "a+"
    assert prepared.params.get("structural_tag") is None


@pytest.mark.parametrize("choice", ["auto", {"type": "web_search"}])
def test_on_responses_too_a_schema_allows_a_call_or_an_answer(choice: Any) -> None:
    from sglang.srt.entrypoints.openai.protocol import ResponsesRequest

    prepared = Prepared("auto", form=FORM)
    text = {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}
    request = ResponsesRequest(model="m", input="a", tool_choice=choice, text=text)
    original = ResponsesRequest.to_sampling_params
    params = join_schema(original, request, tool_call_constraint=prepared.constraint)
    assert params.get("json_schema") is None
    form = json.loads(params["structural_tag"])["format"]
    assert accepts(form, ANSWER)
    assert accepts(form, written("look"))
    assert request.text is not None
