"""Rewrites bodies of `/v1/messages`, as Claude Code and Anthropic's SDKs send them."""

from collections.abc import Callable
from functools import partial
from typing import Any

from sgl_ext.protocols.translation.client_tools import plain_tool
from sgl_ext.protocols.translation.late_tools import (
    ADDITION,
    REFERENCE,
    REMOVAL,
    LateTools,
)
from sgl_ext.requests.call_arguments import object_of
from sgl_ext.requests.canonical import are_searched
from sgl_ext.requests.protocol import Json, Model, listed, objects
from sgl_ext.requests.rewriting import (
    DROPPED,
    Counts,
    as_json,
    edited,
    family_of,
    kind_of,
    not_shown,
    readable,
    text_part,
    with_items,
)

# Fields for Anthropic's own servers. SGLang ignores them.
_IGNORED = (
    "betas",
    "compaction",
    "container",
    "context_management",
    "inference_geo",
    "mcp_servers",
    "speed",
)
_DISPLAYS = ("summarized", "omitted")
_SERVER_TOOLS = (
    "web_search",
    "web_fetch",
    "code_execution",
    "tool_search_tool",
    "mcp_toolset",
    "advisor",
)
_KNOWN_BLOCKS = frozenset({"text", "thinking", "search_result"})
_SERVER_CALLS = frozenset({"server_tool_use", "mcp_tool_use"})
_RESULT = "_tool_result"


def translate(body: Json, model: Model, counts: Counts) -> Json:
    """A body in Anthropic's protocol for SGLang."""
    counts.update(field for field in _IGNORED if body.get(field))
    if type(body.get("max_tokens")) is int and body["max_tokens"] == 0:
        # SGLang's type begins at 1. The sampling parameters get the 0.
        body = edited(body, {"max_tokens": 1})
    thinking = body.get("thinking")
    if kind_of(thinking) in ("enabled", "adaptive") and not model.thinks:
        counts["thinking"] += 1
        body = edited(body, {"thinking": DROPPED})
    elif isinstance(thinking, dict) and _is_unknown(thinking.get("display"), _DISPLAYS):
        counts["thinking_display"] += 1
        body = edited(body, {"thinking": edited(thinking, {"display": DROPPED})})
    if isinstance(form := body.get("output_format"), dict):  # earlier name of output_config.format
        counts["output_format"] += 1
        config = body.get("output_config")
        config = {"format": form, **(config if isinstance(config, dict) else {})}
        body = edited(body, {"output_config": config, "output_format": DROPPED})
    choice = body.get("tool_choice")
    if isinstance(choice, dict) and choice.get("disable_parallel_tool_use", False) is None:
        choice = edited(choice, {"disable_parallel_tool_use": DROPPED})
        body = edited(body, {"tool_choice": choice})
    offered = partial(_tool, is_searched=are_searched(listed(body.get("tools"))), counts=counts)
    body = with_items(body, "tools", offered)
    late = LateTools(body.get("tools"), counts, partial(_tool, is_searched=True, counts=counts))
    block = partial(_block, model=model, counts=counts, late=late)
    body = with_items(body, "messages", partial(_message, block=block))
    if late.added:
        body = edited(body, {"tools": late.with_added(body.get("tools"))})
    return body


def _is_unknown(value: Any, known: tuple[str, ...]) -> bool:
    """Whether a text is none of those that SGLang knows."""
    return isinstance(value, str) and value not in known


