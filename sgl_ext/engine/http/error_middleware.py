"""Puts every error that the engine answers into the shape of its protocol, in streams, too.

status >= 400       the body is collected, and sent in the protocol's shape
on a native path    likewise, in SGLang's own shape, if it exposes the server's internals
an error event      the event is sent in the protocol's shape
/v1/messages        SGLang answers status 200 to a stream that fails before its first event with
                    content. So the head waits for the second event, and becomes an error's head
"""

from __future__ import annotations

from typing import Any

import orjson

from sgl_ext.engine.http.error_shape import (
    INTERNAL,
    EngineError,
    error_of_validation,
    failed_event,
    native_body,
    read_error,
    scrubbed,
    shaped,
    without_internals,
)
from sgl_ext.protocols.anthropic import ANTHROPIC, status_of_type
from sgl_ext.protocols.chat import OLLAMA_CHAT
from sgl_ext.protocols.errors import OPENAI_ERRORS
from sgl_ext.protocols.native import GENERATE, OLLAMA_GENERATE
from sgl_ext.protocols.registry import errors_of
from sgl_ext.protocols.request_ids import id_line, new_request_id
from sgl_ext.protocols.routes import EMBEDDING, PARSING, SYSTEM_ONE

_WRONG_TYPE = "body: a field has a value of a type that it cannot have"
_WRONG_VALUE = "body: a field has a value that nothing can be made of"
_GENERATES = "This model generates text. It neither embeds nor classifies."
# Their answers depend on the body alone, so what raises an error is in the body.
_OF_BODY = frozenset((*PARSING, *GENERATE.paths, *OLLAMA_CHAT.paths, *OLLAMA_GENERATE.paths))
_DETOKENIZE = "/detokenize"  # with any prefix; SGLang answers 500 for tokens that do not exist
_REPLACED_HEADERS = (b"content-length", b"content-type", b"transfer-encoding")


def is_shaped(path: str) -> bool:
    """Whether errors on a path have the shape of a protocol; native ones keep SGLang's."""
    # SGLang documents a shape of its own for SYSTEM_ONE.
    return path.startswith("/v1/") and not path.startswith(SYSTEM_ONE)


