"""Stop reasons of answers on /v1/messages, in the words of their protocol."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from fastapi import HTTPException

from sgl_ext.compat.anthropic_answers import (
    complete_answer,
    complete_event,
    note_finish_reason,
    watch_stream,
    with_stop_reason,
)
from sgl_ext.engine.core.request_context import RequestContext, enter


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
        ('{"a": NaN}', '{"a":"NaN"}'),
        ("{", '{"input":"{"}'),
        ("", "{}"),
        (None, "{}"),
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


async def test_a_stream_signs_each_block_of_thinking() -> None:
    enter_request()
    first, second = ({"type": "thinking_delta", "thinking": text} for text in ("Loo", 'k "here".'))
    text = {"type": "text", "text": '"content_block":{"type":"thinking"'}
    events = [_start({"type": "thinking", "thinking": ""}, 0), _sent(first, 0), _sent(second, 0)]
    events += [_stop(0), _start(text, 1), _sent({"type": "text_delta", "text": "a"}, 1), _stop(1)]
    events += [_start({"type": "thinking", "thinking": ""}, 2), _sent(first, 2), _stop(2)]
    sent = [event for each in events for event in _events(each)]
    deltas = [event for event in sent if event.get("delta", {}).get("type") == "signature_delta"]
    assert [event["index"] for event in deltas] == [0, 2]
    signatures = [event["delta"]["signature"] for event in deltas]
    assert len(set(signatures)) == 2
    blocks = [event["content_block"] for event in sent if "content_block" in event]
    assert [block.pop("signature", None) for block in blocks] == ["", None, ""]
    assert [event for event in sent if event not in deltas] == [event for event, _ in events]

    document = {
        "stop_reason": "end_turn",
        "content": [{"type": "thinking", "thinking": 'Look "here".'}, {"type": "text"}],
        "usage": {"input_tokens": 1, "output_tokens": 1},
    }

    async def whole() -> Any:
        return _Answer(document)

    answer = await complete_answer(whole)
    assert [block.get("signature") for block in answer.content["content"]] == [signatures[0], None]


async def test_the_end_of_a_stream_counts_the_prompt_too() -> None:
    enter_request()
    usage = {"input_tokens": 20, "cache_read_input_tokens": 80, "output_tokens": 0}
    (begin,) = _events(({"type": "message_start", "message": {"usage": usage}}, "message_start"))
    end = {"type": "message_delta", "delta": {}, "usage": {"output_tokens": 7}}
    (shown,) = _events((end, "message_delta"))
    assert begin["message"]["usage"].items() >= usage.items()
    assert shown["usage"] == begin["message"]["usage"] | {"output_tokens": 7}


async def test_a_message_of_which_nothing_is_shown_counts_its_prompt() -> None:
    enter_request()
    usage = {"prompt_tokens": 13, "completion_tokens": 1}
    end = {"choices": [{"delta": {}, "finish_reason": "length"}], "usage": None}
    begin, counted = (
        _line(choices=[{"delta": {"role": "assistant"}}]),
        _line(choices=[], usage=usage),
    )
    lines = [begin, _line(**end), counted, "data: [DONE]\n\n"]
    given = [line async for line in watch_stream(_stream, lines)]
    assert given == [begin, _line(**(end | {"usage": usage})), counted, lines[-1]]
    assert [line async for line in watch_stream(_stream, lines[:2])] == lines[:2]


class _Answer:
    def __init__(self, content: Any) -> None:
        self.status_code, self.content, self.body = 200, content, orjson.dumps(content)


def _start(block: Any, index: int) -> tuple[dict[str, Any], str]:
    event = {"type": "content_block_start", "index": index, "content_block": block}
    return event, "content_block_start"


def _sent(delta: Any, index: int) -> tuple[dict[str, Any], str]:
    return {"type": "content_block_delta", "index": index, "delta": delta}, "content_block_delta"


def _stop(index: int) -> tuple[dict[str, Any], str]:
    return {"type": "content_block_stop", "index": index}, "content_block_stop"


def _events(event: tuple[dict[str, Any], str]) -> list[dict[str, Any]]:
    """What the client gets for an event of SGLang's."""
    document, kind = event
    lines = complete_event(lambda data, _: f"{data}\n", orjson.dumps(document).decode(), kind)
    return [orjson.loads(line) for line in lines.splitlines()]


def _line(**chunk: Any) -> str:
    return f"data: {orjson.dumps(chunk).decode()}\n\n"


async def _stream(lines: list[str]) -> AsyncIterator[str]:
    for line in lines:
        yield line


async def test_fields_that_are_null_are_there() -> None:
    enter_request()
    usage = {"input_tokens": 1, "output_tokens": 0}
    (begin,) = _events(({"type": "message_start", "message": {"usage": usage}}, "message_start"))
    delta = {"stop_reason": "max_tokens"}
    (end,) = _events(({"type": "message_delta", "delta": delta, "usage": usage}, "message_delta"))
    nulls = {"stop_reason": None, "stop_sequence": None}
    assert begin["message"].items() >= nulls.items()
    assert end["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}

    async def whole() -> Any:
        content = [{"type": "thinking", "thinking": "a"}, {"type": "text", "text": ""}]
        return _Answer({"stop_reason": "max_tokens", "content": content, "usage": usage})

    answer = await complete_answer(whole)
    assert answer.content["stop_sequence"] is None
    assert [block["type"] for block in answer.content["content"]] == ["thinking"]


async def test_the_usage_says_how_many_tokens_were_thinking() -> None:
    enter_request()
    answer = response("stop")
    answer.usage = SimpleNamespace(reasoning_tokens=5)
    note_finish_reason(lambda _, found: found, None, answer)
    usage = {"input_tokens": 1, "output_tokens": 9}

    async def whole() -> Any:
        return _Answer({"stop_reason": "end_turn", "content": [], "usage": usage})

    shown = (await complete_answer(whole)).content["usage"]
    assert shown["output_tokens_details"] == {"thinking_tokens": 5}

    enter_request()
    counted = {"prompt_tokens": 1, "prompt_tokens_details": {"cached_tokens": 1}}
    lines = [
        _line(choices=[{"delta": {"content": '"usage":{"reasoning_tokens":99}'}}]),
        _line(choices=[], usage={**counted, "reasoning_tokens": 7}),
    ]
    assert [line async for line in watch_stream(_stream, lines)] == lines
    end = {"type": "message_delta", "delta": {}, "usage": {"output_tokens": 9}}
    (shown,) = _events((end, "message_delta"))
    assert shown["usage"]["output_tokens_details"] == {"thinking_tokens": 7}