def _tool(tool: Any, is_searched: bool, counts: Counts) -> Any:
    """A tool that SGLang can offer; DROPPED if it runs on Anthropic's servers."""
    kind = kind_of(tool)
    if not isinstance(tool, dict) or (kind is None and tool.get("type") is not None):
        return tool
    if kind is not None and kind != "custom":
        plain = plain_tool(tool)
        if plain is not None:
            counts[f"{plain[0]}_tool"] += 1
            return plain[1]
        family = family_of(kind, _SERVER_TOOLS)
        counts[family if family.endswith(("_tool", "_toolset")) else f"{family}_tool"] += 1
        if not isinstance(tool.get("input_schema"), dict):
            return DROPPED
        return edited(tool, {"type": DROPPED})
    edits: Json = {}
    if tool.get("strict", False) is None:
        edits["strict"] = DROPPED
    if is_searched and tool.get("defer_loading"):  # no server here searches for it
        counts["defer_loading"] += 1
        edits["defer_loading"] = DROPPED
    if examples := tool.get("input_examples"):
        counts["input_examples"] += 1
        about = tool.get("description") or ""
        edits["description"] = f"{about}\n\nExamples of its input: {as_json(examples)}".lstrip()
        edits["input_examples"] = DROPPED
    return edited(tool, edits)


def _message(message: Any, block: Callable[[Any], Any]) -> Any:
    if not isinstance(message, dict) or not isinstance(message.get("content"), list):
        return message
    if all(map(_is_plain, message["content"])):  # the usual case: the rest can be skipped
        return message
    return with_items(message, "content", block)


def _is_plain(block: Any) -> bool:
    """Whether SGLang takes a block as it is, by its type alone."""
    if type(block) is not dict:
        return False
    kind = block.get("type")
    if kind == "tool_result":
        return type(block.get("content")) is str
    return kind == "text" or (kind == "tool_use" and type(block.get("input")) is dict)


def _block(
    block: Any, model: Model, counts: Counts, late: LateTools, *, in_result: bool = False
) -> Any:
    """A block that SGLang can render; DROPPED if it has no content for the model.

    A result inside a tool's result is unknown to the protocol, however deep.
    """
    kind = kind_of(block)
    if kind is None or kind in _KNOWN_BLOCKS:
        return block
    if kind == "tool_use":
        return _call(block, counts)
    if kind == "tool_result" and not in_result:
        if not model.defers_tools:
            block = late.with_definitions(block)
        inside = partial(_block, model=model, counts=counts, late=late, in_result=True)
        return with_items(block, "content", inside)
    if kind == REFERENCE:
        return block if model.defers_tools else text_part(late.refer([block]))
    if kind in (ADDITION, REMOVAL):
        text = late.change(block)
        return text_part(text) if text else DROPPED
    if kind == "image":
        source = block.get("source")
        if model.sees and kind_of(source) != "file":
            return block
        counts["image"] += 1
        return text_part(not_shown("image"))
    if kind == "document":
        counts["document"] += 1
        return _document(block, model)
    if kind == "redacted_thinking":
        counts["redacted_thinking"] += 1
        return DROPPED
    if kind in _SERVER_CALLS:
        counts["server_tool_use"] += 1
        return text_part(f"[{block.get('name')} was called with {as_json(block.get('input'))}]")
    if kind.endswith(_RESULT):
        counts["server_tool_result"] += 1
        content = block.get("content")
        found = objects(content.get("tool_references")) if isinstance(content, dict) else []
        text = late.refer(found) if found else readable(content)
        return text_part(f"[{kind[: -len(_RESULT)]} gave]\n{text}")
    counts["compaction" if kind == "compaction" else "unknown_block"] += 1
    changes = [late.change(change) for change in objects(block.get("tool_changes"))]
    text = "\n".join(each for each in (readable(block), *changes) if each)
    return text_part(text) if text else DROPPED


def _call(block: Json, counts: Counts) -> Json:
    """A call whose input is an object, as the protocol requires."""
    given = block.get("input", {})
    if isinstance(given, dict):
        return block
    counts["tool_use_input"] += 1
    return {**block, "input": object_of(given)}


def _document(block: Json, model: Model) -> Json:
    """A document's text, or a note that it is not shown."""
    source = block.get("source")
    source = source if isinstance(source, dict) else {}
    title = block.get("title")
    about = [text for text in (title, block.get("context")) if isinstance(text, str) and text]
    content = source.get("content")
    if source.get("type") == "text" and isinstance(source.get("data"), str):
        text = source["data"]
    elif isinstance(content, str | list):
        text = readable(content)
    else:
        return text_part(not_shown("document", title or source.get("url")))
    return text_part("\n".join([*about, text]))
