"""In the HTTP process: what SGLang made of a message, for the turns in which it comes again.

An agent sends its whole conversation with every turn, and SGLang checks each message, converts
it to those of a chat completion, checks these, writes them out as dicts and copies them twice.
Here what came of a message of `/v1/messages` is known by its content, in its cache group:

    body          the message as pydantic's object, which pydantic then takes as it is
    conversion    the messages of a chat completion
    template      these as dicts, which are their own copies

SGLang converts each message by itself, except the system's between others. So the others are
converted one by one, and what stands around them with the last one. Nobody changes the objects
behind the conversion, nor the dicts where a chat is rendered by a template alone; where a model
has an encoding of its own, nothing is known.
"""

from __future__ import annotations

import contextlib
import marshal
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from functools import cache
from typing import Any, NamedTuple

from radix.byte_lru import ByteLRU
from sgl_ext.engine import sglang_api
from sgl_ext.engine.core.counters import counter
from sgl_ext.engine.host_cache.shortcuts import Message
from sgl_ext.protocols.anthropic import ANTHROPIC, COUNT_TOKENS

_PATHS = frozenset(ANTHROPIC.paths + COUNT_TOKENS.paths)
# Beside its content: pydantic's objects, the dict and their places in tables.
_ENTRY_BYTES = 5_000
# How often its content is there, at 4 bytes a character at the most: as key and text, or as key,
# text and two dicts.
_SAID, _CALLED = 5, 10
_SYSTEM = "system"
_VERSION = 2

Key = tuple[str | None, bytes]
Convert = Callable[[Any, Any], Any]


class _Known(NamedTuple):
    message: Any
    converted: tuple[Any, ...]


class _Sent(NamedTuple):
    """A message of the request that is worked on, as pydantic's object."""

    message: Any
    key: Key
    known: _Known | None


class Copied(Message):
    """A message as a dict that nobody changes."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Copied:
        return self


_table: ByteLRU[_Known] | None = None
_sent: ContextVar[tuple[_Sent, ...]] = ContextVar("sgl_ext_sent", default=())
_dumps: dict[int, tuple[weakref.ref[Any], Copied]] = {}


def start(limit_bytes: int) -> None:
    """Messages are known from now on, within so many bytes; 0: none is."""
    global _table
    _table = ByteLRU(limit_bytes, _ENTRY_BYTES) if limit_bytes else None


def recall(path: str, body: Any, group: str | None) -> Any:
    """A body for SGLang with its messages as pydantic's objects, if all are what they should be."""
    messages = body.get("messages") if path in _PATHS and isinstance(body, dict) else None
    if _table is None or not isinstance(messages, list):
        return body
    try:
        sent = tuple(_recalled(_table, message, group) for message in messages)
    except ValueError:  # too deep, or to be refused by SGLang
        return body
    _sent.set(sent)
    return {**body, "messages": [one.message for one in sent]}


def _recalled(table: ByteLRU[_Known], message: Any, group: str | None) -> _Sent:
    # It writes the same for the same, and tells types and the order of keys.
    key = group, marshal.dumps(message, _VERSION)
    known = table.get(key)
    return _Sent(_checked()(message) if known is None else known.message, key, known)


@cache
def _checked() -> Callable[[Any], Any]:
    checked: Callable[[Any], Any] = sglang_api.AnthropicMessage.model_validate
    return checked


def convert(original: Convert, serving: Any, request: Any) -> Any:
    """`original` of a request of `/v1/messages`, of which only what is new is converted.

    original: makes a chat completion of it, message by message.
    """
    sent = _sent.get()
    _sent.set(())  # what else is converted in this context is another request
    table = _table
    if table is not None and _are_apart(serving, request, sent):
        with contextlib.suppress(ValueError):  # it is raised below, as it is of the whole
            return _converted(table, original, serving, request, sent)
    return original(serving, request)


def _are_apart(serving: Any, request: Any, sent: tuple[_Sent, ...]) -> bool:
    """Whether this is the request that was sent, and each message is converted by itself."""
    messages, chat = request.messages, serving.openai_serving_chat
    if len(sent) < 2 or len(sent) != len(messages):
        return False
    if chat.encoding_adapter is not None or chat.chat_encoding_spec is not None:
        return False
    return all(
        message.role != _SYSTEM and one.message is message
        for one, message in zip(sent, messages, strict=True)
    )


def _converted(
    table: ByteLRU[_Known], original: Convert, serving: Any, request: Any, sent: tuple[_Sent, ...]
) -> Any:
    *earlier, last = sent
    found: list[Any] = []
    for one in earlier:
        known = one.known
        if known is None:
            alone = type(request).model_construct(
                model=request.model, max_tokens=request.max_tokens, messages=[one.message]
            )
            known = _keep(table, one, original(serving, alone).messages)
        found += known.converted
    chat = original(serving, request.model_copy(update={"messages": [last.message]}))
    begin = 1 if chat.messages and chat.messages[0].role == _SYSTEM else 0
    if last.known is None:
        _keep(table, last, chat.messages[begin:])
    chat.messages[begin:begin] = found
    new = sum(one.known is None for one in sent)
    counter("messages_converted").labels("known").inc(len(sent) - new)
    counter("messages_converted").labels("new").inc(new)
    return chat


def _keep(table: ByteLRU[_Known], sent: _Sent, converted: list[Any]) -> _Known:
    known = _Known(sent.message, tuple(converted))
    for one in converted:
        _write(one)
    calls = any(getattr(one, "tool_calls", None) for one in converted)
    table.add(sent.key, known, len(sent.key[1]) * (_CALLED if calls else _SAID))
    return known


def _write(message: Any) -> None:
    """Remembers a chat completion's message as the dict that a template is given."""
    written = Copied(message.model_dump())
    try:
        sglang_api.normalize_assistant_tool_call_arguments(written)
    except ValueError:  # which is for the request to be refused with
        return
    if written.get("content") is None:
        written["content"] = ""
    number = id(message)
    _dumps[number] = weakref.ref(message, lambda _: _dumps.pop(number, None)), written


def dump(original: Callable[..., Any], message: Any, **asked: Any) -> Message:
    """Around `model_dump` of the messages of chat completions."""
    known = None if asked else _dumps.get(id(message))
    return known[1] if known is not None else Message(original(message, **asked))
