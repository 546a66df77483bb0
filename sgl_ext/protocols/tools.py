"""Tools as clients declare, choose and change them, in the form that SGLang can offer."""

import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain, groupby
from typing import Any

from sgl_ext.reading.protocol import Json, Model, listed, objects
from sgl_ext.reading.rewriting import (
    DROPPED,
    Counts,
    as_json,
    edited,
    family_of,
    kind_of,
    text_part,
    with_items,
    without_nulls,
)
from sgl_ext.reading.segments import are_searched, is_deferred, tools_at_head

# Anthropic's tools that the client runs, with their documented inputs.
#
# A request only names such a tool, `{"type": "bash_20250124", "name": "bash"}`, because Anthropic's
# models are trained on it. Any other model needs a description and a schema, as for any tool.

_Description = tuple[str, Json, list[str]]
_DATE = re.compile(r"\d{8}")
_TEXT = {"type": "string"}
_WHOLE = {"type": "integer"}
_POINT = {"type": "array", "items": _WHOLE, "minItems": 2, "maxItems": 2}
_NEW_EDITOR = 20250429
_NEW_COMPUTER = 20250124
_ZOOM = 20251124

_FILE = {
    "path": _TEXT,
    "view_range": _POINT,
    "file_text": _TEXT,
    "old_str": _TEXT,
    "new_str": _TEXT,
    "insert_line": _WHOLE,
}
_COMMANDS = ["view", "create", "str_replace", "insert"]
_CLICKS = ["left_click", "right_click", "middle_click", "double_click", "mouse_move"]
_ACTIONS = ["screenshot", "cursor_position", "key", "type", *_CLICKS, "left_click_drag"]
_MORE_ACTIONS = ["triple_click", "left_mouse_down", "left_mouse_up", "scroll", "hold_key", "wait"]


def plain_tool(tool: Json) -> tuple[str, Json] | None:
    """The tool's family, and the tool in the form of a custom tool; None if it is no such tool."""
    family, _, version = tool["type"].rpartition("_")
    if family not in _FAMILIES or not _DATE.fullmatch(version):
        return None
    description, properties, required = _FAMILIES[family](int(version), tool)
    schema = {"type": "object", "properties": properties, "required": required}
    plain = {"name": tool.get("name") or family, "description": description}
    others = {key: tool[key] for key in tool.keys() & {"cache_control", "defer_loading"}}
    return family, {**plain, "input_schema": schema, **others}


def _one_of(values: list[str]) -> Json:
    return {"type": "string", "enum": values}


def _bash(version: int, tool: Json) -> _Description:
    description = (
        "Run a command in a bash session that persists between calls. `command`: the command. "
        "`restart`: true to restart the session."
    )
    return description, {"command": _TEXT, "restart": {"type": "boolean"}}, []


def _memory(version: int, tool: Json) -> _Description:
    description = (
        "Keep notes in files below /memories, which outlast this conversation. `view` shows a "
        "folder or file, `create` writes a file, `str_replace` and `insert` edit one, `delete` and "
        "`rename` do so to a file or folder."
    )
    paths = {"insert_text": _TEXT, "old_path": _TEXT, "new_path": _TEXT}
    commands = _one_of([*_COMMANDS, "delete", "rename"])
    return description, {"command": commands, **_FILE, **paths}, ["command"]


def _editor(version: int, tool: Json) -> _Description:
    is_new = version >= _NEW_EDITOR
    inserted = "insert_text" if is_new else "new_str"
    description = (
        "View and edit text files. `view` shows a file, or its lines in `view_range`, or a "
        "folder. `create` writes `file_text` to `path`. `str_replace` puts `new_str` in the one "
        f"place where `old_str` stands. `insert` puts `{inserted}` after line `insert_line`."
    )
    if not is_new:
        description += " `undo_edit` takes the last edit of `path` back."
    commands = _one_of(_COMMANDS if is_new else [*_COMMANDS, "undo_edit"])
    return description, {"command": commands, **_FILE, inserted: _TEXT}, ["command", "path"]


def _computer(version: int, tool: Json) -> _Description:
    actions, more = [*_ACTIONS], {}
    if version >= _NEW_COMPUTER:
        actions += _MORE_ACTIONS
        more = {
            "start_coordinate": _POINT,
            "scroll_direction": _one_of(["up", "down", "left", "right"]),
            "scroll_amount": _WHOLE,
            "duration": {"type": "number"},
        }
    if version >= _ZOOM and tool.get("enable_zoom"):
        actions.append("zoom")
        more["region"] = {**_POINT, "minItems": 4, "maxItems": 4}
    description = (
        "Use a screen, a keyboard and a mouse. `text` is what `type` types, or the keys of `key`."
    )
    width, height = tool.get("display_width_px"), tool.get("display_height_px")
    if isinstance(width, int) and isinstance(height, int):
        description += f" The screen is {width} x {height} pixels."
    properties = {"action": _one_of(actions), "coordinate": _POINT, "text": _TEXT, **more}
    return description, properties, ["action"]


