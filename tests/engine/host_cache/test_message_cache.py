"""Cached messages come to what SGLang makes of them."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_ext.engine.core.request_context import RequestContext
from sgl_ext.engine.host_cache import message_cache
from sgl_ext.engine.host_cache.message_cache import MessageCache
from sgl_ext.engine.http.cache_hooks import dump_message
from sgl_ext.engine.http.extension import HttpExtension, installed

PATH = "/v1/messages"
WORDS = st.sampled_from(["", "a", "b", " c\n", "\u00e9"])
INPUTS = st.dictionaries(
    WORDS, st.none() | st.booleans() | st.integers(0, 1) | st.just(1.0) | st.just({"z": [1]})
)
TEXT = st.builds(lambda text: {"type": "text", "text": text}, WORDS)
CALL = st.builds(
    lambda number, given: {"type": "tool_use", "id": number, "name": "read", "input": given},
    WORDS.filter(bool),
    INPUTS,
)
RESULT = st.builds(
    lambda number, content: {"type": "tool_result", "tool_use_id": number, "content": content},
    WORDS,
    WORDS | st.lists(TEXT, max_size=2),
)
THOUGHT = st.builds(lambda text: {"type": "thinking", "thinking": text, "signature": "s"}, WORDS)
REFUSED = st.just({"type": "redacted_thinking", "data": "x"})
ASKS = st.builds(
    lambda content: {"role": "user", "content": content},
    WORDS | st.lists(TEXT | RESULT, max_size=3),
)
SAYS = st.builds(
    lambda content: {"role": "assistant", "content": content},
    WORDS | st.lists(TEXT | CALL | THOUGHT, max_size=3),
)
ODD = st.builds(
    lambda role, content: {"role": role, "content": content},
    st.sampled_from(["system", "assistant"]),
    st.lists(TEXT | REFUSED, min_size=1, max_size=2),
)
HEADS = st.sampled_from(
    [
        {},
        {"system": "Be brief.", "stream": True},
        {"system": " "},
        {"tools": [{"name": "read", "input_schema": {}}], "tool_choice": {"type": "auto"}},
        {"tool_choice": {"type": "tool", "name": "write"}, "thinking": {"type": "adaptive"}},
    ]
)


class FrontEnd:
    """SGLang's front end up to the template, with and without a message cache."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **facts: Any) -> None:
        with warnings.catch_warnings(action="ignore"):  # SGLang's, while it is imported
            openai = import_module("sglang.srt.entrypoints.openai.serving_chat")
            messages = import_module("sglang.srt.entrypoints.anthropic.serving")
            protocol = import_module("sglang.srt.entrypoints.openai.protocol")
            anthropic = import_module("sglang.srt.entrypoints.anthropic.protocol")
        for kind in (
            protocol.ChatCompletionMessageGenericParam,
            protocol.ChatCompletionMessageUserParam,
        ):
            original = kind.model_dump
            monkeypatch.setattr(kind, "model_dump", self._dump_by(original))
        self._request = anthropic.AnthropicMessagesRequest
        self._convert = messages.AnthropicServing._convert_to_chat_completion_request
        chat = openai.OpenAIServingChat.__new__(openai.OpenAIServingChat)
        usual: dict[str, Any] = {
            "template_manager": SimpleNamespace(
                jinja_template_content_format="string",
                jinja_template_may_reorder_tool_results=False,
                reasoning_config=None,
            ),
            "chat_encoding_spec": None,
            "_encoding_adapter": None,
            "supports_inline_system": True,
            "is_minimax_m3": False,
            "_tokenizer_auto_adds_specials": False,
            "_prompt_text_round_trip_is_lossy": False,
            "_thinking_requested": lambda request: False,
            "supports_native_reasoning_history": lambda: True,
            "apply_reasoning_enabled": lambda request, enabled: None,
            "_render_and_encode_chat_template": self._render,
        }
        for name, value in (usual | facts).items():
            setattr(chat, name, value)
        self._chat = chat
        self._serving = messages.AnthropicServing(chat)
        self.rendered: list[Any] = []

    @staticmethod
    def _dump_by(original: Any) -> Any:
        def dump(message: Any, **options: Any) -> Any:
            return dump_message(original, message, **options)

        return dump

    def _render(self, messages: Any, **_: Any) -> Any:
        self.rendered = copy.deepcopy(messages)
        return [], None

    def completion(self, body: Any, group: str | None = None) -> Any:
        cache, context = installed().message_cache, RequestContext(PATH, group=group)
        body = orjson.loads(body)
        if cache is None:
            return self._convert(self._serving, self._request.model_validate(body))
        request = self._request.model_validate(cache.recall(body, context))
        return cache.convert(self._convert, self._serving, request, context)

    def outcome(self, body: Any, group: str | None = None) -> Any:
        """A chat completion as a dict and what the template is given; or what was raised."""
        try:
            completion = self.completion(body, group)
            fields = completion.model_dump(exclude={"messages"})
            plain = [message.__dict__ for message in completion.messages]
            self._chat._apply_jinja_template(completion, None, False)
        except ValueError as error:
            return str(error)
        # As JSON, which tells types and the order of keys.
        return repr(fields), repr(plain), orjson.dumps(self.rendered)


