"""OpenAI's chat completions: `/v1/chat/completions`, and Ollama's `/api/chat`."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from sgl_ext.protocols.errors import OPENAI_ERRORS
from sgl_ext.protocols.prompt_cache import NO_PARTS, breakpoints_in, read_fields
from sgl_ext.protocols.tools import LateTools, with_allowed_tools
from sgl_ext.reading.cache_marks import control_of, marks_in
from sgl_ext.reading.next_turn import as_text, parsed, require
from sgl_ext.reading.places import value_at
from sgl_ext.reading.protocol import (
    COMMENT,
    INSTRUCTION_ROLES,
    Conversation,
    FoundMark,
    Json,
    MarkRules,
    Model,
    Part,
    Protocol,
    Result,
    ToolForm,
    listed,
)
from sgl_ext.reading.rewriting import (
    DROPPED,
    Counts,
    altered,
    as_json,
    edited,
    is_object,
    kind_of,
    not_shown,
    text_of,
    text_part,
    with_items,
    without_nulls,
)


def _find_marks(body: Json) -> Iterator[FoundMark]:
    """The marks on tools, parts and messages in prompt order; a message's mark is at its end."""
    tools = listed(body.get("tools"))
    holders = [t if control_of(t) is not None else value_at(t, ("function",)) for t in tools]
    yield from marks_in(holders, ("tools",), "tools")
    for i, message in enumerate(listed(body.get("messages"))):
        if not isinstance(message, dict):
            continue
        yield from marks_in(message.get("content"), ("messages", i), f"messages.{i}.content")
        if (control := message.get("cache_control")) is not None:
            yield FoundMark(("messages", i), f"messages.{i}", message, control)


def _find_breakpoints(body: Json) -> Iterator[FoundMark]:
    for i, message in enumerate(listed(body.get("messages"))):
        if isinstance(message, dict):
            parts = message.get("content")
            yield from breakpoints_in(parts, ("messages", i), f"messages.{i}.content")


def _join(events: Iterable[bytes]) -> Json:
    texts: defaultdict[str, list[str]] = defaultdict(list)
    calls: defaultdict[int, list[Json]] = defaultdict(list)
    reason: Any = None
    for data in events:
        if data == b"[DONE]":
            message: Json = {key: "".join(parts) for key, parts in texts.items()}
            message["tool_calls"] = [_joined_call(deltas) for deltas in calls.values()]
            return {"choices": [{"message": message, "finish_reason": reason}]}
        chunk = parsed(data)
        require(not chunk.get("error"))
        for choice in chunk.get("choices") or ():
            require(not choice.get("index"))
            reason = choice.get("finish_reason") or reason
            delta = choice.get("delta") or {}
            for key in ("content", "reasoning_content", "refusal"):
                if delta.get(key) is not None:
                    texts[key].append(delta[key])
            for call in delta.get("tool_calls") or ():
                calls[call["index"]].append(call)
    raise ValueError("the stream was cut")


def _joined_call(deltas: list[Json]) -> Json:
    """The first delta has the call's id and name, each some of its arguments."""
    first = deltas[0]
    require(all(delta.get("id") in (None, first["id"]) for delta in deltas))
    arguments = "".join(delta["function"].get("arguments") or "" for delta in deltas)
    return {**first, "function": {**first["function"], "arguments": arguments}}


def _read(answer: Json) -> list[Json]:
    (choice,) = answer["choices"]
    message = choice["message"]
    require(not message.get("refusal") and not message.get("function_call"))
    content = as_text(message.get("content") or "")
    item: Json = {"role": "assistant", "content": content}
    thinking = message.get("reasoning_content")
    if thinking is not None:
        item["reasoning_content"] = as_text(thinking)
    calls = [_read_call(call) for call in message.get("tool_calls") or ()]
    if calls:
        item["tool_calls"] = calls
    require(choice["finish_reason"] == ("tool_calls" if calls else "stop"))
    require(bool(calls or content))
    return [item]


def _read_call(call: Json) -> Json:
    function = call["function"]
    arguments = as_text(function["arguments"])
    if arguments:
        parsed(arguments.encode())
    named = {"name": as_text(function["name"]), "arguments": arguments}
    return {"id": as_text(call["id"]), "type": "function", "function": named}


def _add_results(items: list[Json], results: list[Result]) -> list[Json]:
    return items + [{"role": "tool", "tool_call_id": c, "content": text} for c, _, text in results]


def _add_texts(body: Json, parts: list[Json]) -> None:
    messages = body.get("messages")
    if not parts or not isinstance(messages, list):
        return
    first = messages[0] if messages else None
    if not isinstance(first, dict) or first.get("role") not in INSTRUCTION_ROLES:
        body["messages"] = [{"role": "system", "content": parts}, *messages]
        return
    own = first.get("content")
    if isinstance(own, str):
        own = [{"type": "text", "text": own}] if own else []
    if isinstance(own, list):
        body["messages"] = [{**first, "content": [*parts, *own]}, *messages[1:]]


def _write_tool(function: Json, schema: Any) -> Json:
    parameters = {} if schema is None else {"parameters": schema}
    return {"type": "function", "function": {**function, **parameters}}


_PROMPT = ((Part.TOOLS, "tools"), (Part.MESSAGES, "messages"))


# Rewrites bodies of `/v1/chat/completions`, as OpenAI's SDKs and many harnesses send them.

