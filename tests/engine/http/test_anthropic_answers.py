"""Stop reasons of answers on /v1/messages, in the words of their protocol."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from fastapi import HTTPException

from sgl_ext.engine.core.request_context import RequestContext, enter
from sgl_ext.engine.http.anthropic_answers import note_finish_reason, watch_stream, with_stop_reason


def enter_request(path: str = "/v1/messages") -> RequestContext:
    context = RequestContext(path, {"stop_sequences": ["END"]})
    enter(context)
    return context


def response(reason: str, matched: Any = None) -> Any:
    message = SimpleNamespace(tool_calls=None)
    choice = SimpleNamespace(finish_reason=reason, matched_stop=matched, message=message)
    return SimpleNamespace(choices=[choice])


ENDED = {"stop_reason": "end_turn"}


@pytest.mark.parametrize(
    ("reason", "matched", "expected"),
    [
        ("stop", "END", {"stop_reason": "stop_sequence", "stop_sequence": "END"}),
        ("stop", "OTHER", ENDED),
        ("stop", 7, ENDED),
        ("stop", None, ENDED),
        ("length", None, ENDED),
        ("content_filter", None, {"stop_reason": "refusal"}),
    ],
)
async def test_a_stop_sequence_is_named(
    reason: str, matched: Any, expected: dict[str, Any]
) -> None:
    enter_request()
    answer = response(reason, matched)
    assert note_finish_reason(lambda _, found: found, None, answer) is answer
    assert with_stop_reason(ENDED) == expected
    enter_request()
    choice = {"finish_reason": reason, "matched_stop": matched}
    lines = ["data: {}\n\n", _line(choices=[choice]), "data: [DONE]\n\n"]
    assert [line async for line in watch_stream(_stream, lines)] == lines
    assert with_stop_reason(ENDED) == expected


async def test_an_answer_that_was_aborted_is_an_error() -> None:
    enter_request()
    with pytest.raises(HTTPException, match="500"):
        note_finish_reason(lambda _, found: found, None, response("abort"))
    lines = [_line(choices=[{"finish_reason": "abort"}]), "data: [DONE]\n\n"]
    (line,) = [line async for line in watch_stream(_stream, lines)]
    assert orjson.loads(line[6:])["error"]["code"] == 500


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"a": 1}', '{"a": 1}'),
        ("null", "{}"),
        ("[1]", '{"input":[1]}'),
        ('"x"', '{"input":"x"}'),
        ("{", "{"),
        ("", ""),
        (None, None),
    ],
)
async def test_a_call_that_was_cut_off_is_no_failure(arguments: Any, expected: Any) -> None:
    enter_request()
    answer = response("length")
    call = SimpleNamespace(function=SimpleNamespace(arguments=arguments))
    answer.choices[0].message.tool_calls = [call]
    note_finish_reason(lambda *_: None, None, answer)
    assert call.function.arguments == expected


async def test_other_protocols_are_left_alone() -> None:
    context = enter_request("/v1/chat/completions")
    lines = [_line(choices=[{"finish_reason": "abort"}])]
    assert [line async for line in watch_stream(_stream, lines)] == lines
    assert context.finish_reason is None


def _line(**chunk: Any) -> str:
    return f"data: {orjson.dumps(chunk).decode()}\n\n"


async def _stream(lines: list[str]) -> AsyncIterator[str]:
    for line in lines:
        yield line
