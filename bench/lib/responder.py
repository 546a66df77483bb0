"""A worker that only answers: the least that a proxy can stand in front of.

    python -m bench.lib.responder PORT

It speaks enough of SGLang's API for routers to take it for one. A chat
completion is answered at once, streamed if its body says so: the head, then
ten events, each in a packet of its own as an engine sends them. A body comes
with its length, or in chunks.
"""

from __future__ import annotations

import asyncio
import sys
from typing import cast

import orjson
import uvloop

_EVENTS = 10
_MODEL = {
    "model_path": "bench",
    "model_id": "bench",
    "served_model_name": "bench",
    "tokenizer_path": "bench",
    "is_generation": True,
    "tp_size": 1,
    "dp_size": 1,
    "max_running_requests": 1024,
    "max_total_num_tokens": 1 << 20,
    "disaggregation_mode": "null",
    "version": "0.5.23",
}
_PAGES = {
    b"/health": b"",
    b"/ready": b"",
    b"/model_info": orjson.dumps(_MODEL),
    b"/get_model_info": orjson.dumps(_MODEL),
    b"/server_info": orjson.dumps(_MODEL),
    b"/get_server_info": orjson.dumps(_MODEL),
    b"/v1/models": orjson.dumps(
        {"object": "list", "data": [{"id": "bench", "object": "model", "owned_by": "bench"}]}
    ),
}
_COMPLETION = orjson.dumps(
    {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "bench",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Done. " * 20},
                "finish_reason": "stop",
            }
        ],
        "usage": {"prompt_tokens": 1000, "completion_tokens": 40, "total_tokens": 1040},
    }
)


def _answer(status: bytes, body: bytes) -> bytes:
    head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % (status, len(body)) + body


def _event(number: int) -> bytes:
    delta = {"index": 0, "delta": {"content": f"word{number} "}, "finish_reason": None}
    event = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1}
    data = b"data: %b\n\n" % orjson.dumps({**event, "model": "bench", "choices": [delta]})
    return b"%x\r\n%b\r\n" % (len(data), data)


_ANSWERS = {path: _answer(b"200 OK", body) for path, body in _PAGES.items()}
WHOLE = _answer(b"200 OK", _COMPLETION)
_UNKNOWN = _answer(b"404 Not Found", b'{"error": "unknown"}')
_LAST_CHUNK = b"\r\n0\r\n\r\n"
_STREAMS = b'"stream":true'
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
_STREAM = (
    _STREAM_HEAD,
    *(_event(number) for number in range(_EVENTS)),
    b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n",
)


class Responder(asyncio.Protocol):
    """One connection; requests come one at a time."""

    def __init__(self) -> None:
        self._head = b""
        self._left = 0
        self._in_chunks = False
        self._stream = False
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's is one in all but name.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if not self._left and not self._in_chunks:
            data = self._head + data
            end = data.find(b"\r\n\r\n")
            if end < 0:
                self._head = data
                return
            self._start(data[:end], data[end + 4 :])
        else:
            self._left -= len(data)
            self._note_stream(data)
        if self._in_chunks:
            # No JSON ends like the last chunk.
            self._in_chunks = not self._tail.endswith(_LAST_CHUNK)
            self._left = 0
        if not self._left and not self._in_chunks:
            self._respond()

    def _start(self, head: bytes, body: bytes) -> None:
        self._head = b""
        self._target = head.split(b" ", 2)[1].partition(b"?")[0]
        lower = head.lower()
        at = lower.find(b"\r\ncontent-length:")
        size = int(lower[at + 17 :].partition(b"\r\n")[0]) if at >= 0 else 0
        self._left = size - len(body)
        self._in_chunks = b"\r\ntransfer-encoding: chunked" in lower
        self._stream = False
        self._tail = b""
        self._note_stream(body)

    def _note_stream(self, data: bytes) -> None:
        self._stream = self._stream or _STREAMS in self._tail + data[:32] or _STREAMS in data
        self._tail = (self._tail + data[-32:])[-32:]

    def _respond(self) -> None:
        if self._target != b"/v1/chat/completions":
            self._transport.write(_ANSWERS.get(self._target, _UNKNOWN))
        elif self._stream:
            self._send_from(0)
        else:
            self._transport.write(WHOLE)

    def _send_from(self, part: int) -> None:
        self._transport.write(_STREAM[part])
        if part + 1 < len(_STREAM):
            asyncio.get_running_loop().call_soon(self._send_from, part + 1)


async def _serve(port: int) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Responder, "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(_serve(int(sys.argv[1])))