@pytest.fixture(scope="module")
def front_end() -> Iterator[FrontEnd]:
    with pytest.MonkeyPatch.context() as patch:
        yield FrontEnd(patch)


@pytest.fixture(autouse=True)
def cache(extension: HttpExtension) -> MessageCache:
    extension.message_cache = made = MessageCache(1 << 20)
    return made


def body_of(messages: list[Any], head: Any = None) -> bytes:
    return orjson.dumps({"model": "m", "max_tokens": 5, "messages": messages, **(head or {})})


@settings(max_examples=150, deadline=None)
@given(
    turns=st.lists(st.tuples(ASKS, SAYS), min_size=1, max_size=4),
    odd=st.lists(st.tuples(st.integers(0, 6), ODD), max_size=1),
    head=HEADS,
    marked=st.booleans(),
)
def test_a_conversation_converts_to_the_same_with_the_cache(
    front_end: FrontEnd,
    turns: list[Any],
    odd: list[Any],
    head: Any,
    marked: bool,
) -> None:
    messages = [message for turn in turns for message in turn]
    for place, message in odd:
        messages.insert(place, message)
    if marked:
        head = {**head, "metadata": {"user_id": "u"}}
    bodies = [body_of(messages[:count], head) for count in range(1, len(messages) + 1)]
    extension = installed()
    extension.message_cache = None
    right = [front_end.outcome(body) for body in bodies]
    extension.message_cache = MessageCache(1 << 20)
    for _ in range(2):
        assert [front_end.outcome(body) for body in bodies] == right


TURN = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": [{"type": "text", "text": "two"}]},
    {"role": "user", "content": "three"},
]


def test_earlier_messages_are_not_converted_again(front_end: FrontEnd) -> None:
    first = front_end.completion(body_of(TURN)).messages
    again = front_end.completion(body_of([*TURN, {"role": "user", "content": "four"}])).messages
    assert [one is other for one, other in zip(first, again, strict=False)] == [True] * 3
    assert again[0].model_dump() is first[0].model_dump()
    assert copy.deepcopy([again[0].model_dump()])[0] is first[0].model_dump()


def test_cache_groups_do_not_share_messages(front_end: FrontEnd) -> None:
    first = front_end.completion(body_of(TURN), "a").messages
    for group in ("b", None):
        other = front_end.completion(body_of(TURN), group).messages
        assert not any(one is two for one, two in zip(first, other, strict=True))


def test_messages_with_equal_hashes_are_told_apart(
    front_end: FrontEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(message_cache.xxhash, "xxh3_64_intdigest", lambda content: 7)
    for turn, texts in (TURN, "one two three"), (TURN[::-1], "three two one"):
        completion = front_end.completion(body_of(turn))
        assert [message.content for message in completion.messages] == texts.split()


def test_dicts_are_dropped_with_their_messages(front_end: FrontEnd, cache: MessageCache) -> None:
    front_end.completion(body_of(TURN))
    assert len(cache._dicts) == 3
    large = {"role": "user", "content": "x" * 207_000}  # evicts all others
    front_end.completion(body_of([large, TURN[1]]))
    gc.collect()
    assert len(cache._dicts) == 2


def test_a_model_with_its_own_encoding_is_left_out() -> None:
    with pytest.MonkeyPatch.context() as patch:
        own = FrontEnd(patch, chat_encoding_spec="dsv32")
        messages = [own.completion(body_of(TURN)).messages for _ in range(2)]
    assert not any(one is two for one, two in zip(*messages, strict=True))


def test_sglang_does_not_change_cached_messages(front_end: FrontEnd) -> None:
    call = {"type": "tool_use", "id": "1", "name": "read", "input": {"path": ["a"]}}
    said = {"role": "assistant", "content": [call]}
    completion = front_end.completion(body_of([*TURN, said, TURN[0]]))
    written = [message.model_dump() for message in completion.messages]
    before = copy.deepcopy([dict(message) for message in written])
    front_end._chat._apply_jinja_template(completion, None, False)
    assert [dict(message) for message in written] == before
    assert [message.model_dump() for message in completion.messages] == before


def test_another_request_in_the_same_context_is_converted_by_sglang(
    front_end: FrontEnd, cache: MessageCache
) -> None:
    context = RequestContext(PATH)
    other = front_end._request.model_validate(orjson.loads(body_of(TURN[::-1])))
    cache.recall(orjson.loads(body_of(TURN)), context)
    completion = cache.convert(front_end._convert, front_end._serving, other, context)
    assert [message.content for message in completion.messages] == ["three", "two", "one"]
    completion = front_end.completion(body_of(TURN))
    assert [message.content for message in completion.messages] == ["one", "two", "three"]


@pytest.mark.parametrize("body", [None, [], {"messages": None}, {"messages": [None, 7, {}]}])
def test_a_body_without_valid_messages_is_left_to_sglang(cache: MessageCache, body: Any) -> None:
    assert cache.recall(body, RequestContext(PATH)) == body
