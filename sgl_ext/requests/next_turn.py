"""A request whose last turn is not known yet, with something in that turn's place.

    ... | assistant: calls A, B | result of A | result of B: nonce ...
    ... | assistant: text       | user: nonce ...
        what is certain ----------------------------------^

A template frames a turn by what comes behind it: it drops what an assistant thought before
an earlier user's turn, and closes a group of results. So a conversation that ends with its
assistant is rendered as none that is ever sent, and a made-up turn stands behind it. What is
before the first nonce is then as it will be in the real request.

Results stand for calls that have none, and a user's text for all else: after calls a client
can send nothing but their results. Results that are there stay where they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from sgl_ext.requests.answers import Answer

_MESSAGES = "/v1/messages"
_CHAT = "/v1/chat/completions"
_RESPONSES = "/v1/responses"
_PATHS = {"messages": _MESSAGES, "chat": _CHAT, "responses": _RESPONSES}
_LISTS = {_MESSAGES: "messages", _CHAT: "messages", _RESPONSES: "input"}
_OUTPUTS = {
    "function_call": "function_call_output",
    "custom_tool_call": "custom_tool_call_output",
}
_ANTHROPIC_BLOCKS = frozenset({"tool_use", "tool_result", "thinking"})
_INSTRUCTING_ROLES = ("system", "developer")
# What a server keeps of earlier turns: the prompt is not in the request.
_STORED = ("previous_response_id", "conversation")
_IGNORED = frozenset({"stream_options", "background"})
_Items = list[dict[str, Any]]


class Turn(NamedTuple):
    """A request to be converted, not answered.

    nonces: the texts that begin what was made up, in order; empty if nothing was.
    """

    body: dict[str, Any]
    nonces: tuple[str, ...]


def next_turn(path: str, body: Any, answer: Answer, nonce: str) -> Turn | None:
    """The request that follows `body`, which was answered with `answer`; None if not certain.

    What is unchanged is shared with `body`. `nonce` is letters and digits, new every time.
    """
    try:
        items = _items(path, body)
        if items is None or (items and _is_assistants(items[-1])):
            return None
        added = list(answer.items)
        if not _returns_thinking(items):
            added = [without for item in added if (without := _without_thinking(item))]
        return _turn(path, body, items + added, added, nonce)
    except (LookupError, TypeError, ValueError, AttributeError):
        return None


def partial_turn(path: str, body: Any, nonce: str) -> Turn | None:
    """A request that its client has not completed yet; None if it cannot be converted.

    One that ends with a user's turn, or with the results of all calls, is left as it is.
    """
    try:
        items = _items(path, body)
        if items is None:
            return None
        behind = len(items)
        while behind and (_is_assistants(items[behind - 1]) or _results(items[behind - 1])):
            behind -= 1
        return _turn(path, body, items, items[behind:], nonce)
    except (LookupError, TypeError, ValueError, AttributeError):
        return None


def protocol_of(headers: Mapping[str, str], query_protocol: str | None, body: Any) -> str | None:
    """The path whose protocol a body speaks; None if that cannot be told. Never raises.

    A name stated in `nvext.protocol` or the query counts, one that is unknown too.
    `headers` has lower-case names.
    """
    if not isinstance(body, dict):
        return None
    nvext = body.get("nvext")
    stated = nvext.get("protocol") if isinstance(nvext, dict) else None
    stated = query_protocol or None if stated is None else stated
    if stated is not None:
        return _PATHS.get(stated) if isinstance(stated, str) else None
    if body.get("input") is not None or body.get("previous_response_id") is not None:
        return _RESPONSES
    messages = body.get("messages")
    if not isinstance(messages, list):
        return None
    is_anthropics = (
        body.get("system") is not None
        or "anthropic-version" in headers
        or any("input_schema" in tool for tool in _objects(body.get("tools")))
        or any(
            block.get("type") in _ANTHROPIC_BLOCKS
            for message in _objects(messages)
            for block in _objects(message.get("content"))
        )
    )
    return _MESSAGES if is_anthropics else _CHAT


def with_protocol(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """A body that says itself whose protocol it speaks; the same object if that has no name."""
    name = next((name for name, each in _PATHS.items() if each == path), None)
    nvext = body.get("nvext") or {}
    if name is None or not isinstance(nvext, dict):
        return body
    return {**body, "nvext": {**nvext, "protocol": name}}


def _items(path: str, body: Any) -> _Items | None:
    """A request's turns; None if they are not all there or are none."""
    key = _LISTS.get(path)
    if key is None or not isinstance(body, dict):
        return None
    items = body.get(key)
    if isinstance(items, str) and path == _RESPONSES:
        items = [{"role": "user", "content": items}] if items else []
    if not isinstance(items, list) or (path == _RESPONSES and any(map(body.get, _STORED))):
        return None
    return items


