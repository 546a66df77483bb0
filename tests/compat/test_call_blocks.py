"""In each format whose calls have an end, all words and calls arrive, in order, however an answer
is cut into pieces, and the same whole and streamed. An answer that is cut off gets no end."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sgl_ext.compat import tool_calls
from sgl_ext.compat.call_blocks import BLOCKS, Cutter
from sgl_ext.engine.core.request_context import RequestContext, current, entered
from tests.compat.formats import WRITE

FORMATS = sorted(BLOCKS)
CALLS = [("look", {"path": "a b", "how": "well"}), ("write", {"text": "x\ny"})]
SAID = ["One.", "Between.", "And last."]
_SCHEMA = {
    "type": "object",
    "properties": {name: {"type": "string"} for name in ("path", "how", "text")},
}


@pytest.fixture(autouse=True, scope="module")
def hooked() -> Iterator[None]:
    from sglang.srt.function_call.base_format_detector import BaseFormatDetector
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    with pytest.MonkeyPatch.context() as patch:

        def hook(owner: Any, name: str, around: Any) -> None:
            original = getattr(owner, name)
            patch.setattr(owner, name, lambda *given, **kw: around(original, *given, **kw))

        hook(BaseFormatDetector, "parse_streaming_increment", tool_calls.parse_chunk)
        hook(FunctionCallParser, "parse_stream_chunk", tool_calls.hold_space)
        hook(FunctionCallParser, "parse_stream_end", tool_calls.release_space)
        hook(FunctionCallParser, "parse_non_stream", tool_calls.parse_whole)
        hook(FunctionCallParser, "has_tool_call", tool_calls.has_call)
        patch.setenv("SGLANG_FORWARD_UNKNOWN_TOOLS", "0")  # so that it is undone
        patch.delenv("SGLANG_FORWARD_UNKNOWN_TOOLS")
        tool_calls.forward_unknown_tools()
        yield


@pytest.fixture(autouse=True)
def request_context() -> Iterator[RequestContext]:
    context = RequestContext("/v1/chat/completions", {})
    with entered(context):
        yield context


def parser(form: str) -> Any:
    from sglang.srt.entrypoints.openai.protocol import Tool
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    tools = [
        Tool(type="function", function={"name": name, "parameters": _SCHEMA})
        for name in ("look", "write")
    ]
    return FunctionCallParser(tools, form)


def answer(form: str) -> str:
    blocks = [WRITE[form](name, given) for name, given in CALLS]
    return f"{SAID[0]}\n{blocks[0]}\n{SAID[1]}\n{blocks[1]}\n{SAID[2]}"


def heard(form: str, pieces: Sequence[str], *, is_cut: bool = False) -> list[Any]:
    """The words and calls of a stream in order, a call as name and text of its arguments."""
    stream, cutter = parser(form), Cutter(BLOCKS[form])
    context = current()
    assert context is not None
    context.is_cut = is_cut
    parts = [stream.parse_stream_chunk(part) for each in pieces for part in cutter.pieces(each)]
    parts.append(stream.parse_stream_end())
    found: list[Any] = []
    calls: dict[int, list[str]] = {}
    for words, made in parts:
        assert not (words and made), "words and calls of a piece have no order"
        if words and found and isinstance(found[-1], str):
            found[-1] += words
        elif words:
            found.append(words)
        for call in made:
            if call.tool_index not in calls:
                calls[call.tool_index] = ["", ""]
                found.append(calls[call.tool_index])
            calls[call.tool_index][0] += call.name or ""
            calls[call.tool_index][1] += call.parameters
    return found


def read(found: list[Any]) -> list[Any]:
    return [
        each.strip() if isinstance(each, str) else (each[0], json.loads(each[1])) for each in found
    ]


EXPECTED = [SAID[0], CALLS[0], SAID[1], CALLS[1], SAID[2]]


def test_every_format_is_tried() -> None:
    assert set(WRITE) == set(BLOCKS)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("length", [1, 2, 3, 7, 1000])
def test_words_and_calls_arrive_in_order(form: str, length: int) -> None:
    text = answer(form)
    pieces = [text[at : at + length] for at in range(0, len(text), length)]
    assert read(heard(form, pieces)) == EXPECTED


@pytest.mark.parametrize("form", FORMATS)
@given(data=st.data())
@settings(suppress_health_check=list(HealthCheck))
def test_words_and_calls_arrive_however_an_answer_is_cut(form: str, data: st.DataObject) -> None:
    text = answer(form)
    places = sorted(data.draw(st.sets(st.integers(1, len(text) - 1), max_size=12)))
    pieces = [text[a:b] for a, b in pairwise([0, *places, len(text)])]
    with entered(RequestContext("/v1/chat/completions", {})):
        assert read(heard(form, pieces)) == EXPECTED


@pytest.mark.parametrize("form", FORMATS)
def test_a_whole_answer_has_the_words_and_calls_of_a_stream(form: str) -> None:
    text = answer(form)
    streamed = heard(form, [text[at : at + 5] for at in range(0, len(text), 5)])
    assert parser(form).has_tool_call(text)
    words, calls = parser(form).parse_non_stream(text)
    assert words == "".join(each for each in streamed if isinstance(each, str))
    assert [(call.name, json.loads(call.parameters)) for call in calls] == CALLS
    context = current()
    assert context is not None
    order = [each if isinstance(each, str) else calls[each].name for each in context.parts]
    assert order == [each if isinstance(each, str) else each[0] for each in streamed]


def is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


@pytest.mark.parametrize("form", FORMATS)
def test_a_call_that_is_cut_off_is_no_whole_one(form: str) -> None:
    """Wherever the answer is cut, each call is one that the model has written whole, or open."""
    text = answer(form)
    for end in range(1, len(text)):
        for length in (3, 1000):
            shown = text[:end]
            pieces = [shown[at : at + length] for at in range(0, end, length)]
            calls = [each for each in heard(form, pieces, is_cut=True) if not isinstance(each, str)]
            whole = parser(form).parse_non_stream(shown)[1]
            calls += [[call.name, call.parameters] for call in whole]
            for name, arguments in calls:
                expected = dict(CALLS)[name]
                assert not is_object(arguments) or json.loads(arguments) == expected, end


@pytest.mark.parametrize("form", FORMATS)
def test_what_a_cut_answer_wrote_of_a_call_is_words_unless_the_call_is_told(form: str) -> None:
    """Nothing that the model wrote is lost, also where its parser takes whole calls alone."""
    name, given = CALLS[1]
    written = WRITE[form](name, given)
    text = f"{SAID[0]}\n{WRITE[form](*CALLS[0])}\n{SAID[1]}\n"
    # A part of a marker could be one of the end, and what separates belongs to the format.
    ends = [block.end or "" for block in BLOCKS[form]]
    first = max(map(len, (*ends, *(block.start for block in BLOCKS[form]))))
    separator = next((block.end or "" for block in BLOCKS[form] if block.separates), "\n")
    for end in range(first, len(written)):
        shown = text + written[:end]
        wrote = f"{SAID[1]}\n{written[:end]}".replace(separator, "\n").split()
        for length in (3, 1000):
            pieces = [shown[at : at + length] for at in range(0, len(shown), length)]
            words, *further = heard(form, pieces, is_cut=True)[2:]
            assert further or words.split() == wrote, (end, length)
        whole, calls = parser(form).parse_non_stream(shown)
        assert len(calls) == 2 or "".join(whole.split()) == "".join([SAID[0], *wrote]), end


ODD_ARGUMENTS = [
    '{"n": NaN, "of": [1e999, 1.50]}',
    '"a text with \\" }</tool_call>"',
    "-Infinity",
    "null",
    "[1, {}]",
    '{"lines": "one\ntwo"}',
]


@pytest.mark.parametrize("form", ["hermes", "qwen25", "interns1"])
@pytest.mark.parametrize("written", ODD_ARGUMENTS)
@pytest.mark.parametrize(
    "head", ['{"name": "look", "arguments": %s}', '{"arguments":%s, "name":"look"}']
)
@pytest.mark.parametrize("length", [1, 4, 1000])
def test_arguments_are_the_characters_that_were_written(
    form: str, written: str, head: str, length: int
) -> None:
    text = WRITE[form]("look", {}).replace('{"name": "look", "arguments": {}}', head % written)
    text += "\nDone."
    pieces = [text[at : at + length] for at in range(0, len(text), length)]
    found = heard(form, pieces)
    assert found[0] == ["look", written]
    assert "".join(found[1:]).strip() == "Done."