_MEDIA = {
    "image_url": "image",
    "input_image": "image",
    "input_audio": "audio",
    "audio_url": "audio",
    "video_url": "video",
}


def translate(body: Json, model: Model, counts: Counts) -> Json:
    """A chat completion's body for SGLang."""
    body = with_items(without_nulls(body), "tools", partial(_tool, counts=counts))
    choice = body.get("tool_choice")
    if isinstance(choice, dict) and isinstance(choice.get("allowed_tools"), dict):
        body = with_allowed_tools(body, model, counts)
    if body.get("web_search_options") is not None:  # it searches at OpenAI
        counts["web_search_tool"] += 1
        body = edited(body, {"web_search_options": DROPPED})
    late = LateTools(body.get("tools"), counts)
    return with_items(body, "messages", partial(_message, model=model, counts=counts, late=late))


def _tool(tool: Any, counts: Counts) -> Any:
    kind = kind_of(tool)
    if kind is None or kind == "function":
        return tool
    counts["custom_tool" if kind == "custom" else "unknown_tool"] += 1
    return DROPPED


def _message(message: Any, model: Model, counts: Counts, late: LateTools) -> Any:
    if not isinstance(message, dict):
        return message
    if not model.defers_tools:
        message = late.with_definitions(message)
    if message.get("role") in ("assistant", "function"):
        message = _as_now(message, counts)
    return with_items(message, "content", partial(_part, model=model, counts=counts))


def _as_now(message: Json, counts: Counts) -> Json:
    """A message whose calls, refusal or audio have the form that SGLang reads."""
    edits: Json = {}
    function = message.get("function_call")
    if isinstance(function, dict) and not message.get("tool_calls"):
        counts["function_call"] += 1
        call = {"id": _id_of(function.get("name")), "type": "function", "function": function}
        edits |= {"tool_calls": [call], "function_call": DROPPED}
    elif message.get("role") == "function":
        counts["function_call"] += 1
        edits |= {"role": "tool", "tool_call_id": _id_of(message.get("name"))}
    calls = listed(edits.get("tool_calls", message.get("tool_calls")))
    if any(kind_of(call) == "custom" for call in calls):
        calls = [_function_call(call, counts) for call in calls]
    read = altered(calls, partial(_with_object, counts=counts))
    if read and read is not message.get("tool_calls"):
        edits["tool_calls"] = read
    if not message.get("content"):
        if isinstance(refusal := message.get("refusal"), str) and refusal:
            counts["refusal"] += 1
            edits["content"] = refusal
        elif message.get("audio"):
            counts["media"] += 1
            edits["content"] = not_shown("audio")
    return edited(message, edits)


def _id_of(name: Any) -> str:
    """The id of a call of OpenAI's former functions, which have none."""
    return f"call_{name}"


def _function_call(call: Any, counts: Counts) -> Any:
    """A call of a tool whose input is a text, as a function's."""
    custom = call.get("custom") if kind_of(call) == "custom" else None
    if not isinstance(custom, dict):
        return call
    counts["custom_tool"] += 1
    arguments = as_json({"input": custom.get("input")})
    function = {"name": custom.get("name"), "arguments": arguments}
    return {"id": call.get("id"), "type": "function", "function": function}


def _with_object(call: Any, counts: Counts) -> Any:
    """A call whose arguments are the text of an object: SGLang rejects any other."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    given = function.get("arguments")
    if isinstance(given, dict) or is_object(given):
        return call
    counts["call_arguments"] += 1
    return {**call, "function": {**function, "arguments": text_of(given)}}


def _part(part: Any, model: Model, counts: Counts) -> Any:
    """A part of a message that SGLang can render."""
    kind = kind_of(part)
    if kind in _MEDIA and not model.sees:
        counts["image" if _MEDIA[kind] == "image" else "media"] += 1
        return text_part(not_shown(_MEDIA[kind]))
    if kind == "file":
        counts["document"] += 1
        file = part.get("file")
        name = file.get("filename") if isinstance(file, dict) else None
        return text_part(not_shown("file", name))
    if kind == "refusal":
        counts["refusal"] += 1
        return text_part(str(part.get("refusal")))
    return part


CHAT = Protocol(
    name="chat",
    paths=("/v1/chat/completions", "/invocations"),
    errors=OPENAI_ERRORS,
    beat=COMMENT,
    prompt=_PROMPT,
    marks=MarkRules(
        _find_marks, root_is_whole=True, read_fields=partial(read_fields, _find_breakpoints)
    ),
    conversation=Conversation(_join, _read, _add_results),
    tool_form=ToolForm(lambda tool: isinstance(tool.get("function"), dict), _write_tool),
    add_texts=_add_texts,
    translate=translate,
    refused={
        "functions": "use tools",
        "function_call": "use tool_choice",
        "audio": "answers are text",
        "modalities": "answers are text",
        "moderation": "nothing here moderates",
    },
    formats=("response_format",),
    recognizes=lambda headers, body: isinstance(body.get("messages"), list),
)
OLLAMA_CHAT = Protocol(
    paths=("/api/chat",),
    errors=OPENAI_ERRORS,
    prompt=_PROMPT,
    marks=MarkRules(read_fields=NO_PARTS),
    refused={
        "format": "use response_format of /v1/chat/completions",
        "tools": "use /v1/chat/completions",
    },
)
