"""The turn that follows a request: its answer as the client sends it back, and the request with a
made-up turn after that."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import orjson

from sgl_ext.reading.protocol import (
    INSTRUCTION_ROLES,
    Conversation,
    Json,
    Part,
    Protocol,
    Result,
    objects,
)

# A request whose last turn is not known yet, with a made-up turn in its place.
#
#     ... | assistant: calls A, B | result of A | result of B: nonce ...
#     ... | assistant: text       | user: nonce ...
#         known ------------------------------------^
#
# How a template renders a turn depends on the turns that follow: it drops the thinking before an
# earlier user's turn, and closes a group of results. A conversation that ends with its assistant
# would be rendered as no real request is. With a made-up turn at the end, everything before the
# first nonce is rendered as in the real request.
#
# The made-up turn is a result for each call that has none, else a user's text: after calls, a
# client can send only their results. Results that are there stay unchanged.

CALL_OUTPUTS = {
    "function_call": "function_call_output",
    "custom_tool_call": "custom_tool_call_output",
}
_IGNORED = frozenset({"stream_options", "background"})
_NOT_CERTAIN = (LookupError, TypeError, ValueError, AttributeError)


class Turn(NamedTuple):
    """A request to be converted, not answered.

    nonces: the texts with which the made-up parts begin, in order; empty if there are none.
    """

    body: Json
    nonces: tuple[str, ...]


def next_turn(protocol: Protocol, body: Any, answer: Sequence[Json], nonce: str) -> Turn | None:
    """The request that follows `body` and its `answer`; None if it is not certain.

    It shares unchanged parts with `body`. `nonce` is letters and digits, new for each call.
    """
    try:
        items = _items(protocol, body)
        if items and _is_assistant(items[-1]):
            return None
        added = list(answer)
        if not _returns_thinking(items):
            shown = [item for item in added if item.get("type") != "reasoning"]
            added = [{k: v for k, v in item.items() if k != "reasoning_content"} for item in shown]
        return _turn(protocol, body, items + added, added, nonce)
    except _NOT_CERTAIN:
        return None


def partial_turn(protocol: Protocol, body: Any, nonce: str) -> Turn | None:
    """A request that its client has not completed yet; None if it cannot be converted.

    A request that ends with a user's turn, or with the results of all calls, stays unchanged.
    """
    try:
        items = _items(protocol, body)
        start = len(items)
        while start and (_is_assistant(items[start - 1]) or result_ids(items[start - 1])):
            start -= 1
        return _turn(protocol, body, items, items[start:], nonce)
    except _NOT_CERTAIN:
        return None


def result_ids(item: Json) -> list[str]:
    """The ids of the calls whose results an item holds; empty if it holds anything else."""
    if item.get("type") in CALL_OUTPUTS.values():
        return [item["call_id"]]
    if item.get("role") == "tool":
        return [item["tool_call_id"]]
    blocks = item.get("content") if item.get("role") == "user" else None
    if not isinstance(blocks, list) or any(b.get("type") != "tool_result" for b in blocks):
        return []
    return [block["tool_use_id"] for block in blocks]


def tool_names(answer: Sequence[Json]) -> tuple[str, ...]:
    """The tools that an answer calls, each once."""
    names: dict[str, None] = {}
    for item in answer:
        calls = [item] if item.get("type") in CALL_OUTPUTS else objects(item.get("tool_calls"))
        blocks = objects(item.get("content"))
        for call in calls + [block for block in blocks if block.get("type") == "tool_use"]:
            name = call.get("name") or (call.get("function") or {}).get("name")
            if isinstance(name, str):
                names[name] = None
    return tuple(names)


def _items(protocol: Protocol, body: Any) -> list[Json]:
    """A request's turns. Raises if some are not in the request, or it has no list of turns."""
    rules = protocol.conversation
    if rules is None or any(map(body.get, rules.stored)):
        raise ValueError("the turns are not known")
    items = body.get(protocol.turns_field)
    if isinstance(items, str) and (Part.ITEMS, protocol.turns_field) in protocol.prompt:
        return [{"role": "user", "content": items}] if items else []
    if not isinstance(items, list):
        raise TypeError("the turns are no list")
    return items


def _is_assistant(item: Json) -> bool:
    kind = item.get("type")
    return item.get("role") == "assistant" or kind == "reasoning" or kind in CALL_OUTPUTS


def _calls(item: Json) -> list[tuple[str, str]]:
    """The ids and types of an assistant's calls."""
    if item.get("type") in CALL_OUTPUTS:
        return [(item["call_id"], item["type"])]
    blocks = [block for block in objects(item.get("content")) if block.get("type") == "tool_use"]
    return [(call["id"], "") for call in objects(item.get("tool_calls")) + blocks]


def _turn(
    protocol: Protocol, body: Json, items: list[Json], tail: Sequence[Json], nonce: str
) -> Turn:
    """A request of `items`, which end with `tail`: an assistant's turns and their results."""
    rules: Conversation = protocol.conversation  # type: ignore[assignment]
    answered = {call for item in tail for call in result_ids(item)}
    open_calls = [call for item in tail for call in _calls(item) if call[0] not in answered]
    nonces = tuple(f"{nonce}n{k}z" for k in range(len(open_calls)))
    if open_calls:
        results = [Result(*call, text) for call, text in zip(open_calls, nonces, strict=True)]
        items = rules.add_results(items, results)
    elif all(item.get("role") in INSTRUCTION_ROLES for item in items) or (
        tail and _is_assistant(tail[-1])
    ):
        nonces = (f"{nonce}n0z",)
        items = [*items, {"role": "user", "content": nonces[0]}]
    quiet = {key: value for key, value in body.items() if key not in _IGNORED}
    for key, value in rules.required.items():
        if quiet.get(key) is None:
            quiet[key] = value
    quiet |= {str(protocol.turns_field): items, "stream": False, **rules.overrides}
    return Turn(quiet, nonces)


def _returns_thinking(items: list[Json]) -> bool:
    """Whether a client sends an assistant's thinking back: as it did so far, or yes.

    Thinking in content blocks always comes back and is not looked at.
    """
    turns = [item for item in items if _is_assistant(item)]
    return not turns or any(
        item.get("type") == "reasoning" or isinstance(item.get("reasoning_content"), str)
        for item in turns
    )


# The bytes of an answer, read as the turn that its client will send back.
#
# An agent appends an answer to its conversation and sends the conversation again, followed by the
# results of its tools or by a person's words. So most of the next prompt is known when an answer
# ends.
#
# An answer is read only if the client certainly goes on from it: the answer ended by itself, with a
# text or with calls of the client's own tools. A cut answer, an error, a refusal, one of several
# choices, or the work of a server-side tool gives None. The turn contains only what reaches a
# prompt, and what pairs calls with their results.

LIMIT_ANSWER_BYTES = 8 << 20


def read_answer(protocol: Protocol, data: bytes, is_stream: bool) -> list[Json] | None:
    """The items that a client appends to its conversation for a complete answer.

    None if the next request is not certain. Never raises.

    data: the body as the client gets it, uncompressed.
    is_stream: whether it is a stream of events.
    """
    rules = protocol.conversation
    if rules is None or len(data) > LIMIT_ANSWER_BYTES:
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
