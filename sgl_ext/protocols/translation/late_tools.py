"""Tools that a conversation adds and removes after its head, as text at the place of the change.

    tools [look] [paint, deferred]     the head shows `look`
    ...
    system: tool_addition of paint     `paint` is defined here; the head stays as it was
    ...
    system: tool_removal of look       a note here; the head stays as it was

So the prompt of the turn before remains a prefix. The tools are declared to SGLang as deferred: it
parses calls of them, and `sgl_ext.engine.http.rendering` keeps them out of the head.
"""

from collections.abc import Callable, Iterable
from itertools import groupby
from typing import Any

from sgl_ext.requests.canonical import is_deferred, tools_at_head
from sgl_ext.requests.protocol import Json, listed, objects
from sgl_ext.requests.rewriting import Counts, as_json, edited, kind_of, text_part

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
