"""Asks an engine for the usage of a stream whose client did not, and hides it from the client.

With `stream_options.include_usage` an engine sends one event more before the last one. It has no
choices, and nothing else differs. So a tenant with limits is charged for what its streams cost.
"""

from typing import Any

import orjson

_ASKED = {"include_usage": True}
_ADDED = b'"stream_options":%b,' % orjson.dumps(_ASKED)
_NO_CHOICES, _USAGE = b'"choices":[]', b'"usage":{'
_END = b"\n\n"
PATHS = ("/v1/chat/completions", "/v1/completions")


def with_usage(path: str, document: Any, body: bytes | bytearray) -> bytes | None:
    """The body that also asks for the usage of its stream; None if there is nothing to change.

    document: the parsed body.
    """
    if path not in PATHS or not isinstance(document, dict) or document.get("stream") is not True:
        return None
    options = document.get("stream_options")
    if options is not None and not isinstance(options, dict):
        return None  # the engine answers 400
    if "stream_options" not in document:  # parsing and writing a long prompt again takes time
        start = body.index(b"{") + 1
        return b"".join((body[:start], _ADDED, body[start:]))
    if options and options.get("include_usage"):
        return None
    try:
        return orjson.dumps(document | {"stream_options": (options or {}) | _ASKED})
    except TypeError:
        return None  # it is nested too deeply to be written


def without_usage(data: bytes) -> bytes:
    """Whole events without the one that states the usage."""
    if _NO_CHOICES not in data:
        return data
    events = data.split(_END)
    return _END.join(e for e in events if not (_NO_CHOICES in e and _USAGE in e))
