"""In the HTTP process: what SGLang made of each message, for the turns in which it comes again.

An agent sends its whole conversation with every turn, and SGLang validates each message, converts
it to those of a chat completion, validates these, writes them out as dicts and copies them twice.
The cache finds the results of a message of `/v1/messages` by its content and cache group:

    body          the message as pydantic's object, which pydantic then takes unchanged
    conversion    the messages of a chat completion
    template      these as dicts, which are their own copies

SGLang converts each message by itself, except a system message between others. So earlier
messages are converted one by one, and the last one with the request's other fields. SGLang changes
neither the converted objects, nor the dicts where a chat is rendered by a template alone; a model
with an encoding of its own is left out.

There are shorter ways, too, to results that SGLang and its libraries compute for each message and
each tool. The results are equal in all cases.

    tools      a schema that was found valid is not checked again
    messages   a copy of a message of JSON values does not look for cycles and classes, and a copy
               of a cached one is the message itself
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import marshal
import operator
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import orjson
import xxhash
from cachetools import FIFOCache

from radix.byte_lru import ByteLRU
from sgl_ext.engine import sglang_api
from sgl_ext.engine.core.counters import counter
from sgl_ext.engine.core.request_context import RequestContext
from sgl_ext.engine.host_cache.worth import Worth, turned_off
from sgl_ext.engine.sglang_http_types import AnthropicServing
from sgl_ext.protocols.anthropic import ANTHROPIC, COUNT_TOKENS

MAX_SCHEMAS = 4096


class SchemaCache:
    """Digests of the latest schemas that were found valid. worth: its account, in schemas."""

    def __init__(self, max_schemas: int = MAX_SCHEMAS) -> None:
        self._valid: FIFOCache[bytes, None] = FIFOCache(max_schemas)
        self.worth = Worth("schemas")

    def __len__(self) -> int:
        return len(self._valid)

    def check(self, schema: Any, validate: Callable[[Any], None]) -> None:
        """Calls `validate`, which raises on an invalid schema, unless it passed before."""
        worth = self.worth
        if not worth.is_on():
            validate(schema)
            return
        begun_s, new_s = worth.now(), 0.0
        try:
            digest = hashlib.blake2b(orjson.dumps(schema), digest_size=16).digest()
        except (TypeError, RecursionError):
            validate(schema)
            return
        if digest not in self._valid:
            new_s = worth.now()
            validate(schema)
            new_s = worth.now() - new_s
            worth.learn(1, new_s)
            self._valid[digest] = None
        if worth.note(worth.now() - begun_s - new_s, 0 if new_s else 1):
            turned_off(worth)
            self._valid.clear()


SCHEMAS = SchemaCache()
"""The schemas that this process has found valid."""


class Message(dict[str, Any]):
    """A message as a dict that is quick to copy."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Message:
        return Message({key: _copied(value, memo) for key, value in self.items()})


class SharedMessage(Message):
    """A message as a dict that no code changes, so a copy of it is the dict itself."""

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedMessage:
        return self


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    kind = type(value)
    if kind is str or value is None:
        return value
    if kind is dict:
        return {key: _copied(inner, memo) for key, inner in value.items()}
    if kind is list:
        return [_copied(inner, memo) for inner in value]
    return copy.deepcopy(value, memo)


# Beside a message's content: pydantic's objects, the dict and their places in tables.
_ENTRY_BYTES = 5_000
# An entry holds the content so often, at 4 bytes a character at the most: as key and text, or
# with tool calls as key, text and two dicts.
_COPIES, _COPIES_WITH_CALLS = 5, 10
_SYSTEM = "system"
_MARSHAL_VERSION = 2  # writes equal bytes for equal values; types and the order of keys count

Key = tuple[str | None, int]
Convert = Callable[[Any, Any], Any]


class _Message(NamedTuple):
    """A message as pydantic's object, and the messages that it was converted to, if it was.

    key: its cache group, and a quick hash of its content. Other content may have the same hash, so
        a message is found only if its content is the same, too.
    validated_s: what its validation took; 0 if it was known.
    """

    message: Any
    key: Key
    content: bytes
    converted: tuple[Any, ...] | None = None
    validated_s: float = 0.0


