"""Grammars of calls, against SGLang's parsers and xgrammar itself."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

from sgl_ext.compat import tool_choice

NAMES = ("look", "write")
BY_TAG = {"deepseekv32", "glm47", "hermes", "kimi_k2", "mistral", "qwen25", "qwen3_coder"}


def parser_of(name: str, tools: tuple[str, ...] = NAMES) -> Any:
    from sglang.srt.entrypoints.openai.protocol import Tool
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    functions = [{"name": tool, "parameters": {"type": "object"}} for tool in tools]
    return FunctionCallParser([Tool(type="function", function=f) for f in functions], name)


@cache
def _compiler() -> Any:
    import xgrammar

    vocabulary = [bytes([byte]) for byte in range(256)] + [b"</s>"]
    kind = xgrammar.VocabType.RAW
    info = xgrammar.TokenizerInfo(vocabulary, kind, stop_token_ids=[256])
    return xgrammar.GrammarCompiler(info)


def accepts(form: Any, text: str) -> bool:
    """Whether an answer of a format may be this text, and then end."""
    import xgrammar

    written = json.dumps({"type": "structural_tag", "format": form})
    matcher = xgrammar.GrammarMatcher(_compiler().compile_structural_tag(written))
    return matcher.accept_string(text) and matcher.accept_token(256)


def written(name: str, *, space: str = " ", line: str = "\n") -> str:
    """A call as models write it that are trained on qwen's format."""
    call = f'{{"name":{space}"{name}", "arguments":{space}{{"path":{space}"a"}}}}'
    return f"<tool_call>{line}{call}{line}</tool_call>"


@pytest.mark.parametrize("name", tool_choice.STARTS)
def test_a_parser_finds_calls_by_their_start_and_text_without_it_has_none(name: str) -> None:
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    form = tool_choice.no_call(name)
    detector = FunctionCallParser.ToolCallParserEnum[name]()
    assert not detector.has_tool_call('An <answer> with [brackets] and {"name": "look"}')
    for start in tool_choice.STARTS[name]:
        said = f"Look: {start}"
        assert any(detector.has_tool_call(said + rest) for rest in ("[x", "\nx"))
        assert not accepts(form, said)
        assert accepts(form, said[:-1])
        assert accepts(tool_choice.any_call(name), f"{start} a call")
        assert not accepts(tool_choice.any_call(name), said)


@pytest.mark.parametrize("name", sorted(tool_choice.STARTS))
@pytest.mark.parametrize("must_call", [False, True])
def test_sglangs_own_grammars_are_used_where_there_are_some(name: str, must_call: bool) -> None:
    parser = parser_of(name)
    form = tool_choice.calls_of(parser, name, must_call=must_call, one=False, thinks=False)
    if form is None:
        assert name not in BY_TAG
        return
    assert accepts(form, "I will look.") is not must_call


@pytest.mark.parametrize("name", ["qwen25", "hermes", "trinity"])
@pytest.mark.parametrize(("space", "line"), [(" ", "\n"), ("", ""), ("", "\n"), (" ", "")])
def test_calls_may_have_the_white_space_that_models_write(name: str, space: str, line: str) -> None:
    parser = parser_of(name)
    form = tool_choice.calls_of(parser, name, must_call=True, one=False, thinks=False)
    call = written("look", space=space, line=line)
    # A parser that wants the line breaks reads no call without them.
    is_read = bool(parser.detector.detect_and_parse(call, parser.tools).calls)
    assert is_read or not line
    assert accepts(form, call) == is_read
    assert accepts(form, f"{call}\n{call}") == is_read


def test_no_other_tool_and_no_further_one() -> None:
    parser = parser_of("qwen25", NAMES[:1])
    form = tool_choice.calls_of(parser, "qwen25", must_call=False, one=True, thinks=False)
    look, write = written("look"), written("write")
    assert accepts(form, f"I look.\n{look}")
    assert accepts(form, "I need not look.")
    assert not accepts(form, write)
    assert not accepts(form, f"{look}\n{look}")


def test_calls_or_an_answer_of_the_schema() -> None:
    parser = parser_of("qwen25")
    form = tool_choice.calls_of(parser, "qwen25", must_call=True, one=False, thinks=False)
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    kind, tag = tool_choice.json_or(json.dumps(schema), tool_choice.tag(form or {})[1])
    assert kind == "structural_tag"
    either = tag.model_dump()["format"]
    for text in ('{"n": 1}', '\n\n{"n": 1}', written("look"), "\n\n" + written("write")):
        assert accepts(either, text)
    with pytest.raises(ValueError, match="uniqueItems"):
        tool_choice.json_or('{"type": "array", "uniqueItems": true}', tag)
    for text in ('{"n": "1"}', "I look.", "", written("paint"), '{"n": 1} and more'):
        assert not accepts(either, text)
