"""How answers on /v1/messages ended, in the words of their protocol."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from fastapi import HTTPException

from sgl_ext.engine.core.request_context import RequestContext
from sgl_ext.engine.http import stop_reasons
from sgl_ext.engine.http.stop_reasons import note_finish_reason, watch_stream, with_stop_reason
from sgl_ext.requests.cache_marks import Marks
from sgl_ext.requests.segments import Chain


@pytest.fixture
def context(monkeypatch: pytest.MonkeyPatch) -> RequestContext:
    read = RequestContext("/v1/messages", {"stop_sequences": ["END"]}, Chain(), Marks())
    monkeypatch.setattr(stop_reasons, "current", lambda: read)
    return read


def response(reason: str, matched: Any = None) -> Any:
    message = SimpleNamespace(tool_calls=None)
    choice = SimpleNamespace(finish_reason=reason, matched_stop=matched, message=message)
    return SimpleNamespace(choices=[choice])


ENDED = {"stop_reason": "end_turn"}


@pytest.mark.parametrize(
    ("reason", "matched", "told"),
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
    context: RequestContext, reason: str, matched: Any, told: dict[str, Any]
) -> None:
    assert (
        note_finish_reason(lambda _, found: found, None, answer := response(reason, matched))
        is answer
    )
    assert with_stop_reason(ENDED) == told
    context.finish_reason = None
    choice = {"finish_reason": reason, "matched_stop": matched}
    lines = ["data: {}\n\n", _line(choices=[choice]), "data: [DONE]\n\n"]
    assert [line async for line in watch_stream(_stream, lines)] == lines
    assert with_stop_reason(ENDED) == told


async def test_an_answer_that_was_aborted_is_an_error(context: RequestContext) -> None:
    with pytest.raises(HTTPException, match="500"):
        note_finish_reason(lambda _, found: found, None, response("abort"))
    lines = [_line(choices=[{"finish_reason": "abort"}]), "data: [DONE]\n\n"]
    (told,) = [line async for line in watch_stream(_stream, lines)]
    assert orjson.loads(told[6:])["error"]["code"] == 500


@pytest.mark.parametrize(
    ("arguments", "told"),
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
def test_a_call_that_was_cut_is_no_failure(
    context: RequestContext, arguments: Any, told: Any
) -> None:
    answer = response("length")
    call = SimpleNamespace(function=SimpleNamespace(arguments=arguments))
    answer.choices[0].message.tool_calls = [call]
    note_finish_reason(lambda *_: None, None, answer)
    assert call.function.arguments == told


async def test_other_protocols_are_left_alone(context: RequestContext) -> None:
    context.path = "/v1/chat/completions"
    lines = [_line(choices=[{"finish_reason": "abort"}])]
    assert [line async for line in watch_stream(_stream, lines)] == lines
    assert context.finish_reason is None


def _line(**chunk: Any) -> str:
    return f"data: {orjson.dumps(chunk).decode()}\n\n"


async def _stream(lines: list[str]) -> AsyncIterator[str]:
    for line in lines:
        yield line
