"""Puts every error that the engine answers into the shape of its protocol, in streams, too.

status >= 400       the body is collected, and sent in the protocol's shape
on a native path    likewise, in SGLang's own shape, if it exposes the server's internals
an error event      the event is sent in the protocol's shape
a stream            SGLang answers status 200 to a stream that fails before its first event with
                    content, for example because no grammar can be made of a schema. So the head
                    waits for that event, and becomes an error's head. Only the scheduler knows
                    whether a request can run, so nothing is known of it before
"""

import traceback
from typing import Any

import orjson
from starlette.datastructures import Headers, MutableHeaders

from sgl_ext.compat import error_shape, faults
from sgl_ext.compat.context_length import CODE as TOO_LONG
from sgl_ext.compat.context_length import too_long
from sgl_ext.compat.error_shape import INTERNAL, EngineError, scrubbed, shaped
from sgl_ext.engine.core.request_context import context_in
from sgl_ext.engine.core.request_names import request_id_of
from sgl_ext.protocols.anthropic import ANTHROPIC, status_of_type
from sgl_ext.protocols.chat import OLLAMA_CHAT
from sgl_ext.protocols.errors import OPENAI_ERRORS
from sgl_ext.protocols.models import ANTHROPIC_HEADER
from sgl_ext.protocols.models import PATH as MODELS
from sgl_ext.protocols.registry import GENERATE, OLLAMA_GENERATE, errors_of, path_meant
from sgl_ext.protocols.responses import RESPONSES
from sgl_ext.protocols.routes import (
    EMBEDDING,
    PARSING,
    SYSTEM_ONE,
    is_beside_responses,
    not_found,
)
from sgl_ext.reading.protocol import ErrorShape

_WRONG_TYPE = "body: a field has a value of a type that it cannot have"
_WRONG_VALUE = "body: a field has a value that nothing can be made of"
_GENERATES = "This model generates text. It neither embeds nor classifies."
# Their answers depend on the body alone, so what raises an error is in the body.
_OF_BODY = frozenset((*PARSING, *GENERATE.paths, *OLLAMA_CHAT.paths, *OLLAMA_GENERATE.paths))
_FAILED = b"event: response.failed"
_ERROR_EVENTS = (b"event: error", b'data: {"error"', _FAILED)
# Events that say nothing of the answer.
_FIRST_EVENTS = (
    b"event: message_start",
    b"event: response.created",
    b"event: response.queued",
    b"event: response.in_progress",
)
# SGLang streams lines of JSON there, and ends a stream without one if it fails.
_LINES = frozenset((*OLLAMA_CHAT.paths, *OLLAMA_GENERATE.paths))
# What the framework says of a path or a method that it does not have.
_NO_PATH, _WRONG_METHOD = "Not Found", "Method Not Allowed"
_DETOKENIZE = "/detokenize"  # with any prefix; SGLang answers 500 for tokens that do not exist


def is_shaped(path: str) -> bool:
    """Whether errors on a path have the shape of a protocol; native ones keep SGLang's."""
    # SGLang documents a shape of its own for SYSTEM_ONE.
    return path_meant(path).startswith("/v1/") and not path.startswith(SYSTEM_ONE)


def shape_of(scope: Any) -> ErrorShape:
    """The shape of errors of an ASGI scope: its path's, or its client's where a path has two."""
    path = scope["path"]
    if path.startswith(MODELS) and ANTHROPIC_HEADER.encode() in dict(scope["headers"]):
        return ANTHROPIC.errors
    return errors_of(path)


