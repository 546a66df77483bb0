"""Streams of /v1/responses: words and calls in order, and an open end for an answer that was cut.

SGLang sends the words of a chunk before the calls that begin in it, so a chunk is cut where calls
begin and end. It calls the last item of each answer completed; after `length` it is incomplete.
"""

from collections.abc import AsyncIterator, Callable
from typing import Any

import orjson

from sgl_ext.compat.call_blocks import BLOCKS, Cutter
from sgl_ext.compat.cut_answers import note_end
from sgl_ext.engine.arguments import in_effect

_DONE = "event: response.output_item.done\n"
_INCOMPLETE = "event: response.incomplete\n"
_OPEN = ("reasoning", "message")


async def in_order(results: AsyncIterator[Any], parser: str | None) -> AsyncIterator[Any]:
    """The results of a generation, each with words or a part of a call. Notes why it ends."""
    cutter = Cutter(BLOCKS.get(parser or "", ()))
    is_whole, known = not in_effect().incremental_streaming_output, 0
    async for result in results:
        chunk = result if isinstance(result, dict) else getattr(result, "last_output", None)
        if not isinstance(chunk, dict) or not isinstance(chunk.get("text"), str):
            yield result
            continue
        text, meta = chunk["text"], chunk.get("meta_info") or {}
        *before, last = cutter.pieces(text[known:])
        going_on = {**chunk, "meta_info": {**meta, "finish_reason": None}}
        for piece in before:
            known += len(piece)
            yield {**going_on, "text": text[:known] if is_whole else piece}
        known = len(text) if is_whole else 0
        note_end(meta.get("finish_reason"))
        yield {**chunk, "text": last} if before and not is_whole else result


async def with_open_end(events: AsyncIterator[str]) -> AsyncIterator[str]:
    """The events of a stream, whose last item is incomplete if the response is."""
    held = ""
    async for event in events:
        if held:
            if event.startswith(_INCOMPLETE):
                held = _changed(held, lambda document: [document["item"]])
            yield held
            held = ""
        if event.startswith(_DONE):
            held = event
            continue
        if event.startswith(_INCOMPLETE):
            event = _changed(event, lambda document: document["response"]["output"][-1:])
        yield event
    if held:
        yield held


def _changed(event: str, items: Callable[[Any], list[Any]]) -> str:
    """An event whose items, if they are words, are incomplete."""
    head, _, data = event.partition("data: ")
    document = orjson.loads(data)
    for item in items(document):
        if item["type"] in _OPEN:
            item["status"] = "incomplete"
    return f"{head}data: {orjson.dumps(document).decode()}\n\n"