_FAMILIES: dict[str, Callable[[int, Json], _Description]] = {
    "bash": _bash,
    "memory": _memory,
    "text_editor": _editor,
    "computer": _computer,
}


# Tools that a conversation adds and removes after its head, as text at the place of the change.
#
#     tools [look] [paint, deferred]     the head shows `look`
#     ...
#     system: tool_addition of paint     `paint` is defined here; the head stays as it was
#     ...
#     system: tool_removal of look       a note here; the head stays as it was
#
# So the prompt of the turn before remains a prefix. The tools are declared to SGLang as deferred:
# it parses calls of them, and `sgl_ext.engine.http.rendering` keeps them out of the head.

ADDITION, REMOVAL, REFERENCE = "tool_addition", "tool_removal", "tool_reference"
_INPUT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


class LateTools:
    """What the prompt of one request has said of its tools, up to the message that is translated.

    translate: makes a tool that SGLang can offer of an inline definition; DROPPED if none can run.
    added: tools that messages define, in the protocol's form and marked as deferred, by name.
    """

    def __init__(
        self, tools: Any, counts: Counts, translate: Callable[[Json], Any] = lambda tool: tool
    ) -> None:
        self._tools = listed(tools)
        self._counts = counts
        self._translate = translate
        self._shown: set[Any] | None = None  # by name; read when it is needed
        self._removed: set[str] = set()
        self.added: dict[str, Json] = {}

    def with_definitions(self, message: Json) -> Json:
        """A tool's result in which the tools that it refers to are defined."""
        content = message.get("content")
        if not isinstance(content, list) or not any(map(_is_reference, content)):
            return message
        parts: list[Any] = []
        for are_references, group in groupby(content, _is_reference):
            run = list(group)
            parts += [text_part(self.refer(run))] if are_references else run
        return edited(message, {"content": parts})

    def refer(self, references: list[Json]) -> str:
        """The definitions of tools that are loaded by name, each once in a conversation."""
        self._counts[REFERENCE] += len(references)
        new, notes = list[Json](), list[str]()
        for reference in references:
            name = reference.get("tool_name") or reference.get("name")  # the latter is SGLang's
            tool = self._find(name)
            if tool is None:
                notes.append(_unknown(name))
            elif name in self._names_shown():
                notes.append(f"The tool {name} is already defined.")
            else:
                self._names_shown().add(name)
                new.append(tool)
        return "\n".join([*([_written(new)] if new else []), *notes])

    def change(self, block: Json) -> str:
        """The text of a `tool_addition` or `tool_removal`; "" if it names no tool."""
        kind, changed = block.get("type"), block.get("tool")
        self._counts[ADDITION if kind == ADDITION else REMOVAL] += 1
        name = _name_of(changed)
        if kind == ADDITION and kind_of(changed) == "tool_definition" and name is not None:
            tool = self._translate(block["tool"]["definition"])
            return self.define([tool]) if isinstance(tool, dict) else _unknown(name)
        if kind_of(changed) != REFERENCE:  # tools of MCP servers, which no engine calls
            return _unknown(name)
        return self._add(name) if kind == ADDITION else self._remove(name)

    def define(self, tools: list[Json]) -> str:
        """The text of a message that brings tools along. Each has a name."""
        new, notes = list[Json](), list[str]()
        for tool in tools:
            function, known = _function_of(tool), self._find(_function_of(tool)["name"])
            name = str(function["name"])
            if known is None or _function_of(known) != function:
                self.added[name] = {**tool, "defer_loading": True}
            elif name in self._names_shown():
                notes.append(self._add(name))
                continue
            self._names_shown().add(name)
            self._removed.discard(name)
            new.append(tool)
        return "\n".join([*([_available(new)] if new else []), *notes])

    def with_added(self, tools: Any) -> list[Any]:
        """The tools to declare: those given, and those that messages define."""
        given = [tool for tool in listed(tools) if not self._is_replaced(tool)]
        return [*given, *self.added.values()]

    def _is_replaced(self, tool: Any) -> bool:
        return is_deferred(tool) and _function_of(tool)["name"] in self.added

    def _add(self, name: str | None) -> str:
        tool = self._find(name)
        if tool is None or name is None:
            return _unknown(name)
        if name not in self._names_shown():
            self._names_shown().add(name)
            return _available([tool])
        again = " again" if name in self._removed else ""
        self._removed.discard(name)
        return f"The tool {name} is available{again}."

    def _remove(self, name: str | None) -> str:
        if self._find(name) is None or name is None:
            return _unknown(name)
        self._removed.add(name)
        return f"The tool {name} is no longer available. Do not call it."

    def _names_shown(self) -> set[Any]:
        if self._shown is None:
            self._shown = {_function_of(tool)["name"] for tool in tools_at_head(self._tools)}
        return self._shown

    def _find(self, name: Any) -> Json | None:
        if not isinstance(name, str) or not name:
            return None
        found = (tool for tool in objects(self._tools) if _function_of(tool)["name"] == name)
        return self.added.get(name) or next(found, None)


