"""Rewrites bodies of `/v1/responses`, as Codex and OpenAI's SDKs send them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from sgl_ext.protocols.translation.chat import allowed_tools, with_reminders
from sgl_ext.requests.protocol import Model
from sgl_ext.requests.rewriting import (
    DROPPED,
    Counts,
    altered,
    as_json,
    edited,
    kind_of,
    not_shown,
    readable,
    without_nulls,
)

_INCLUDED = (
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
)
_TIERS = ("auto", "default", "flex", "scale", "priority")
_SUMMARIES = ("auto", "concise", "detailed")
_OFFERED = ("function", "custom")
# OpenAI's built-in tools that SGLang can run, for models trained on them.
_BUILT_IN = ("code_interpreter", "web_search", "web_search_preview")
_SERVER_TOOLS = (
    "apply_patch",
    "code_interpreter",
    "computer",
    "file_search",
    "image_generation",
    "local_shell",
    "mcp",
    "shell",
    "tool_search",
    "web_search",
)
_KNOWN_ITEMS = ("message", "reasoning", "item_reference")
_CALLS = ("function_call", "custom_tool_call")
_OUTPUTS = ("function_call_output", "custom_tool_call_output")
# Calls of tools that the client ran, with the field that holds their input.
_CLIENT_CALLS = {
    "local_shell_call": "action",
    "shell_call": "action",
    "computer_call": "action",
    "apply_patch_call": "operation",
}
_LEFT_OUT = (
    "code_interpreter_call",
    "compaction",
    "file_search_call",
    "image_generation_call",
    "mcp_approval_request",
    "mcp_approval_response",
    "mcp_list_tools",
    "tool_search_call",
    "tool_search_output",
    "web_search_call",
)
_TEXTS = ("text", "input_text", "output_text")
_MEDIA = {
    "input_image": "image",
    "image_url": "image",
    "computer_screenshot": "image",
    "input_audio": "audio",
    "input_video": "video",
    "video_url": "video",
}


def translate(body: dict[str, Any], model: Model, counts: Counts) -> dict[str, Any]:
    """A response's body for SGLang."""
    body = without_nulls(body)
    edits: dict[str, Any] = {}
    included = body.get("include")
    if isinstance(included, list):
        edits["include"] = altered(included, partial(_included, counts=counts))
    if isinstance(body.get("service_tier"), str) and body["service_tier"] not in _TIERS:
        counts["service_tier"] += 1
        edits["service_tier"] = DROPPED
    reasoning = body.get("reasoning")
    reasoning = reasoning if isinstance(reasoning, dict) else {}
    summary = reasoning.get("summary")
    if isinstance(summary, str) and summary not in _SUMMARIES:
        counts["reasoning_summary"] += 1
        edits["reasoning"] = edited(reasoning, {"summary": DROPPED})
    if isinstance(body.get("tools"), list):
        edits["tools"] = _tools(body["tools"], model, counts)
    edits |= _choice(body.get("tool_choice"), edits.get("tools"), model, counts)
    if isinstance(body.get("input"), list):
        items = altered(body["input"], partial(_item, model=model, counts=counts))
        edits["input"] = items if model.takes_system_anywhere else with_reminders(items, counts)
    return edited(body, edits)


def namespaced_names(body: Any) -> dict[str, dict[str, str]]:
    """The namespace and name of each tool in a namespace, by the flat name that the model uses."""
    tools = body.get("tools") if isinstance(body, dict) else None
    names: dict[str, dict[str, str]] = {}
    for tool in tools if isinstance(tools, list) else ():
        if kind_of(tool) == "namespace" and isinstance(tool.get("name"), str):
            for member in _members(tool):
                name = {"namespace": tool["name"], "name": member["name"]}
                names.setdefault(_flat(tool["name"], member["name"]), name)
    return names


def _included(name: Any, counts: Counts) -> Any:
    if not isinstance(name, str) or name in _INCLUDED:
        return name
    counts["include"] += 1
    return DROPPED


def _tools(tools: list[Any], model: Model, counts: Counts) -> list[Any]:
    """Tools that SGLang offers. A tool in a namespace is listed under its flat name."""
    tools = altered(tools, partial(_tool, model=model, counts=counts))
    if model.takes_namespaces or not any(kind_of(tool) == "namespace" for tool in tools):
        return tools
    flat: list[Any] = []
    names = {tool.get("name") for tool in tools if kind_of(tool) in _OFFERED}
    for tool in tools:
        if kind_of(tool) != "namespace" or not isinstance(tool.get("name"), str):
            flat.append(tool)
            continue
        counts["namespace_tool"] += 1
        for member in _members(tool):
            name = _flat(tool["name"], member["name"])
            if name not in names:
                names.add(name)
                flat.append(_unwrapped(tool, member, name))
    return flat


