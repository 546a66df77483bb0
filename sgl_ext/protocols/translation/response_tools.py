"""The tools of `/v1/responses` as SGLang can offer them: flat, and none that runs at OpenAI."""

from collections.abc import Iterator
from functools import partial
from itertools import chain
from typing import Any

from sgl_ext.requests.canonical import are_searched, is_deferred
from sgl_ext.requests.protocol import Json, Model, listed, objects
from sgl_ext.requests.rewriting import (
    DROPPED,
    Counts,
    edited,
    family_of,
    kind_of,
    with_items,
    without_nulls,
)

OFFERED = ("function", "custom")
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


def with_offered_tools(holder: Json, model: Model, counts: Counts) -> Json:
    """A body, or an item that brings tools along, with the tools that SGLang can offer."""
    are_shown = are_searched(listed(holder.get("tools"))) and not model.defers_tools
    holder = with_items(holder, "tools", partial(_tool, model=model, counts=counts))
    if not model.takes_namespaces:
        holder = _with_flat_tools(holder, counts)
    return with_items(holder, "tools", partial(_undeferred, counts=counts)) if are_shown else holder


def tools_of_item(item: Json, model: Model, counts: Counts) -> list[Json]:
    """The tools that an item brings along, each with a name."""
    tools = objects(with_offered_tools({"tools": item.get("tools")}, model, counts)["tools"])
    return [
        tool for tool in tools if kind_of(tool) in OFFERED and isinstance(tool.get("name"), str)
    ]


def namespaced_names(body: Any) -> dict[str, dict[str, str]]:
    """The namespace and name of each tool in a namespace, by the flat name that the model uses."""
    names: dict[str, dict[str, str]] = {}
    holders = [body, *objects(body.get("input"))] if isinstance(body, dict) else []
    for tool in chain.from_iterable(listed(holder.get("tools")) for holder in holders):
        for member in _members(tool):
            name = {"namespace": tool["name"], "name": member["name"]}
            names.setdefault(flat_name(tool["name"], member["name"]), name)
    return names


def _with_flat_tools(body: Json, counts: Counts) -> Json:
    """A request in which tools of a namespace are listed under their flat names."""
    tools = listed(body.get("tools"))
    if not any(map(_is_namespace, tools)):
        return body
    flat: list[Any] = []
    names = {tool.get("name") for tool in tools if kind_of(tool) in OFFERED}
    for tool in tools:
        if not _is_namespace(tool):
            flat.append(tool)
            continue
        counts["namespace_tool"] += 1
        for member in _members(tool):
            name = flat_name(tool["name"], member["name"])
            if name not in names:
                names.add(name)
                flat.append(_unwrapped(tool, member, name))
    return edited(body, {"tools": flat})


def _tool(tool: Any, model: Model, counts: Counts) -> Any:
    kind = kind_of(tool)
    if kind is None or kind in OFFERED or kind == "namespace":
        return tool
    if model.runs_tools and kind in _BUILT_IN:
        return tool
    counts[f"{family_of(kind, _SERVER_TOOLS)}_tool"] += 1
    return DROPPED


def _undeferred(tool: Any, counts: Counts) -> Any:
    """A tool that is offered at once, because no server here searches for it."""
    if not is_deferred(tool):
        return tool
    counts["defer_loading"] += 1
    return edited(tool, {"defer_loading": DROPPED})


def _is_namespace(tool: Any) -> bool:
    return kind_of(tool) == "namespace" and isinstance(tool.get("name"), str)


def _members(tool: Any) -> Iterator[Json]:
    """The tools of a namespace; none if the tool is no namespace."""
    for member in listed(tool.get("tools")) if _is_namespace(tool) else ():
        if kind_of(member) in OFFERED and isinstance(member.get("name"), str) and member["name"]:
            yield member


def flat_name(namespace: str, name: str) -> str:
    return f"{namespace}__{name}"


def _unwrapped(namespace: Json, member: Json, name: str) -> Json:
    about = namespace.get("description")
    own = member.get("description")
    edits: Json = {"name": name}
    if isinstance(about, str) and about:
        heading = f"Namespace {namespace['name']}: {about}"
        edits["description"] = f"{heading}\n\n{own}" if isinstance(own, str) and own else heading
    return without_nulls(edited(member, edits))
