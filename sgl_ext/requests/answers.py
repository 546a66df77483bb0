"""The bytes of an answer, read as the turn that its client will send back.

An agent appends an answer to its conversation and sends the conversation again, followed by the
results of its tools or by a person's words. So most of the next prompt is known when an answer
ends.

An answer is read only if the client certainly goes on from it: the answer ended by itself, with a
text or with calls of the client's own tools. A cut answer, an error, a refusal, one of several
choices, or the work of a server-side tool gives None. The turn contains only what reaches a
prompt, and what pairs calls with their results.
"""

from collections.abc import Iterator
from typing import Any, cast

import orjson

from sgl_ext.requests.protocol import Json, Protocol

LIMIT_BYTES = 8 << 20


def read_answer(protocol: Protocol, data: bytes, is_stream: bool) -> list[Json] | None:
    """The items that a client appends to its conversation for a complete answer.

    None if the next request is not certain. Never raises.

    data: the body as the client gets it, uncompressed.
    is_stream: whether it is a stream of events.
    """
    rules = protocol.conversation
    if rules is None or len(data) > LIMIT_BYTES:
        return None
    try:
        return rules.read(rules.join(_events(data)) if is_stream else parsed(data))
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError):
        return None


def _events(data: bytes) -> Iterator[bytes]:
    """The data of each complete event; an event without its blank line was cut off."""
    lines: list[bytes] = []
    for line in data.splitlines():
        if line.startswith(b"data:"):
            lines.append(line[5:].removeprefix(b" "))
        elif not line and lines:
            yield b"\n".join(lines)
            lines = []


# For the protocols' readers: each raises ValueError if an answer is not what it must be.


def require(condition: bool) -> None:
    if not condition:
        raise ValueError("it is not certain how the client continues")


def as_object(value: Any) -> Json:
    require(isinstance(value, dict))
    return cast(Json, value)


def as_text(value: Any) -> str:
    require(isinstance(value, str))
    return cast(str, value)


def parsed(data: bytes) -> Json:
    return as_object(orjson.loads(data))
