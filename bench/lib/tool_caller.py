"""An engine that follows a script: so many tool calls in each conversation, then a text.

    python -m bench.lib.tool_caller PORT CALLS

It speaks `/v1/responses` as a stream, and answers at once. `GET /seen` tells when the first and the
latest request came, in seconds, and how many bytes all had.
"""

from __future__ import annotations

import sys
import time
from typing import Any
from uuid import uuid4

import orjson
from aiohttp import web

_ARGUMENTS = '{"cmd": "true"}'
_DETAILS = {
    "input_tokens_details": {"cached_tokens": 0},
    "output_tokens_details": {"reasoning_tokens": 0},
}
_USAGE = {"input_tokens": 5, "output_tokens": 2, "total_tokens": 7, **_DETAILS}
_LARGEST = 1 << 28
_CALLS = web.AppKey("calls", int)
_SEEN = web.AppKey("seen", list[tuple[float, int]])


async def _respond(request: web.Request) -> web.StreamResponse:
    body = await request.read()
    request.app[_SEEN].append((time.monotonic(), len(body)))
    items = orjson.loads(body)["input"]
    results = sum(item.get("type") == "function_call_output" for item in items)
    id = uuid4().hex
    item: dict[str, Any] = {"id": f"fc_{id}", "type": "function_call", "status": "completed"}
    item |= {"call_id": f"call_{id}", "name": "exec_command", "arguments": _ARGUMENTS}
    if results >= request.app[_CALLS]:
        content = [{"type": "output_text", "text": "Done.", "annotations": []}]
        item = {"id": f"msg_{id}", "type": "message", "role": "assistant", "content": content}
    begun = {"id": f"resp_{id}", "object": "response", "created_at": 1, "model": "bench"}
    begun |= {"status": "in_progress", "output": [], "tools": [], "tool_choice": "auto"}
    done = {**begun, "status": "completed", "output": [item], "usage": _USAGE}
    answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await answer.prepare(request)
    events: tuple[tuple[str, dict[str, Any]], ...] = (
        ("response.created", {"response": begun}),
        ("response.output_item.added", {"output_index": 0, "item": item}),
        ("response.output_item.done", {"output_index": 0, "item": item}),
        ("response.completed", {"response": done}),
    )
    for number, (kind, fields) in enumerate(events):
        event = orjson.dumps({"type": kind, "sequence_number": number, **fields})
        await answer.write(b"event: %b\ndata: %b\n\n" % (kind.encode(), event))
    return answer


async def _tell(request: web.Request) -> web.Response:
    seen = request.app[_SEEN]
    times = [at for at, _ in seen] or [0.0]
    told = {"first_s": times[0], "latest_s": times[-1], "bytes": sum(size for _, size in seen)}
    seen.clear()
    return web.json_response(told)


async def _ok(request: web.Request) -> web.Response:
    return web.json_response({})


def main(port: int, calls: int) -> None:
    app = web.Application(client_max_size=_LARGEST)
    app[_CALLS], app[_SEEN] = calls, []
    app.router.add_post("/v1/responses", _respond)
    app.router.add_get("/seen", _tell)
    for path in ("/health", "/ready"):
        app.router.add_get(path, _ok)
    app.router.add_post("/v1/prefill", _ok)
    web.run_app(app, host="127.0.0.1", port=port, print=None)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