class ErrorMiddleware:
    """An ASGI application around another."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path = scope["path"]
        answer = _Answer(scope, send)
        if path in EMBEDDING and _generates(scope["app"]):
            await answer.reject(EngineError(400, _GENERATES))
            return
        try:
            await self.app(scope, receive, answer.take)
        except Exception as error:
            found = None if answer.is_begun else _fault_of_body(scope, error)
            if found is None:
                raise
            await answer.reject(found)


class _Answer:
    """One answer on its way out."""

    def __init__(self, scope: Any, send: Any) -> None:
        self._scope = scope
        self._path = path = scope["path"]
        self._send = send
        self._shape = shape_of(scope) if is_shaped(path) else None
        self._start: Any = None  # the head of an error, or of a stream, that waits
        self._parts: list[bytes] = []
        self._is_stream = False
        self._is_over = False
        self.is_begun = False  # whether its head is sent

    async def take(self, message: Any) -> None:
        """Takes its next ASGI message."""
        if self._is_over:
            return
        if message["type"] == "http.response.start":
            kind = Headers(raw=message.get("headers", ())).get("content-type", "")
            self._is_stream = "event-stream" in kind
            waits = self._is_stream and (self._shape is not None or self._path in GENERATE.paths)
            if waits or message["status"] >= 400 or self._path in _LINES:
                self._start = message
                return
        elif message["type"] == "http.response.body":
            if self._start is not None:
                await self._take_waiting(message)
                return
            data = message.get("body", b"")
            if self._is_stream and data.startswith(_ERROR_EVENTS):
                message = {**message, "body": self._reshaped(data)}
        self.is_begun = True
        await self._send(message)

    async def reject(self, error: EngineError, start: Any = None) -> None:
        """Answers an error, in place of the answer with the head `start`."""
        self._is_over = self.is_begun = True
        start = start or {"type": "http.response.start"}
        headers = MutableHeaders(raw=list(start.get("headers", ())))
        if self._shape is None:
            body = error_shape.native_body(error)
        else:
            name, value, body = _shaped_with_id(self._scope, error)
            headers.append(name, value)
        headers["content-type"] = "application/json"
        headers["content-length"] = str(len(body))
        del headers["transfer-encoding"]
        await self._send({**start, "status": error.status, "headers": headers.raw})
        await self._send({"type": "http.response.body", "body": body})

    async def _take_waiting(self, message: Any) -> None:
        """Takes a part of the body while the head waits."""
        start, data, more = self._start, message.get("body", b""), message.get("more_body", False)
        status = start["status"]
        if status < 400 and data.startswith(_ERROR_EVENTS) and self._is_answered():
            error = self._by_context(_error_in(data))
            # Codex compacts a conversation that is too long if an event says so, and on no status.
            if error.code != TOO_LONG or not data.startswith(_FAILED):
                await self.reject(error, start)
                return
            data = self._reshaped(data)
        self._parts.append(data)
        if more and (status >= 400 or self._says_nothing(data)):
            return
        self._start = None
        body = b"".join(self._parts)
        if status == 500 and self._path.endswith(_DETOKENIZE):
            await self.reject(EngineError(400, _WRONG_VALUE, "tokens"))
        elif status >= 400 and (self._shape is not None or error_shape.exposes_internals(body)):
            error = self._of_path(error_shape.read_error(status, body))
            await self.reject(self._by_context(error), {**start, "status": error.status})
        else:
            self.is_begun = True
            await self._send(start)
            await self._send({**message, "body": body})

    def _of_path(self, error: EngineError) -> EngineError:
        """An error that names the path, if it is one of the path: the framework names none, and
        takes a service beside stored responses for the id of one."""
        phrase = error.message if error.param is None else ""
        is_beside = phrase == _WRONG_METHOD and is_beside_responses(self._path)
        if phrase == _NO_PATH or is_beside:
            return EngineError(404, not_found(self._scope["method"], self._path))
        if phrase == _WRONG_METHOD:
            return error._replace(message=f"{self._scope['method']} {self._path}: {phrase}")
        return error

    def _is_answered(self) -> bool:
        """Whether an error in a stream's first event is answered in place of the stream. SGLang's
        own streams keep their errors, but for a field that is out of its range."""
        context = context_in(self._scope)
        return self._shape is not None or (context is not None and bool(context.wrong_field))

    def _says_nothing(self, event: bytes) -> bool:
        """Whether a stream can still fail without content: this event has none, or it is what
        SGLang sends of a request that the scheduler has aborted."""
        context = context_in(self._scope)
        is_failed = context is not None and context.failed_status is not None
        return is_failed or not event or event.startswith(_FIRST_EVENTS)

    def _by_context(self, error: EngineError) -> EngineError:
        """An error with what is known of it beside its answer."""
        context = context_in(self._scope)
        if context is None:
            return error
        if context.path in RESPONSES.paths:
            error = error_shape.with_item(faults.corrected(error, context), context.body)
        if context.wrong_field is not None and error.param is None:
            error = error._replace(param=context.wrong_field)
        return error_shape.with_path(error_shape.with_field(error, context.protocol, context.body))

    def _reshaped(self, data: bytes) -> bytes:
        """An event that says that a stream failed, in the protocol's shape."""
        if self._shape is not None and data.startswith(_FAILED):
            return error_shape.failed_event(data)
        if self._shape is ANTHROPIC.errors and data.startswith(b"event: error"):
            return b"event: error\ndata: %b\n\n" % shaped(self._shape, _error_in(data), "")
        if self._shape is OPENAI_ERRORS and data.startswith(b"data: "):
            return b"data: %b\n\n" % shaped(self._shape, _error_in(data), "")
        return data


