"""Threads of /v1/messages: a request names the answer that it continues, and sends only new turns.

    {"thread": {"type": "create"}, "system", "tools", "messages": [all]}       starts a thread
    {"thread": {"type": "continue", "previous_message_id"}, "messages": [new]}

Anthropic's SDK does so in `tool_runner` (beta message-threads-2026-08-12). A stored turn has the
request's own messages and the answer; the first one also `system` and `tools`, which the thread
keeps. The engine gets what a client would send without threads. An answer that is not stored is
`thread_not_found`, upon which the SDK sends the whole conversation again.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import orjson

from sgl_ext.protocols.anthropic import ANTHROPIC, COUNT_TOKENS
from sgl_ext.protocols.errors import BalancerError, bad_field
from sgl_ext.reading.protocol import objects

PATHS = (*ANTHROPIC.paths, *COUNT_TOKENS.paths)
KEPT = ("system", "tools")
"""What a thread keeps of the request that started it."""
_LIMIT_ANSWER_BYTES = 16 << 20
_DATA = re.compile(rb"^data: (.*)$", re.MULTILINE)
_END = re.compile(rb"^event: message_stop$", re.MULTILINE)
_Json = dict[str, Any]
_NOT_A_MESSAGE = (ValueError, LookupError, TypeError, AttributeError)


def previous_id(body: _Json) -> str | None:
    """The id of the answer that a request continues; None if it continues none.

    Raises BalancerError 400 for a malformed field.
    """
    thread = body.get("thread")
    if thread is None:
        return None
    kind = thread.get("type") if isinstance(thread, dict) else None
    if kind not in ("create", "continue"):
        raise bad_field("thread.type", "must be 'create' or 'continue'")
    if kind == "create":
        return None
    previous = thread.get("previous_message_id")
    if not isinstance(previous, str):
        raise bad_field("thread.previous_message_id", "must be the id of a message")
    return previous


def own_part(body: _Json) -> bytes | None:
    """What a request adds to its thread, as JSON; None if it is in none, or malformed."""
    if body.get("thread") is None or not isinstance(body.get("messages"), list):
        return None
    kept = {} if previous_id(body) is not None else {k: body[k] for k in KEPT if k in body}
    try:
        return orjson.dumps({"messages": body["messages"], **kept})
    except TypeError:
        raise bad_field("messages", "is nested too deeply") from None


def continued(body: _Json, earlier: Iterable[bytes]) -> _Json:
    """The whole request. earlier: the turns before it, from `packed`; the first one is the oldest.

    Marks of earlier messages are left out: each was for the turn that sent it, and a request may
    have few. Raises BalancerError 400 for fields that the thread keeps.
    """
    for name in KEPT:
        if body.get(name) is not None:
            raise bad_field(name, "a thread keeps what it was created with")
    whole: _Json = {"messages": []}
    for turn in map(orjson.loads, earlier):
        whole |= {name: turn[name] for name in KEPT if name in turn}
        whole["messages"] += [_without_marks(message) for message in turn["messages"]]
    own = body.get("messages")
    messages = [*whole["messages"], *own] if isinstance(own, list) else own
    rest = {name: value for name, value in body.items() if name != "thread"}
    return {**whole, **rest, "messages": messages}


def _without_marks(message: Any) -> Any:
    content = message.get("content") if isinstance(message, dict) else None
    for block in objects(content):
        block.pop("cache_control", None)
        for part in objects(block.get("content")):
            part.pop("cache_control", None)
    return message


def packed(own: bytes, answer: list[Any]) -> bytes:
    """A turn for the store: what its request added, and the answer's content."""
    turn = orjson.loads(own)
    turn["messages"] = [*turn["messages"], {"role": "assistant", "content": answer}]
    return orjson.dumps(turn)


def not_found(id: str) -> BalancerError:
    """An answer that was never stored, has expired, or is another tenant's."""
    message = f"thread.previous_message_id: {id!r} is unknown or has expired"
    return BalancerError(
        HTTPStatus.NOT_FOUND, message, code="thread_not_found", param="thread.previous_message_id"
    )


@dataclass(slots=True)
class ThreadRecorder:
    """Stores the answer of one request, and returns it as it goes to the client.

    store: stores an answer's content by its id. A larger answer than the limit, or one that was
        cut, is not stored.
    """

    store: Callable[[str, list[Any]], Awaitable[bool]]
    _kept: bytearray = field(default_factory=bytearray)
    _end: bytes = b""

    @property
    def holds_end(self) -> bool:
        """Whether `record_end` has events for the client."""
        return self._end != b""

    @property
    def held_bytes(self) -> int:
        """The bytes of the answer that it holds."""
        return len(self._kept) + len(self._end)

    def record_events(self, data: bytes) -> bytes:
        """Takes whole events of a stream and returns those for the client. The last event waits
        for `record_end`, as the client may continue as soon as it has it."""
        if self._end:
            self._end += data
            return b""
        if len(self._kept) <= _LIMIT_ANSWER_BYTES:
            self._kept += data
        if (last := _END.search(data)) is None:
            return data
        data, self._end = data[: last.start()], data[last.start() :]
        return data

    async def record_end(self) -> bytes:
        """Stores the answer of a stream that has ended, and returns its last event."""
        if len(self._kept) <= _LIMIT_ANSWER_BYTES:
            await self._store(await asyncio.to_thread(_joined, bytes(self._kept)))
        return self._end

    async def record(self, data: bytes) -> bytes:
        """Takes a whole answer."""
        await self._store(_parsed(data))
        return data

    async def _store(self, message: _Json | None) -> None:
        if message is not None:
            await self.store(message["id"], message["content"])


def _joined(events: bytes) -> _Json | None:
    """The message of a stream; None if it is not complete."""
    assert ANTHROPIC.conversation is not None, "messages are a conversation"
    data = _DATA.findall(events)
    try:
        message = ANTHROPIC.conversation.join(data)
        return _checked(message | {"id": orjson.loads(data[0])["message"]["id"]})
    except _NOT_A_MESSAGE:
        return None


def _parsed(data: bytes) -> _Json | None:
    try:
        return _checked(orjson.loads(data))
    except _NOT_A_MESSAGE:
        return None


def _checked(message: _Json) -> _Json | None:
    """A message that a request can continue."""
    has_id = isinstance(message["id"], str)
    return message if has_id and isinstance(message["content"], list) else None
