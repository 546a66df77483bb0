"""Errors of the engine in the shape of their protocol, without the server's internals.

SGLang's own shapes differ by path and by the code that raised them, and some show a traceback or
the server's files. An error that a harness acts upon is worded as its vendor words it: Claude Code
and Codex compact the conversation when a prompt is too long.
"""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import orjson

from sgl_ext.compat import context_length
from sgl_ext.compat.context_length import too_long
from sgl_ext.compat.validation import fields_of, of_item, plain
from sgl_ext.protocols.anthropic import ANTHROPIC
from sgl_ext.reading.places import value_at
from sgl_ext.reading.protocol import ErrorShape, Protocol

_LIMIT_CHARS = 1000
_SHOWN = 3
_INTERNALS = re.compile(
    r'Traceback|File \\?"|(/[\w.+@-]+){2,}\.(py\b|(cc|cpp|cu|h):\d)|\d validation errors?'
)
_TRACE = re.compile(r'^(Traceback\b|\s+File "|\s+POST /)')
_PLACE = re.compile(r"(\[\d\d:\d\d:\d\d\] )?(/[\w.+@-]+)+\.\w+:\d+:?\s*")
_FILE = re.compile(
    r"(?<![\w/:])(/[\w.+@-]+){2,}\.(py|pyc|so|cc|cpp|cu|h|rs|json|jinja|safetensors)\b"
)
_NO_GRAMMAR = re.compile(r"^Failed to compile (\w+) grammar: ")
_PATH = re.compile(r"(messages|prompt|tools|response_format)(\.[a-z0-9_]+)*")
_OWN_FIELDS = ("regex", "ebnf")
INTERNAL = "Internal server error"


class EngineError(NamedTuple):
    """An error that the engine answers. The message exposes nothing of the server."""

    status: int
    message: str
    param: str | None = None

    @property
    def code(self) -> str | None:
        """OpenAI's name for it, if it has one."""
        if too_long(self.message) is not None:
            return context_length.CODE
        return "model_not_found" if self.status == 404 and self.param == "model" else None


def read_error(status: int, body: bytes) -> EngineError:
    """The error in a body that has one of SGLang's shapes."""
    try:
        document: Any = orjson.loads(body)
    except orjson.JSONDecodeError:
        document = body.decode("utf-8", "replace")
    if isinstance(document, dict):
        document = document.get("error", document.get("detail", document))
    param = document.get("param") if isinstance(document, dict) else None
    message = document.get("message") if isinstance(document, dict) else document
    text = message if isinstance(message, str) else ""
    return EngineError(status, scrubbed(status, text), param if isinstance(param, str) else None)


def scrubbed(status: int, message: str) -> str:
    """A message without traces and files of the server. For status 500 it is INTERNAL, except where
    it says that an answer was aborted."""
    if status == 500 and not message.startswith("The answer was"):
        return INTERNAL
    lines = [line for line in plain(message).splitlines() if not _TRACE.match(line)]
    text = _FILE.sub("a file of the server", _PLACE.sub("", "\n".join(lines))).strip()
    return text[:_LIMIT_CHARS] or "The request failed."


def native_body(error: EngineError) -> bytes:
    """The JSON body of an error on a native path."""
    return orjson.dumps({"error": {"message": error.message}})


def exposes_internals(body: bytes) -> bool:
    """Whether an error's body exposes the server's internals."""
    return _INTERNALS.search(body.decode("utf-8", "replace")) is not None


def shaped(shape: ErrorShape, error: EngineError, request_id: str) -> bytes:
    """The JSON body of an error in a protocol's shape."""
    message = error.message
    if (found := too_long(message)) is not None:
        message = found.anthropic if shape is ANTHROPIC.errors else found.openai
    return shape.body(error.status, message, request_id, error.code, error.param)


def error_of_validation(errors: Sequence[Any]) -> EngineError:
    """What pydantic found wrong with a body: the first fields, and what they should be."""
    found = fields_of(errors)
    shown = [f"{path or 'body'}: {what}" for path, what in found[:_SHOWN]]
    if len(found) > _SHOWN:
        shown.append(f"and {len(found) - _SHOWN} more")
    param = found[0].path if found else ""
    return EngineError(400, scrubbed(400, "; ".join(shown)), param or None)


def with_field(error: EngineError, protocol: Protocol, body: Any) -> EngineError:
    """An error that says which field no grammar can be made of.

    A grammar with a structural tag is made of the tools, and of the answer's schema if there is
    one.
    """
    found = _NO_GRAMMAR.match(error.message)
    if found is None or error.param is not None:
        return error
    formats = (found[1],) if found[1] in _OWN_FIELDS else protocol.formats
    fields = [path for path in formats if value_at(body, tuple(path.split(".")))]
    if found[1] == "structural_tag" and value_at(body, ("tools",)):
        fields.append("tools")
    if not fields:
        return error
    reason = error.message[found.end() :]
    message = f"{' or '.join(fields)}: no grammar can be made of it: {reason}"
    return error._replace(message=message, param=fields[0])


def with_item(error: EngineError, body: Any) -> EngineError:
    """An error of /v1/responses that names the client's item, and not the message that SGLang has
    made of it."""
    found = of_item(error.message, body.get("input") if isinstance(body, dict) else None)
    if found is None or error.param is not None:
        return error
    return error._replace(message=f"{found.path}: {found.what}", param=found.path)


def with_path(error: EngineError) -> EngineError:
    """An error whose field is the one that its message begins with, if it begins with one."""
    path = error.message.partition(": ")[0]
    is_path = error.param is None and error.status == 400 and bool(_PATH.fullmatch(path))
    return error._replace(param=path) if is_path and path != "body" else error


def read_failed_event(data: bytes) -> EngineError:
    """The error in the last event of a failed response on /v1/responses."""
    response = orjson.loads(data.partition(b"\ndata: ")[2])["response"]
    message = (response.get("error") or {}).get("message") or ""
    return EngineError(400, scrubbed(400, str(message)))


def failed_event(data: bytes) -> bytes:
    """The last event of a failed response on /v1/responses, with the most telling code."""
    head, _, text = data.partition(b"\ndata: ")
    document = orjson.loads(text)
    error = document["response"].get("error")
    if not isinstance(error, dict):
        return data
    found = EngineError(400, scrubbed(400, str(error.get("message") or "")))
    code = found.code or error.get("code") or "server_error"
    long = too_long(found.message)
    message = found.message if long is None else long.openai
    document["response"]["error"] = {"code": code, "message": message}
    return b"%b\ndata: %b\n\n" % (head, orjson.dumps(document))