class ErrorMiddleware:
    """An ASGI application around another."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path = scope["path"]
        answer = _ShapedAnswer(path, send) if is_shaped(path) else _NativeAnswer(path, send)
        if path in EMBEDDING and _is_generator(scope):
            await answer.reject(EngineError(400, _GENERATES))
            return
        try:
            await self.app(scope, receive, answer.take)
        except Exception as error:
            message = "" if answer.is_begun else _fault_of_body(path, error)
            if not message:
                raise
            await answer.reject(EngineError(400, message))


class _NativeAnswer:
    """One answer of a native path on its way out."""

    def __init__(self, path: str, send: Any) -> None:
        self._path = path
        self._send = send
        self._start: Any = None  # the head of an error, while its body is collected
        self._parts: list[bytes] = []
        self.is_begun = False

    async def take(self, message: Any) -> None:
        """Takes its next ASGI message."""
        if message["type"] == "http.response.start":
            self.is_begun = True
            self._start = message if message["status"] >= 400 else None
            if self._start is None:
                await self._begin(message)
        elif message["type"] != "http.response.body":
            await self._send(message)
        elif self._start is None:
            await self._take_part(message)
        else:
            self._parts.append(message.get("body", b""))
            if message.get("more_body", False):
                return
            if self._start["status"] == 500 and self._path.endswith(_DETOKENIZE):
                await self.reject(EngineError(400, _WRONG_VALUE, "tokens"))
            else:
                await self._end_error(self._start, b"".join(self._parts))

    async def reject(self, error: EngineError) -> None:
        """Answers an error where nothing was answered yet."""
        start = {"type": "http.response.start", "status": error.status, "headers": []}
        await self._send_error(start, native_body(error))

    async def _begin(self, start: Any) -> None:
        await self._send(start)

    async def _take_part(self, message: Any) -> None:
        await self._send(message)

    async def _end_error(self, start: Any, body: bytes) -> None:
        clean = without_internals(start["status"], body)
        if clean is None:
            await self._send(start)
            await self._send({"type": "http.response.body", "body": body})
        else:
            await self._send_error(start, clean)

    async def _send_error(self, start: Any, body: bytes, *more: tuple[bytes, bytes]) -> None:
        headers = [h for h in start.get("headers", ()) if h[0].lower() not in _REPLACED_HEADERS]
        headers.append((b"content-type", b"application/json"))
        headers.append((b"content-length", b"%d" % len(body)))
        await self._send({**start, "headers": [*headers, *more]})
        await self._send({"type": "http.response.body", "body": body})


class _ShapedAnswer(_NativeAnswer):
    """One answer of a protocol's path on its way out."""

    def __init__(self, path: str, send: Any) -> None:
        super().__init__(path, send)
        self._shape = errors_of(path)
        self._is_stream = False
        self._is_over = False
        self._waiting: Any = None  # the head of a stream that has sent nothing yet

    async def take(self, message: Any) -> None:
        """Takes its next ASGI message."""
        if not self._is_over:
            await super().take(message)

    async def reject(self, error: EngineError) -> None:
        """Answers an error where nothing was answered yet."""
        await self._send_shaped({"type": "http.response.start", "headers": []}, error)

    async def _begin(self, start: Any) -> None:
        kinds = [v for name, v in start.get("headers", ()) if name.lower() == b"content-type"]
        self._is_stream = any(b"event-stream" in kind for kind in kinds)
        if self._is_stream and self._shape is ANTHROPIC.errors:
            self._waiting = start
        else:
            await self._send(start)

    async def _take_part(self, message: Any) -> None:
        data = message.get("body", b"")
        if self._waiting is not None:
            if data.startswith(b"event: error"):
                await self._send_shaped(self._waiting, _event_error(data))
                return
            self._parts.append(data)
            if data.startswith(b"event: message_start") and message.get("more_body", False):
                return
            start, self._waiting = self._waiting, None
            await self._send(start)
            for part in self._parts[:-1]:
                await self._send({**message, "body": part, "more_body": True})
        elif self._is_stream and data.startswith(
            (b"event: error", b'data: {"error"', b"event: response.failed")
        ):
            message = {**message, "body": self._reshaped(data)}
        await self._send(message)

    def _reshaped(self, data: bytes) -> bytes:
        if data.startswith(b"event: response.failed"):
            return failed_event(data)
        if self._shape is ANTHROPIC.errors:
            return b"event: error\ndata: %b\n\n" % shaped(self._path, _event_error(data), "")
        if self._shape is OPENAI_ERRORS:
            document = orjson.loads(data.removeprefix(b"data: "))
            code = document["error"].get("code")
            status = code if isinstance(code, int) and 400 <= code < 600 else 500
            error = read_error(status, orjson.dumps(document))
            return b"data: %b\n\n" % shaped(self._path, error, "")
        return data

    async def _end_error(self, start: Any, body: bytes) -> None:
        await self._send_shaped(start, read_error(start["status"], body))

    async def _send_shaped(self, start: Any, error: EngineError) -> None:
        self._is_over = True
        request_id = new_request_id()
        name, _, value = id_line(self._shape, request_id).strip().partition(b": ")
        body = shaped(self._path, error, request_id)
        await self._send_error({**start, "status": error.status}, body, (name, value))


def _event_error(data: bytes) -> EngineError:
    error = orjson.loads(data.partition(b"\ndata: ")[2])["error"]
    status = status_of_type(error["type"])
    return EngineError(status, scrubbed(status, error["message"]))


def _is_generator(scope: Any) -> bool:
    chat = getattr(scope["app"].state, "openai_serving_chat", None)
    return chat is not None and bool(chat.tokenizer_manager.is_generation)


def _fault_of_body(path: str, error: Exception) -> str:
    """What is wrong with a body for which SGLang raised this; "" if the body may be right."""
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
    """Puts all errors of SGLang's application into shape. Call it before the application serves."""
    from fastapi.exceptions import RequestValidationError
    from starlette.responses import JSONResponse, Response

    app.add_middleware(ErrorMiddleware)
    sglangs_handler = app.exception_handlers[RequestValidationError]

    async def reject(request: Any, error: Any) -> Any:
        """Answers what is wrong with a body, which the middleware then shapes."""
        if not is_shaped(request.url.path):
            return await sglangs_handler(request, error)
        found = error_of_validation(error.errors())
        document = {"error": {"message": found.message, "param": found.param}}
        return JSONResponse(document, found.status)

    async def fail(request: Any, error: Exception) -> Any:
        """Answers errors that the application did not catch. Starlette calls it outside of the
        middleware."""
        path, request_id = request.url.path, new_request_id()
        name, _, value = id_line(errors_of(path), request_id).decode().strip().partition(": ")
        body = shaped(path, EngineError(500, INTERNAL), request_id)
        return Response(body, 500, headers={name: value}, media_type="application/json")

    app.add_exception_handler(RequestValidationError, reject)
    app.add_exception_handler(Exception, fail)
