"""An answer's bytes, read as the turn that its client will send back.

An agent appends what it was answered to its conversation and sends that again, with what its
tools gave or a person said behind it. So most of the next prompt is known when an answer ends.

    bytes -> events -> joined: a stream as the whole answer of its protocol
    bytes -----------> whole   -> checked: Answer

Read is only what says that a client goes on from it: the answer ended by itself, with a text
or with calls of the client's own tools. What is cut, refused, an error, one of several
choices, or done by a server-side tool gives nothing. Kept is only what reaches a prompt when
it is sent back, and what pairs calls with their results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import orjson

MOST_BYTES = 8 << 20
_Json = dict[str, Any]
_DELTAS = {
    "text_delta": "text",
    "thinking_delta": "thinking",
    "signature_delta": "signature",
    "input_json_delta": "partial_json",
}
_RESPONSE_CALLS = ("function_call", "custom_tool_call")


@dataclass(frozen=True, slots=True)
class Answer:
    """An assistant's turn.

    items: what the client appends: one message, or the items of /v1/responses.
    calls: the ids of its tool calls, in order.
    has_thinking: whether a part of it is the model's reasoning.
    """

    items: tuple[_Json, ...]
    calls: tuple[str, ...]
    has_thinking: bool


def read_answer(path: str, data: bytes, is_stream: bool) -> Answer | None:
    """The turn in a complete answer; None if what comes next is not certain. Never raises.

    path: of the request, without its query.
    data: the body as the client gets it, uncompressed.
    is_stream: whether it is a stream of events.
    """
    if path not in _PROTOCOLS or len(data) > MOST_BYTES:
        return None
    join, read = _PROTOCOLS[path]
    try:
        return read(join(_events(data)) if is_stream else _loaded(data))
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError):
        return None


def _events(data: bytes) -> Iterator[bytes]:
    """The data of each complete event; one that lacks its blank line was cut off."""
    lines: list[bytes] = []
    for line in data.splitlines():
        if line.startswith(b"data:"):
            lines.append(line[5:].removeprefix(b" "))
        elif not line and lines:
            yield b"\n".join(lines)
            lines = []


def _require(condition: bool) -> None:
    if not condition:
        raise ValueError("it is not certain what the client makes of this")


def _object(value: Any) -> _Json:
    _require(isinstance(value, dict))
    return cast(_Json, value)


def _loaded(data: bytes) -> _Json:
    return _object(orjson.loads(data))


def _text(value: Any) -> str:
    _require(isinstance(value, str))
    return cast(str, value)


def _join_messages(events: Iterable[bytes]) -> _Json:
    blocks: dict[int, _Json] = {}
    grown: dict[int, dict[str, list[str]]] = {}
    ending: _Json = {}
    for data in events:
        event = _loaded(data)
        kind = event.get("type")
        if kind == "content_block_start":
            blocks[event["index"]] = _object(event["content_block"])
        elif kind == "content_block_delta":
            key = _DELTAS[event["delta"]["type"]]
            texts = grown.setdefault(event["index"], {})
            texts.setdefault(key, []).append(event["delta"][key])
        elif kind == "message_delta":
            ending |= event["delta"]
        elif kind == "message_stop":
            _require(grown.keys() <= blocks.keys())
            joined = [_joined(block, grown.get(index, {})) for index, block in blocks.items()]
            return {**ending, "content": joined}
        elif kind == "error":
            break
    raise ValueError("cut or broken off")


def _joined(block: _Json, grown: dict[str, list[str]]) -> _Json:
    texts = {key: (block.get(key) or "") + "".join(parts) for key, parts in grown.items()}
    arguments = texts.pop("partial_json", "")
    return {**block, **texts, **({"input": orjson.loads(arguments)} if arguments else {})}


def _read_messages(message: _Json) -> Answer:
    content: list[_Json] = []
    calls: list[str] = []
    for block in message["content"]:
        kind = block["type"]
        if kind == "tool_use":
            calls.append(_text(block["id"]))
            kept = {key: block[key] for key in ("type", "id", "name", "input")}
            content.append({**kept, "input": _object(block["input"])})
        elif kind == "text":
            if _text(block["text"]).strip():  # Anthropic refuses a blank one: left out
                content.append({"type": "text", "text": block["text"]})
        else:
            _require(kind == "thinking")
            if _text(block["thinking"]):
                signed = {"signature": block["signature"]} if block.get("signature") else {}
                content.append({"type": "thinking", "thinking": block["thinking"], **signed})
    kinds = {block["type"] for block in content}
    ends = ("tool_use",) if calls else ("end_turn", "stop_sequence")
    _require(message["stop_reason"] in ends and not kinds <= {"thinking"})
    item = {"role": "assistant", "content": content}
    return Answer((item,), tuple(calls), "thinking" in kinds)


def _join_chat(events: Iterable[bytes]) -> _Json:
    texts: dict[str, list[str]] = {}
    calls: dict[int, tuple[_Json, list[str]]] = {}
    finish: Any = None
    for data in events:
        if data == b"[DONE]":
            message: _Json = {key: "".join(parts) for key, parts in texts.items()}
            message["tool_calls"] = [_joined_call(*call) for call in calls.values()]
            return {"choices": [{"message": message, "finish_reason": finish}]}
        chunk = _loaded(data)
        _require(not chunk.get("error"))
        for choice in chunk.get("choices") or ():
            _require(not choice.get("index"))
            finish = choice.get("finish_reason") or finish
            delta = choice.get("delta") or {}
            for key in ("content", "reasoning_content", "refusal"):
                if delta.get(key) is not None:
                    texts.setdefault(key, []).append(delta[key])
            for call in delta.get("tool_calls") or ():
                _add_call(calls, call)
    raise ValueError("cut")


def _add_call(calls: dict[int, tuple[_Json, list[str]]], delta: _Json) -> None:
    """Adds a part of a call; its first has its id and name, each some of its arguments."""
    first, arguments = calls.setdefault(delta["index"], (delta, []))
    _require(delta.get("id") in (None, first["id"]))
    arguments.append(delta["function"].get("arguments") or "")


def _joined_call(first: _Json, arguments: list[str]) -> _Json:
    function = {**first["function"], "arguments": "".join(arguments)}
    return {**first, "function": function}


def _read_chat(answer: _Json) -> Answer:
    (choice,) = answer["choices"]
    message = choice["message"]
    _require(not message.get("refusal") and not message.get("function_call"))
    content = _text(message.get("content") or "")
    item: _Json = {"role": "assistant", "content": content}
    thought = message.get("reasoning_content")
    if thought is not None:
        item["reasoning_content"] = _text(thought)
    calls = [_chat_call(call) for call in message.get("tool_calls") or ()]
    if calls:
        item["tool_calls"] = calls
    _require(choice["finish_reason"] == ("tool_calls" if calls else "stop"))
    _require(bool(calls or content))
    return Answer((item,), tuple(call["id"] for call in calls), bool(thought))


def _chat_call(call: _Json) -> _Json:
    function = call["function"]
    arguments = _text(function["arguments"])
    if arguments:
        _loaded(arguments.encode())
    named = {"name": _text(function["name"]), "arguments": arguments}
    return {"id": _text(call["id"]), "type": "function", "function": named}


def _join_responses(events: Iterable[bytes]) -> _Json:
    """The response in the last event; its items are those that were told one by one."""
    for data in events:
        event = _loaded(data)
        if event.get("type") == "response.completed":
            return _object(event["response"])
        _require(event.get("type") != "error")
    raise ValueError("cut or broken off")


def _read_responses(response: _Json) -> Answer:
    _require(response["status"] == "completed" and not response.get("error"))
    items: list[_Json] = []
    calls: list[str] = []
    for item in response["output"]:
        kind = item["type"]
        _require(item.get("status") in (None, "completed"))
        kept = {k: v for k, v in item.items() if v is not None and k not in ("id", "status")}
        if kind in _RESPONSE_CALLS:
            calls.append(_text(item["call_id"]))
        elif kind == "message":
            kept["content"] = [part for each in item["content"] if (part := _output_text(each))]
            if not kept["content"]:
                continue
        else:
            _require(kind == "reasoning")
        items.append(kept)
    kinds = {item["type"] for item in items}
    _require(not kinds <= {"reasoning"})
    return Answer(tuple(items), tuple(calls), "reasoning" in kinds)


def _output_text(part: _Json) -> _Json | None:
    _require(part["type"] == "output_text")
    text = _text(part["text"])
    return {"type": "output_text", "text": text} if text else None


_PROTOCOLS: dict[str, tuple[Callable[[Iterable[bytes]], _Json], Callable[[_Json], Answer]]] = {
    "/v1/messages": (_join_messages, _read_messages),
    "/v1/chat/completions": (_join_chat, _read_chat),
    "/v1/responses": (_join_responses, _read_responses),
}
PATHS = frozenset(_PROTOCOLS)
