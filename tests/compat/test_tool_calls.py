"""A model's text and calls arrive complete, wherever its stream is cut into chunks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sgl_ext.compat.tool_calls import forward_unknown_tools, hold_space, parse_chunk, release_space

DECLARED = ("look", "write", "read")
CALLS = [
    ("look", {"path": "/a/b.py"}),
    ("paint", {"colour": ["<tool_call>", {}]}),
    ("write", {"text": "<tool_call>\n[1, 2]", "n": 3}),
]
SAID = "I will look.\n"


def spoken(said: str, calls: Sequence[tuple[str, dict[str, Any]]]) -> str:
    blocks = [json.dumps({"name": name, "arguments": given}) for name, given in calls]
    return said + "\n".join(f"<tool_call>\n{block}\n</tool_call>" for block in blocks)


@pytest.fixture(autouse=True, scope="module")
def hooked() -> Iterator[None]:
    from sglang.srt.function_call.base_format_detector import BaseFormatDetector
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    with pytest.MonkeyPatch.context() as patch:

        def hook(owner: Any, name: str, around: Any) -> None:
            original = getattr(owner, name)
            patch.setattr(owner, name, lambda *given: around(original, *given))

        hook(BaseFormatDetector, "parse_streaming_increment", parse_chunk)
        hook(FunctionCallParser, "parse_stream_chunk", hold_space)
        hook(FunctionCallParser, "parse_stream_end", release_space)
        patch.setenv("SGLANG_FORWARD_UNKNOWN_TOOLS", "0")  # so that it is undone
        patch.delenv("SGLANG_FORWARD_UNKNOWN_TOOLS")
        forward_unknown_tools()
        yield


def parser(format: str = "qwen25") -> Any:
    from sglang.srt.entrypoints.openai.protocol import Tool
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    tools = [Tool(type="function", function={"name": name}) for name in DECLARED]
    return FunctionCallParser(tools, format)


def heard(pieces: Sequence[str], format: str = "qwen25") -> tuple[str, list[tuple[str, Any]]]:
    """The text and the calls that a client gets from a stream cut in these places."""
    stream = parser(format)
    found: list[tuple[str, list[Any]]] = [stream.parse_stream_chunk(piece) for piece in pieces]
    found.append(stream.parse_stream_end())
    text = "".join(said for said, _ in found)
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    for call in (call for _, calls in found for call in calls):
        if call.name:
            names[call.tool_index] = call.name
        arguments[call.tool_index] = arguments.get(call.tool_index, "") + call.parameters
    return text, [(names[n], json.loads(arguments[n])) for n in sorted(names)]


def cut(text: str, places: set[int]) -> list[str]:
    ends = [*sorted(place for place in places if place < len(text)), len(text)]
    return [text[a:b] for a, b in zip([0, *ends], ends, strict=False)]


WHOLE = spoken(SAID, CALLS)


@given(st.sets(st.integers(1, len(WHOLE) - 1)))
@example({165, 167, 262})  # cuts an end marker after its second character
def test_text_and_calls_arrive_complete_however_the_stream_is_cut(places: set[int]) -> None:
    text, calls = heard(cut(WHOLE, places))
    assert text == SAID.rstrip()
    assert calls == CALLS


def test_a_whole_answer_may_come_in_one_chunk() -> None:
    assert heard([WHOLE]) == (SAID.rstrip(), CALLS)


def test_a_whole_answer_is_the_same() -> None:
    text, calls = parser().parse_non_stream(WHOLE)
    assert text == SAID.rstrip()
    assert [(call.name, json.loads(call.parameters)) for call in calls] == CALLS


@given(st.text(max_size=40), st.sets(st.integers(1, 60)))
@example("a <tool", set())
@example("a\n</tool", {3})
@example("<", set())
def test_an_answer_without_calls_passes_unchanged(text: str, places: set[int]) -> None:
    if "tool_call>" in text:
        return
    assert heard(cut(text, places)) == (text, [])


def mark(name: str) -> str:
    return f"<\uff5ctool\u2581{name}\uff5c>"


DEEPSEEK = [
    *(mark("calls\u2581begin"), mark("call\u2581begin"), "read", mark("sep"), '{"path": "a"}'),
    *(mark("call\u2581end"), mark("calls\u2581end")),
]
GLM = [
    *("<tool_call>", "read\n", "<arg_key>", "path", "</arg_key>", "\n", "<arg_value>", "a"),
    *("</arg_value>", "\n", "</tool_call>"),
]


HARMONY = (
    "<|start|>assistant<|channel|>commentary to=functions.read <|constrain|>json<|message|>"
    '{"path": "a"}<|call|>'
)


def test_words_before_a_call_of_gpt_oss_are_said_once() -> None:
    calls = [("read", {"path": "a"})]
    assert heard(["I will", " look.", HARMONY], "gpt-oss") == ("I will look.", calls)


@pytest.mark.parametrize(
    ("name", "call"), [("deepseekv31", DEEPSEEK), ("glm45", GLM)], ids=["deepseek", "glm"]
)
def test_words_that_come_with_a_call_are_kept_in_formats_with_parsers_of_their_own(
    name: str, call: list[str]
) -> None:
    text, calls = heard(["I will", f" look.{call[0]}", *call[1:]], name)
    assert (text, calls) == ("I will look.", [("read", {"path": "a"})])
