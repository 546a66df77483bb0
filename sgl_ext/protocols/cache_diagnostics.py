"""Cache diagnostics: a request names an earlier answer, and its own says why the cache missed.

                   the request names it in                       the answer says it in
    messages       diagnostics.previous_message_id               diagnostics.cache_miss_reason
    responses      prompt_cache_options.comparison_response_id   prompt_cache_diagnostics
    chat           the same                                      the same

A stream says it on messages in `message_start`, on responses in the event that ends it, and on
chat in the chunk with the usage, or else in the one with the `finish_reason`.

The vendors' shapes have no word for an eviction. A reason that an SDK does not know is parsed as
another one: the anthropic SDK makes `model_changed` of it. So all that the vendors have no word for
is `unavailable` with a `cause`, a field that is added to their shapes, as are `block` and `byte`.
"""

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import orjson

from sgl_ext.protocols.anthropic import ANTHROPIC
from sgl_ext.protocols.chat import CHAT
from sgl_ext.protocols.errors import bad_field
from sgl_ext.protocols.responses import RESPONSES
from sgl_ext.reading.protocol import Json

_MAX_ID_CHARS = 256
# An answer's id is at its beginning.
_ID_BYTES = 2048
_ID = re.compile(rb'"id":\s*"([^"\\]{1,%d})"' % _MAX_ID_CHARS)


class Found(NamedTuple):
    """The reason for a cache miss.

    reason: "model", "tools", "system", "messages", "compacted", "evicted", the name of a setting,
        or "unavailable". tokens: how many prompt tokens were affected. reusable_tokens: how many
        the named request had left in the cache. place: `block`, `byte` and `cause`, if known.
    """

    reason: str
    tokens: int
    reusable_tokens: int
    place: Mapping[str, Any] = MappingProxyType({})


NOT_FOUND = Found("not_found", 0, 0)


class Question(NamedTuple):
    """What a request asks. earlier: the id of the answer to compare with; None on the first turn.
    has_usage: whether the answer's stream states its usage."""

    earlier: str | None
    has_usage: bool


def read_question(path: str, body: Any) -> Question | None:
    """What a parsed body asks; None if nothing. Raises BalancerError 400 for a malformed field."""
    fields = _FIELDS.get(path)
    if fields is None or not isinstance(body, dict) or (holder := body.get(fields[0])) is None:
        return None
    if not isinstance(holder, dict):
        raise bad_field(fields[0], "must be an object")
    if fields[1] not in holder:
        return None if path not in ANTHROPIC.paths else Question(None, has_usage=True)
    earlier = holder[fields[1]]
    if earlier is not None and not (isinstance(earlier, str) and len(earlier) <= _MAX_ID_CHARS):
        raise bad_field(".".join(fields), "must be the id of an earlier answer, or null")
    options = body.get("stream_options")
    has_usage = isinstance(options, dict) and bool(options.get("include_usage"))
    return Question(earlier, has_usage or path not in CHAT.paths)


def answer_id(data: bytes) -> str | None:
    """The id of an answer, from its beginning: a whole answer, or the first events of a stream."""
    found = _ID.search(data, 0, _ID_BYTES)
    return None if found is None else found[1].decode("utf-8", "replace")


def find_event(path: str, question: Question, data: bytes) -> re.Match[bytes] | None:
    """The event among whole events that is to say what was found: what is before its JSON, and the
    JSON."""
    event = _EVENTS[path]
    return (_FINISHED if path in CHAT.paths and not question.has_usage else event).search(data)


def with_diagnosis(path: str, data: bytes, found: Found | None, *, streams: bool) -> bytes:
    """The JSON of a whole answer or of `find_event` with what was found, None if there is nothing
    to say; the same bytes if they are no answer."""
    try:
        document = orjson.loads(data)
    except orjson.JSONDecodeError:
        return data
    key = _HOLDERS.get(path) if streams else None
    answer = document.get(key) if isinstance(document, dict) and key else document
    if not isinstance(answer, dict) or "id" not in answer:
        return data
    if path in ANTHROPIC.paths:
        answer["diagnostics"] = _of_messages(found)
    else:
        answer["prompt_cache_diagnostics"] = _of_responses(found)
    return orjson.dumps(document)


_MESSAGES_REASONS = {
    "model": "model_changed",
    "system": "system_changed",
    "tools": "tools_changed",
    "messages": "messages_changed",
    "compacted": "messages_changed",
}


def _of_messages(found: Found | None) -> Json | None:
    """Anthropic's `diagnostics`."""
    if found is None:
        return None
    if found is NOT_FOUND:
        return {"cache_miss_reason": {"type": "previous_message_not_found"}}
    told: Json = {"type": _MESSAGES_REASONS.get(found.reason, "unavailable")}
    if found.tokens or told["type"] != "unavailable":
        told["cache_missed_input_tokens"] = found.tokens
    return {"cache_miss_reason": told | _more(found, told["type"])}


def _more(found: Found, kind: str) -> Json:
    """The place, or for `unavailable` the reason that the vendor has no word for."""
    is_unnamed = kind == "unavailable" and found.reason != "unavailable"
    return {"cause": found.reason} if is_unnamed else dict(found.place)


_RESPONSES_REASONS = {
    "model": "model_changed",
    "system": "input_changed",
    "tools": "tools_changed",
    "messages": "input_changed",
    "compacted": "context_compacted",
    "prompt_cache_key": "prompt_cache_key_changed",
    "text_format": "text_format_changed",
    "reasoning_effort": "reasoning_effort_changed",
    "verbosity": "verbosity_changed",
}


def _of_responses(found: Found | None) -> Json:
    """OpenAI's `prompt_cache_diagnostics`."""
    if found is None:
        return {"type": "cache_hit"}
    if found is NOT_FOUND:
        return {"type": "comparison_response_not_found"}
    told: Json = {"type": "unavailable"}
    if reason := _RESPONSES_REASONS.get(found.reason):
        told = {"type": "cache_miss", "reason": reason}
    if reason or found.tokens:
        told["cache_missed_tokens"] = found.tokens
        told["comparison_reusable_tokens"] = found.reusable_tokens
    return told | _more(found, told["type"])


_OPENAI = ("prompt_cache_options", "comparison_response_id")
_FIELDS = {
    **dict.fromkeys(ANTHROPIC.paths, ("diagnostics", "previous_message_id")),
    **dict.fromkeys((*RESPONSES.paths, *CHAT.paths), _OPENAI),
}
# Text of the model cannot match: JSON escapes its quotation marks and line ends.
_EVENTS = {
    **dict.fromkeys(
        ANTHROPIC.paths, re.compile(rb"^(event: message_start\r?\ndata: )([^\r\n]*)", re.MULTILINE)
    ),
    **dict.fromkeys(
        RESPONSES.paths,
        re.compile(
            rb"^(event: response\.(?:completed|incomplete|failed)\r?\ndata: )([^\r\n]*)",
            re.MULTILINE,
        ),
    ),
    **dict.fromkeys(
        CHAT.paths, re.compile(rb'^(data: )(\{[^\r\n]*"choices":\s*\[\][^\r\n]*)', re.MULTILINE)
    ),
}
_FINISHED = re.compile(rb'^(data: )(\{[^\r\n]*"finish_reason":\s*"[^\r\n]*)', re.MULTILINE)
_HOLDERS = {
    **dict.fromkeys(ANTHROPIC.paths, "message"),
    **dict.fromkeys(RESPONSES.paths, "response"),
}