async def send_error(
    scope: Any, error: EngineError, send: Any, *headers: tuple[bytes, bytes]
) -> None:
    """Answers an ASGI scope's request with an error in its protocol's shape, and these headers."""
    start = {"type": "http.response.start", "headers": headers}
    await _Answer(scope, send).reject(error, start)


def _shaped_with_id(scope: Any, error: EngineError) -> tuple[str, str, bytes]:
    """The name and value of the header with the request's id, and the error's body with it."""
    shape, request_id = shape_of(scope), request_id_of(scope)
    return shape.request_id_header, request_id, shaped(shape, error, request_id)


def _error_in(data: bytes) -> EngineError:
    """The error in an event that says that a stream failed."""
    if data.startswith(_FAILED):
        return error_shape.read_failed_event(data)
    if data.startswith(b"data: "):
        text = data.removeprefix(b"data: ")
        code = orjson.loads(text)["error"].get("code")
        status = code if isinstance(code, int) and 400 <= code < 600 else 500
        return error_shape.read_error(status, text)
    error = orjson.loads(data.partition(b"\ndata: ")[2])["error"]
    status = status_of_type(error["type"])
    return EngineError(status, scrubbed(status, error["message"]))


def _generates(app: Any) -> bool:
    chat = getattr(app.state, "openai_serving_chat", None)
    return chat is not None and bool(chat.tokenizer_manager.is_generation)


def _fault_of_body(scope: Any, error: Exception) -> EngineError | None:
    """What is wrong with a body for which SGLang raised this; None if the body may be right."""
    context = context_in(scope)
    if context is not None and context.wrong_field and isinstance(error, ValueError):
        return EngineError(400, str(error), context.wrong_field)
    message = _fault(scope["path"], error)
    return EngineError(400, message) if message else None


def _fault(path: str, error: Exception) -> str:
    from jinja2 import TemplateError

    if is_shaped(path):
        # Some of SGLang's validators take a field's type for granted.
        steps = traceback.walk_tb(error.__traceback__)
        is_validation = any(f.f_code.co_name == "solve_dependencies" for f, _ in steps)
        return _WRONG_TYPE if is_validation else ""
    if isinstance(error, ValueError) and (long := too_long(str(error))) is not None:
        return long.openai
    of_values = (ValueError, TypeError, LookupError, OverflowError, TemplateError)
    return _WRONG_VALUE if path in _OF_BODY and isinstance(error, of_values) else ""


def install(app: Any) -> None:
    """Puts all errors of SGLang's application into shape. Call it before the application serves."""
    from fastapi import HTTPException
    from fastapi.exceptions import RequestValidationError
    from starlette.responses import JSONResponse, Response

    faults.install()
    app.add_middleware(ErrorMiddleware)
    sglangs_handler = app.exception_handlers[RequestValidationError]
    sglangs_other_handler = app.exception_handlers[HTTPException]

    async def reject(request: Any, error: Any) -> Any:
        """Answers what is wrong with a body, which the middleware then shapes."""
        if not is_shaped(request.url.path):
            return await sglangs_handler(request, error)
        found = error_shape.error_of_validation(error.errors())
        document = {"error": {"message": found.message, "param": found.param}}
        return JSONResponse(document, found.status)

    async def reject_field(request: Any, error: Any) -> Any:
        """Answers an error of ours that names its field, which the middleware then shapes."""
        if isinstance(error.detail, dict):
            return JSONResponse({"error": error.detail}, error.status_code)
        return await sglangs_other_handler(request, error)

    async def fail(request: Any, error: Exception) -> Any:
        """Answers errors that the application did not catch. Starlette calls it outside of the
        middleware."""
        name, value, body = _shaped_with_id(request.scope, EngineError(500, INTERNAL))
        return Response(body, 500, headers={name: value}, media_type="application/json")

    app.add_exception_handler(RequestValidationError, reject)
    app.add_exception_handler(HTTPException, reject_field)
    app.add_exception_handler(Exception, fail)