def withdrawn_tools(messages: Any) -> frozenset[str]:
    """The tools that system messages have removed by the end of a conversation."""
    removed: set[str] = set()
    for message in listed(messages):
        if isinstance(message, dict) and message.get("role") == "system":
            for block in objects(message.get("content")):
                kind, name = block.get("type"), _name_of(block.get("tool"))
                if name and kind in (ADDITION, REMOVAL):
                    (removed.add if kind == REMOVAL else removed.discard)(name)
    return frozenset(removed)


def _name_of(changed: Any) -> str | None:
    """The name of the tool, or of the server, that a change is about."""
    if not isinstance(changed, dict):
        return None
    holder = changed.get("definition") if changed.get("type") == "tool_definition" else changed
    name = holder.get("name", holder.get("server_name")) if isinstance(holder, dict) else None
    return name if isinstance(name, str) else None


def _function_of(tool: Any) -> Json:
    """A tool's name, description and parameters, from any protocol's form."""
    inner = tool.get("function") if isinstance(tool, dict) else None
    function = inner if isinstance(inner, dict) else tool if isinstance(tool, dict) else {}
    schema = function.get("input_schema", function.get("parameters"))
    if schema is None:
        schema = _INPUT if function.get("type") == "custom" else {"type": "object"}
    name = function.get("name")
    return {
        "description": function.get("description") or "",
        "name": name if isinstance(name, str) else None,
        "parameters": schema,
    }


def _written(tools: Iterable[Json]) -> str:
    """Definitions as Claude Code's `ToolSearch` announces them to the model."""
    lines = [f"<function>{as_json(_function_of(tool))}</function>" for tool in tools]
    return "\n".join(["<functions>", *lines, "</functions>"])


def _available(tools: list[Json]) -> str:
    return f"These tools are available from now on:\n{_written(tools)}"


def _unknown(name: Any) -> str:
    return f"The tool {name} is not available." if isinstance(name, str) else ""


def _is_reference(block: Any) -> bool:
    return kind_of(block) == REFERENCE


# The tools of `/v1/responses` as SGLang can offer them: flat, and none that runs at OpenAI.

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


# Lists of allowed tools in `tool_choice`, as OpenAI's protocols have them.
#
# SGLang knows no such list. Its `mode` says whether a tool must be called. The rest goes into the
# answer's grammar, or into the prompt, if that has only tools that may be called.


def with_allowed_tools(body: Json, model: Model, counts: Counts) -> Json:
    """A request whose choice is the mode of its list of allowed tools.

    It has only the allowed tools if the model keeps no others, or if the list has none of them.
    """
    allowed, tools = _list(body["tool_choice"]), body.get("tools")
    counts["allowed_tools"] += 1
    edits: Json = {"tool_choice": "required" if allowed.get("mode") == "required" else "auto"}
    names = allowed_names(body, model)
    if names is not None and isinstance(tools, list):
        left = [tool for tool in tools if called_name(tool, model) in names]
        if not left or not model.keeps_tools:
            edits["tools"] = left
    return edited(body, edits)


def allowed_names(body: Any, model: Model) -> frozenset[Any] | None:
    """The names of the tools that a request allows, as the model calls them; None: any tool."""
    choice = body.get("tool_choice") if isinstance(body, dict) else None
    if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
        return None
    listed = _list(choice).get("tools")
    if not isinstance(listed, list):
        return None
    names = (called_name(tool, model) for tool in listed)
    return frozenset(name for name in names if isinstance(name, str))


def called_name(tool: Any, model: Model) -> Any:
    """The name by which the model calls a tool that the client names, or declares."""
    if not isinstance(tool, dict):
        return None
    tool = tool["function"] if isinstance(tool.get("function"), dict) else tool
    name, namespace = tool.get("name"), tool.get("namespace")
    if model.takes_namespaces or not (isinstance(name, str) and isinstance(namespace, str)):
        return name
    return flat_name(namespace, name)


def _list(choice: Json) -> Json:
    """Chat completions nest the list, responses do not."""
    inner = choice.get("allowed_tools")
    return inner if isinstance(inner, dict) else choice