class MessageCache:
    """Results for messages, within so many bytes. worth: its account, in messages."""

    def __init__(self, limit_bytes: int) -> None:
        self._known: ByteLRU[_Message] = ByteLRU(limit_bytes, _ENTRY_BYTES)
        self._dicts: dict[int, tuple[weakref.ref[Any], SharedMessage]] = {}
        self._validate: Callable[[Any], Any] = sglang_api.AnthropicMessage.model_validate
        self.worth = Worth("messages")

    @property
    def used_bytes(self) -> int:
        """The size of what it holds."""
        return self._known.used_bytes

    @property
    def limit_bytes(self) -> int:
        """The bound of that."""
        return self._known.limit_bytes

    def recall(self, body: Any, context: RequestContext) -> Any:
        """A body for SGLang with its messages as pydantic's objects, if all of them are valid."""
        is_anthropic = context.protocol in (ANTHROPIC, COUNT_TOKENS) and isinstance(body, dict)
        messages = body.get("messages") if is_anthropic else None
        if not isinstance(messages, list) or not self.worth.is_on():
            return body
        begun_s = self.worth.now()
        try:
            sent = tuple(self._find(message, context.group) for message in messages)
        except ValueError:  # too deeply nested, or invalid, which SGLang answers
            return body
        context.cached_messages = sent
        new_s = sum(one.validated_s for one in sent)
        self._weigh(self.worth.now() - begun_s - new_s, 0)
        return {**body, "messages": [one.message for one in sent]}

    def _weigh(self, took_s: float, messages: int) -> None:
        if self.worth.note(took_s, messages):
            turned_off(self.worth)
            self._known.clear()

    def _find(self, message: Any, group: str | None) -> _Message:
        content = marshal.dumps(message, _MARSHAL_VERSION)
        key = group, xxhash.xxh3_64_intdigest(content)
        found = self._known.get(key)
        if found is not None and found.content == content:
            return found
        begun_s = self.worth.now()
        valid = self._validate(message)
        return _Message(valid, key, content, validated_s=self.worth.now() - begun_s)

    def convert(
        self, original: Convert, serving: AnthropicServing, request: Any, context: RequestContext
    ) -> Any:
        """What `original` makes of a request of `/v1/messages`; it converts new messages only.

        original: makes a chat completion of a request, message by message.
        """
        # Another conversion in this context is of another request.
        sent, context.cached_messages = context.cached_messages, ()
        if _are_apart(serving, request, sent):
            with contextlib.suppress(ValueError):  # the conversion of the whole raises it again
                return self._convert(original, serving, request, sent)
        return original(serving, request)

    def _convert(
        self, original: Convert, serving: AnthropicServing, request: Any, sent: tuple[_Message, ...]
    ) -> Any:
        *earlier, last = sent
        converted: list[Any] = []
        now, new_s = self.worth.now, 0.0
        begun_s = now()
        for one in earlier:
            if one.converted is None:
                one_s = now()
                alone = type(request).model_construct(
                    model=request.model, max_tokens=request.max_tokens, messages=[one.message]
                )
                converted += self._add(one, original(serving, alone).messages)
                one_s = now() - one_s
                self.worth.learn(1, one.validated_s + one_s)
                new_s += one_s
            else:
                converted += one.converted
        last_s = now()
        chat = original(serving, request.model_copy(update={"messages": [last.message]}))
        begin = 1 if chat.messages and chat.messages[0].role == _SYSTEM else 0
        if last.converted is None:
            self._add(last, chat.messages[begin:])
        new_s += now() - last_s
        chat.messages[begin:begin] = converted
        new = sum(one.converted is None for one in sent)
        self._weigh(now() - begun_s - new_s, len(sent) - new)
        counter("messages_converted").labels("known").inc(len(sent) - new)
        counter("messages_converted").labels("new").inc(new)
        return chat

    def _add(self, sent: _Message, converted: list[Any]) -> list[Any]:
        for message in converted:
            self._add_dict(message)
        calls = any(getattr(message, "tool_calls", None) for message in converted)
        size_bytes = len(sent.content) * (_COPIES_WITH_CALLS if calls else _COPIES)
        known = sent._replace(converted=tuple(converted), validated_s=0.0)
        self._known.add(sent.key, known, size_bytes)
        return converted

    def _add_dict(self, message: Any) -> None:
        written = SharedMessage(message.model_dump())
        try:
            sglang_api.normalize_assistant_tool_call_arguments(written)
        except ValueError:  # SGLang answers it
            return
        if written.get("content") is None:
            written["content"] = ""
        number, dicts = id(message), self._dicts
        dicts[number] = weakref.ref(message, lambda _: dicts.pop(number, None)), written

    def dict_of(self, message: Any) -> SharedMessage | None:
        """A chat completion's message as the dict that a template is given, if it is known."""
        found = self._dicts.get(id(message))
        return None if found is None else found[1]


def _are_apart(serving: AnthropicServing, request: Any, sent: tuple[_Message, ...]) -> bool:
    """Whether this is the request that was sent, and each message is converted by itself."""
    messages, chat = request.messages, serving.openai_serving_chat
    if len(sent) < 2 or len(sent) != len(messages):
        return False
    if chat.encoding_adapter is not None or chat.chat_encoding_spec is not None:
        return False
    if _SYSTEM in [message.role for message in messages]:
        return False
    return all(map(operator.is_, [one.message for one in sent], messages))
