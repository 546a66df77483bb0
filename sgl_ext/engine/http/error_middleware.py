"""Puts every error that the engine answers into the shape of its protocol, in streams, too.

status >= 400       the body is collected, and sent reshaped
a native path's     likewise, in SGLang's own shape, if it tells of the server's inside
a stream's error    its event is reshaped
/v1/messages        a stream that fails before it says anything is an error with a status,
                    as SGLang answers none: the head waits for the second event
"""

from __future__ import annotations

from typing import Any

import orjson

from sgl_ext.engine.http.error_shape import (
    INTERNAL,
    EngineError,
    failed_event,
    of_validation,
    plain,
    read_error,
    scrubbed,
    shaped,
    without_inside,
)
from sgl_ext.protocols.anthropic import ANTHROPIC, status_of_type
from sgl_ext.protocols.chat import OLLAMA_CHAT
from sgl_ext.protocols.errors import OPENAI_ERRORS
from sgl_ext.protocols.native import GENERATE, OLLAMA_GENERATE
from sgl_ext.protocols.registry import errors_of
from sgl_ext.protocols.request_ids import id_line, new_request_id
from sgl_ext.protocols.routes import EMBEDDING, PARSING

_OWN_SHAPE = "/v1/systemone"  # SGLang documents another one there
_WRONG_TYPE = "body: a field has a value of a type that it cannot have"
_WRONG_VALUE = "body: a field has a value that nothing can be made of"
_GENERATES = "This model generates text. It neither embeds nor classifies."
# What is answered follows from the body, so what cannot be answered is the body's fault.
_OF_BODY = frozenset((*PARSING, *GENERATE.paths, *OLLAMA_CHAT.paths, *OLLAMA_GENERATE.paths))
_OF_TOKENS = "/detokenize"  # at the end; SGLang answers 500 for tokens that there are not
_OF_ANSWERS = ("http.response.start", "http.response.body")
_LAID_ASIDE = (b"content-length", b"content-type", b"transfer-encoding")


def is_shaped(path: str) -> bool:
    """Whether errors on a path have the shape of a protocol; native ones keep SGLang's."""
    return path.startswith("/v1/") and not path.startswith(_OWN_SHAPE)


