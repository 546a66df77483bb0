"""The canonical text of the parts of a request, in bytes: what reaches the prompt.

It leaves out the order of JSON keys and white space, marks for the cache, ids of messages and tool
calls, and whether a text stands alone or in a list of text blocks. Parts are framed
by the byte 0xFF, which no UTF-8 text contains.

A client defers a tool (`defer_loading`) so that it can offer it later without changing the head of
the prompt: a message that refers to the tool shows it. If a vendor's server should search the
deferred tools, all are at the head, because no server here does.
"""

from typing import Any

import orjson

MARKS = frozenset({"cache_control", "prompt_cache_breakpoint"})
"""The keys with which clients mark the end of a prefix."""
_IDS = {"id", "tool_use_id", "tool_call_id", "call_id"}
# Some SDKs send the last one with the tools of streamed requests only.
_NOT_RENDERED = MARKS | _IDS | {"status", "signature", "eager_input_streaming"}
_TEXT_ALONE = _NOT_RENDERED | {"role", "content"}
_TEXT_TYPES = frozenset({None, "text", "input_text", "output_text"})
_RESULT_KEYS = frozenset({"type", "tool_use_id", "content", "cache_control"})
ROLES: dict[Any, bytes] = {role: b"\xffm" + role.encode() for role in ("user", "assistant", "tool")}
"""How a message of each usual role begins."""
_DEFERRED = "defer_loading"
_SEARCHES = "tool_search"
SORTED = orjson.OPT_SORT_KEYS


def offered_tools(tools: Any) -> list[Any]:
    """The tools that reach the prompt, as they are rendered: all, whichever may be called."""
    return [rendered(tool) for tool in tools_at_head(tools)] if isinstance(tools, list) else []


def tools_at_head(tools: list[Any]) -> list[Any]:
    """The tools that the prompt shows at its head; the same list if none is deferred."""
    marked = [  # each request comes here, and few have such a tool
        tool
        for tool in tools
        if type(tool) is dict
        and (_DEFERRED in tool or (type(f := tool.get("function")) is dict and _DEFERRED in f))
    ]
    if not any(map(is_deferred, marked)) or are_searched(tools):
        return tools
    return [tool for tool in tools if not is_deferred(tool)]


def is_deferred(tool: Any) -> bool:
    """Whether a tool, of any protocol, says that it is shown later."""
    if not isinstance(tool, dict):
        return False
    function = tool.get("function")
    return tool.get(_DEFERRED) is True or (
        isinstance(function, dict) and function.get(_DEFERRED) is True
    )


def are_searched(tools: list[Any]) -> bool:
    """Whether a vendor's server should search these tools for those that the model needs."""
    kinds = (tool.get("type") for tool in tools if isinstance(tool, dict))
    return any(isinstance(kind, str) and kind.startswith(_SEARCHES) for kind in kinds)


def items_in(value: Any) -> list[Any]:
    """A list of messages or items; a text is one user's message."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    return value if isinstance(value, list) else []


def role_text(role: Any) -> bytes:
    """The beginning of a message of this role."""
    return ROLES.get(role) or b"\xffm" + str(role).encode()


def text_of(value: str) -> bytes:
    """A text in bytes."""
    return value.encode("utf-8", "surrogatepass")


def content_text(content: Any, *, in_result: bool = False) -> bytes:
    """A text or blocks; a text alone counts as a list of one text block."""
    if type(content) is str:
        return b"\xffb" + content.encode("utf-8", "surrogatepass") if content else b""
    if not isinstance(content, list):
        content = (content,) if content else ()
    return b"".join([b"\xffb" + block_text(block, in_result=in_result) for block in content])


def block_text(block: Any, *, in_result: bool = False) -> bytes:
    """One block of content; a text block is its text.

    in_result: the block is inside a tool's result. A result inside it is read as any other block:
        how deep calls can go differs between the balancer and an engine.
    """
    if isinstance(block, str):
        return text_of(block)
    if not isinstance(block, dict):
        return orjson.dumps(block, option=SORTED)
    kind = block.get("type")
    if kind in _TEXT_TYPES and isinstance(text := block.get("text"), str):
        return text_of(text)
    if kind == "tool_use":
        return b"\xffu" + orjson.dumps((block.get("name"), block.get("input")), option=SORTED)
    if kind != "tool_result" or in_result:
        return orjson.dumps(rendered(block), option=SORTED)
    text = b"\xffr" + content_text(block.get("content"), in_result=True)
    if not block.keys() <= _RESULT_KEYS:
        others = {k: v for k, v in block.items() if k != "content"}
        text += orjson.dumps(rendered(others), option=SORTED)
    return text


def rest_of_message(message: dict[str, Any]) -> bytes:
    """The rest of a message, without role and content: tool calls, reasoning, a call's output."""
    if message.keys() <= _TEXT_ALONE:  # as each result of a tool in a chat
        return b""
    rest = {
        key: value
        for key, value in message.items()
        if value is not None and key not in ("role", "content")
    }
    calls = rest.get("tool_calls")
    if isinstance(calls, list):
        rest["tool_calls"] = [rendered(call) for call in calls]
    if isinstance(rest.get("output"), list):
        rest["output"] = [rendered(part) for part in rest["output"]]
    if rest.get("type") == "message":
        del rest["type"]
    rest = rendered(rest)
    return b"\xffo" + orjson.dumps(rest, option=SORTED) if rest else b""


def rendered(block: Any) -> Any:
    """A block, tool or message without what does not reach the prompt."""
    if not isinstance(block, dict) or _NOT_RENDERED.isdisjoint(block):
        return block
    return {key: value for key, value in block.items() if key not in _NOT_RENDERED}