def _objects(value: Any) -> _Items:
    listed = value if isinstance(value, list) else []
    return [each for each in listed if isinstance(each, dict)]


def _is_assistants(item: dict[str, Any]) -> bool:
    kind = item.get("type")
    return item.get("role") == "assistant" or kind == "reasoning" or kind in _OUTPUTS


def _calls(item: dict[str, Any]) -> list[tuple[str, str]]:
    """The ids and types of an assistant's calls."""
    if item.get("type") in _OUTPUTS:
        return [(item["call_id"], item["type"])]
    blocks = [block for block in _objects(item.get("content")) if block.get("type") == "tool_use"]
    return [(call["id"], "") for call in _objects(item.get("tool_calls")) + blocks]


def _results(item: dict[str, Any]) -> list[str]:
    """The ids of the calls whose results an item is; none if it says anything else."""
    if item.get("type") in _OUTPUTS.values():
        return [item["call_id"]]
    if item.get("role") == "tool":
        return [item["tool_call_id"]]
    blocks = item.get("content") if item.get("role") == "user" else None
    if not isinstance(blocks, list) or any(b.get("type") != "tool_result" for b in blocks):
        return []
    return [block["tool_use_id"] for block in blocks]


def _turn(
    path: str, body: dict[str, Any], items: _Items, tail: Sequence[dict[str, Any]], nonce: str
) -> Turn:
    """A request of `items`, which end with `tail`: an assistant's turns and their results."""
    answered = {call for item in tail for call in _results(item)}
    open_calls = [call for item in tail for call in _calls(item) if call[0] not in answered]
    nonces = tuple(f"{nonce}n{k}z" for k in range(len(open_calls)))
    if open_calls:
        results = [(*call, text) for call, text in zip(open_calls, nonces, strict=True)]
        items = _with_results(path, items, results)
    elif all(item.get("role") in _INSTRUCTING_ROLES for item in items) or (
        tail and _is_assistants(tail[-1])
    ):
        nonces = (f"{nonce}n0z",)
        items = [*items, {"role": "user", "content": nonces[0]}]
    quiet = {key: value for key, value in body.items() if key not in _IGNORED}
    quiet |= {_LISTS[path]: items, "stream": False}
    if path == _MESSAGES and quiet.get("max_tokens") is None:
        quiet["max_tokens"] = 1
    if path == _RESPONSES:
        quiet["store"] = False
    return Turn(quiet, nonces)


def _with_results(path: str, items: _Items, results: list[tuple[str, str, str]]) -> _Items:
    """The items and, behind them, a result for each id, type and text."""
    if path == _CHAT:
        told = [{"role": "tool", "tool_call_id": c, "content": text} for c, _, text in results]
        return items + told
    if path == _RESPONSES:
        put = [{"type": _OUTPUTS[k], "call_id": c, "output": text} for c, k, text in results]
        return items + put
    given = [{"type": "tool_result", "tool_use_id": c, "content": text} for c, _, text in results]
    if _results(items[-1]):
        *items, last = items
        given = [*last["content"], *given]
    return [*items, {"role": "user", "content": given}]


def _returns_thinking(items: _Items) -> bool:
    """Whether a client sends back what an assistant thought: as it did so far, or yes.

    Thoughts among the blocks of /v1/messages always go back and are not asked about.
    """
    turns = [item for item in items if _is_assistants(item)]
    return not turns or any(
        item.get("type") == "reasoning" or isinstance(item.get("reasoning_content"), str)
        for item in turns
    )


def _without_thinking(item: dict[str, Any]) -> dict[str, Any] | None:
    if item.get("type") == "reasoning":
        return None
    return {key: value for key, value in item.items() if key != "reasoning_content"}