class ErrorTap:
    """An ASGI application around another."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path = scope["path"]
        answer = _Answer(path, send) if is_shaped(path) else _NativeAnswer(path, send)
        if path in EMBEDDING and _is_generator(scope):
            await answer.refuse(EngineError(400, _GENERATES))
            return
        try:
            await self.app(scope, receive, answer.take)
        except Exception as error:
            why = "" if answer.is_begun else _fault_of_body(path, error)
            if not why:
                raise
            await answer.refuse(EngineError(400, why))


class _NativeAnswer:
    """One answer of a native path on its way out."""

    def __init__(self, path: str, send: Any) -> None:
        self._path = path
        self._send = send
        self._start: Any = None
        self._parts: list[bytes] = []
        self.is_begun = False

    async def take(self, message: Any) -> None:
        """The next ASGI message of it."""
        if message["type"] == "http.response.start":
            self.is_begun = True
            self._start = message if message["status"] >= 400 else None
        if self._start is None or message["type"] not in _OF_ANSWERS:
            await self._send(message)
        elif message["type"] == "http.response.body":
            self._parts.append(message.get("body", b""))
            if message.get("more_body", False):
                return
            if self._start["status"] == 500 and self._path.endswith(_OF_TOKENS):
                await self.refuse(EngineError(400, _WRONG_VALUE))
            else:
                await self._end(self._start, b"".join(self._parts))

    async def refuse(self, error: EngineError) -> None:
        """Answers an error where nothing was answered yet."""
        start = {"type": "http.response.start", "status": error.status, "headers": []}
        await self._end(start, b"", plain(error))

    async def _end(self, start: Any, body: bytes, told: bytes | None = None) -> None:
        told = told or without_inside(start["status"], body)
        if told is not None:
            body = told
            start = {**start, "headers": _headers(start, body)}
        await self._send(start)
        await self._send({"type": "http.response.body", "body": body})


class _Answer:
    """One answer on its way out."""

    def __init__(self, path: str, send: Any) -> None:
        self._path = path
        self._shape = errors_of(path)
        self._send = send
        self._start: Any = None
        self._parts: list[bytes] = []
        self.is_begun = False
        self._is_error = False
        self._is_stream = False
        self._is_over = False

    async def take(self, message: Any) -> None:
        """The next ASGI message of it."""
        if message["type"] == "http.response.start":
            await self._begin(message)
        elif self._is_over or message["type"] != "http.response.body":
            if not self._is_over:
                await self._send(message)
        elif self._is_error:
            self._parts.append(message.get("body", b""))
            if not message.get("more_body", False):
                status, body = self._start["status"], b"".join(self._parts)
                if status == 500 and self._path.endswith(_OF_TOKENS):
                    await self.refuse(EngineError(400, _WRONG_VALUE, "tokens"))
                else:
                    await self._end_as_error(read_error(status, body), status)
        elif self._is_stream:
            await self._take_event(message)
        else:
            await self._send(message)

    async def refuse(self, error: EngineError) -> None:
        """Answers an error where nothing was answered yet."""
        self._start = {"headers": ()}
        await self._end_as_error(error, error.status)

    async def _begin(self, start: Any) -> None:
        self.is_begun = True
        self._start = start
        self._is_error = start["status"] >= 400
        kinds = [v for name, v in start.get("headers", ()) if name.lower() == b"content-type"]
        self._is_stream = any(b"event-stream" in kind for kind in kinds)
        waits = self._is_stream and self._shape is ANTHROPIC.errors
        if not self._is_error and not waits:
            self._start = None
            await self._send(start)

    async def _take_event(self, message: Any) -> None:
        data = message.get("body", b"")
        if self._start is not None:  # nothing of it has been sent
            if data.startswith(b"event: error"):
                error = _event_error(data)
                await self._end_as_error(error, error.status)
                return
            self._parts.append(data)
            if data.startswith(b"event: message_start") and message.get("more_body", False):
                return
            start, self._start = self._start, None
            await self._send(start)
            for part in self._parts[:-1]:
                await self._send({**message, "body": part, "more_body": True})
        elif data.startswith((b"event: error", b'data: {"error"', b"event: response.failed")):
            message = {**message, "body": self._reshaped(data)}
        await self._send(message)

    def _reshaped(self, data: bytes) -> bytes:
        if data.startswith(b"event: response.failed"):
            return failed_event(data)
        if self._shape is ANTHROPIC.errors:
            told = shaped(self._path, _event_error(data), "")
            return b"event: error\ndata: %b\n\n" % told
        if self._shape is OPENAI_ERRORS:
            document = orjson.loads(data.removeprefix(b"data: "))
            code = document["error"].get("code")
            status = code if isinstance(code, int) and 400 <= code < 600 else 500
            error = read_error(status, orjson.dumps(document))
            return b"data: %b\n\n" % shaped(self._path, error, "")
        return data

    async def _end_as_error(self, error: EngineError, status: int) -> None:
        self._is_over = True
        request_id = new_request_id()
        body = shaped(self._path, error, request_id)
        name, _, value = id_line(self._shape, request_id).strip().partition(b": ")
        headers = [*_headers(self._start, body), (name, value)]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})


def _event_error(data: bytes) -> EngineError:
    error = orjson.loads(data.partition(b"\ndata: ")[2])["error"]
    status = status_of_type(error["type"])
    return EngineError(status, scrubbed(status, error["message"]))


def _headers(start: Any, body: bytes) -> list[tuple[bytes, bytes]]:
    """Those of an answer whose body is another one now."""
    kept = [h for h in start.get("headers", ()) if h[0].lower() not in _LAID_ASIDE]
    length = (b"content-length", b"%d" % len(body))
    return [*kept, (b"content-type", b"application/json"), length]


def _is_generator(scope: Any) -> bool:
    chat = getattr(scope["app"].state, "openai_serving_chat", None)
    return chat is not None and bool(chat.tokenizer_manager.is_generation)


def _fault_of_body(path: str, error: Exception) -> str:
    """What is wrong with a body for which this was raised; "": nothing that is known."""
    from jinja2 import TemplateError

    if is_shaped(path):
        return _WRONG_TYPE if _is_of_validation(error) else ""
    of_values = (ValueError, TypeError, LookupError, OverflowError, TemplateError)
    return _WRONG_VALUE if path in _OF_BODY and isinstance(error, of_values) else ""


def _is_of_validation(error: Exception) -> bool:
    """Whether an error was raised while a body was validated: some of SGLang's validators take
    a field's type for granted."""
    step = error.__traceback__
    while step is not None:
        if step.tb_frame.f_code.co_name == "solve_dependencies":
            return True
        step = step.tb_next
    return False


def install(app: Any) -> None:
    """Has all errors of SGLang's application in shape. Before it serves."""
    from fastapi.exceptions import RequestValidationError
    from starlette.responses import JSONResponse, Response

    app.add_middleware(ErrorTap)
    of_sglang = app.exception_handlers[RequestValidationError]

    async def refuse(request: Any, error: Any) -> Any:
        """What is wrong with a body, for the tap to shape."""
        if not is_shaped(request.url.path):
            return await of_sglang(request, error)
        found = of_validation(error.errors())
        told = {"message": found.message, "param": found.param}
        return JSONResponse({"error": told}, found.status)

    async def fail(request: Any, error: Exception) -> Any:
        """Starlette answers what nobody caught outside of the tap."""
        path, request_id = request.url.path, new_request_id()
        name, _, value = id_line(errors_of(path), request_id).decode().strip().partition(": ")
        body = shaped(path, EngineError(500, INTERNAL), request_id)
        return Response(body, 500, headers={name: value}, media_type="application/json")

    app.add_exception_handler(RequestValidationError, refuse)
    app.add_exception_handler(Exception, fail)