def _tool(tool: Any, model: Model, counts: Counts) -> Any:
    kind = kind_of(tool)
    if kind is None or kind in _OFFERED or kind == "namespace":
        return tool
    if model.runs_tools and kind in _BUILT_IN:
        return tool
    family = next((name for name in _SERVER_TOOLS if kind.startswith(name)), "unknown")
    counts[f"{family}_tool"] += 1
    return DROPPED


def _members(namespace: dict[str, Any]) -> Iterator[dict[str, Any]]:
    listed = namespace.get("tools")
    for member in listed if isinstance(listed, list) else ():
        if kind_of(member) in _OFFERED and isinstance(member.get("name"), str) and member["name"]:
            yield member


def _flat(namespace: str, name: str) -> str:
    return f"{namespace}__{name}"


def _unwrapped(namespace: dict[str, Any], member: dict[str, Any], name: str) -> dict[str, Any]:
    about = namespace.get("description")
    own = member.get("description")
    edits: dict[str, Any] = {"name": name}
    if isinstance(about, str) and about:
        heading = f"Namespace {namespace['name']}: {about}"
        edits["description"] = f"{heading}\n\n{own}" if isinstance(own, str) and own else heading
    return without_nulls(edited(member, edits))


def _choice(choice: Any, tools: Any, model: Model, counts: Counts) -> dict[str, Any]:
    kind = kind_of(choice)
    if kind == "allowed_tools":
        return allowed_tools(choice, tools, partial(_called, model=model), counts)
    if kind in _OFFERED and not model.takes_namespaces and "namespace" in choice:
        return {
            "tool_choice": edited(choice, {"name": _called(choice, model), "namespace": DROPPED})
        }
    if kind is not None and kind not in _OFFERED:
        counts["tool_choice"] += 1
    return {}


def _called(named: Any, model: Model) -> Any:
    """The name by which the model calls a tool that the client names."""
    if not isinstance(named, dict):
        return None
    name, namespace = named.get("name"), named.get("namespace")
    if model.takes_namespaces or not (isinstance(name, str) and isinstance(namespace, str)):
        return name
    return _flat(namespace, name)


def _item(item: Any, model: Model, counts: Counts) -> Any:
    """An item of the conversation that SGLang can render."""
    if not isinstance(item, dict):
        return item
    kind = kind_of(item)
    if not model.has_phases and item.get("phase") is not None:
        # It would separate a text from the call after it, though the model wrote both in one turn.
        counts["phase"] += 1
        item = edited(item, {"phase": DROPPED})
    if kind is None or kind in _KNOWN_ITEMS:
        return _message(item, "content", model, counts) if kind != "reasoning" else item
    if kind in _CALLS:
        if model.takes_namespaces or not isinstance(item.get("namespace"), str):
            return item
        return edited(item, {"name": _called(item, model), "namespace": DROPPED})
    if kind in _OUTPUTS:
        return _message(item, "output", model, counts)
    call_id = item.get("call_id") or item.get("id")
    if kind in _CLIENT_CALLS:
        counts[kind] += 1
        arguments = as_json(item.get(_CLIENT_CALLS[kind]) or {})
        name = kind.removesuffix("_call")
        call = {"type": "function_call", "call_id": call_id, "name": name}
        return {**call, "arguments": arguments}
    if kind.removesuffix("_output") in _CLIENT_CALLS:
        counts[kind] += 1
        output = readable(item.get("output")) or not_shown("image")
        return {"type": "function_call_output", "call_id": call_id, "output": output}
    if kind == "mcp_call":
        counts[kind] += 1
        text = f"[{item.get('name')} was called with {item.get('arguments')}]\n"
        return {"role": "assistant", "content": text + readable(item)}
    counts[kind if kind in _LEFT_OUT else "unknown_item"] += 1
    return DROPPED


def _message(item: dict[str, Any], key: str, model: Model, counts: Counts) -> dict[str, Any]:
    parts = item.get(key)
    if not isinstance(parts, list):
        return item
    return edited(item, {key: altered(parts, partial(_part, model=model, counts=counts))})


def _part(part: Any, model: Model, counts: Counts) -> Any:
    kind = kind_of(part)
    if kind is None or kind in _TEXTS:
        return part
    if kind in _MEDIA:
        if model.sees and kind != "computer_screenshot":
            return part
        counts["image" if _MEDIA[kind] == "image" else "media"] += 1
        return {"type": "input_text", "text": not_shown(_MEDIA[kind])}
    if kind == "input_file":
        counts["document"] += 1
        return {"type": "input_text", "text": not_shown("file", part.get("filename"))}
    if kind == "refusal":
        counts["refusal"] += 1
        return {"type": "output_text", "text": str(part.get("refusal"))}
    counts["unknown_part"] += 1
    text = part.get("text")
    return {"type": "input_text", "text": text} if isinstance(text, str) else DROPPED
