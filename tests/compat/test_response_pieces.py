"""Streams of /v1/responses: each result has words or calls, and a cut answer ends open."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from sgl_ext.compat import tool_calls
from sgl_ext.engine.core.request_context import RequestContext, enter

BEFORE, CALL, AFTER = "One. ", "<tool_call>\n{}\n</tool_call>", "\nTwo."


async def given(items: list[Any]) -> AsyncIterator[Any]:
    for item in items:
        yield item


@pytest.mark.parametrize("is_incremental", [False, True])
@pytest.mark.parametrize("length", [1, 9, 1000])
async def test_a_result_has_words_or_calls(
    monkeypatch: pytest.MonkeyPatch, is_incremental: bool, length: int
) -> None:
    usual = SimpleNamespace(incremental_streaming_output=is_incremental)
    monkeypatch.setattr(tool_calls, "in_effect", lambda: usual)
    context = RequestContext("/v1/responses", {})
    enter(context)
    text = BEFORE + CALL + AFTER
    ends = [*range(length, len(text), length), len(text)]
    results = [
        {
            "text": text[max(0, end - length) if end % length == 0 else end - end % length : end]
            if is_incremental
            else text[:end],
            "meta_info": {"finish_reason": {"type": "length"} if end == len(text) else None},
        }
        for end in ends
    ]
    found, read = [], 0
    async for result in tool_calls.in_order(given(results), "qwen25"):
        found.append(result["text"] if is_incremental else result["text"][read:])
        read = len(result["text"])
        last = result
    assert "".join(found) == text
    for piece in found:
        assert not (CALL in piece and piece != CALL)
    assert last["meta_info"]["finish_reason"] == {"type": "length"}
    assert context.is_cut


@pytest.mark.parametrize("kind", ["message", "reasoning", "function_call"])
@pytest.mark.parametrize("end", ["incomplete", "completed"])
async def test_the_last_words_of_a_cut_response_are_incomplete(kind: str, end: str) -> None:
    def event(name: str, **data: Any) -> str:
        return f"event: response.{name}\ndata: {json.dumps(data)}\n\n"

    item = {"type": kind, "status": "completed"}
    events = [
        event("output_item.done", item={"type": "reasoning", "status": "completed"}),
        event("output_item.added", item=item),
        event("output_item.done", item=item),
        event(end, response={"output": [item]}),
    ]
    found = [each async for each in tool_calls.with_open_end(given(events))]
    documents = [json.loads(each.partition("data: ")[2]) for each in found]
    is_open = end == "incomplete" and kind != "function_call"
    expected = "incomplete" if is_open else "completed"
    assert documents[0]["item"]["status"] == "completed"
    assert documents[2]["item"]["status"] == expected
    assert documents[3]["response"]["output"][0]["status"] == expected
