"""Anthropic's tools that the client runs, with their documented inputs.

A request only names such a tool, `{"type": "bash_20250124", "name": "bash"}`, because Anthropic's
models are trained on it. Any other model needs a description and a schema, as for any tool.
"""

from __future__ import annotations

import re
from typing import Any

_Description = tuple[str, dict[str, Any], tuple[str, ...]]
_DATED = re.compile(r"_\d{8}\Z")
_TEXT = {"type": "string"}
_WHOLE = {"type": "integer"}
_POINT = {"type": "array", "items": _WHOLE, "minItems": 2, "maxItems": 2}
_NEW_EDITOR = 20250429
_NEW_COMPUTER = 20250124
_ZOOM = 20251124

_BASH: _Description = (
    "Run a command in a bash session that persists between calls. `command`: the command. "
    "`restart`: true to restart the session.",
    {"command": _TEXT, "restart": {"type": "boolean"}},
    (),
)
_MEMORY: _Description = (
    "Keep notes in files below /memories, which outlast this conversation. `view` shows a "
    "folder or file, `create` writes a file, `str_replace` and `insert` edit one, `delete` and "
    "`rename` do so to a file or folder.",
    {
        "command": {
            "type": "string",
            "enum": ["view", "create", "str_replace", "insert", "delete", "rename"],
        },
        "path": _TEXT,
        "view_range": _POINT,
        "file_text": _TEXT,
        "old_str": _TEXT,
        "new_str": _TEXT,
        "insert_line": _WHOLE,
        "insert_text": _TEXT,
        "old_path": _TEXT,
        "new_path": _TEXT,
    },
    ("command",),
)
_CLICKS = ["left_click", "right_click", "middle_click", "double_click", "mouse_move"]
_ACTIONS = ["screenshot", "cursor_position", "key", "type", *_CLICKS, "left_click_drag"]
_MORE_ACTIONS = ["triple_click", "left_mouse_down", "left_mouse_up", "scroll", "hold_key", "wait"]


def plain_tool(tool: dict[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """The tool's family, and the tool in the form of a custom tool; None if it is no such tool."""
    kind = tool["type"]
    found = _DATED.search(kind)
    family = kind[: found.start()] if found else ""
    version = int(found[0][1:]) if found else 0
    if family == "bash":
        described = _BASH
    elif family == "memory":
        described = _MEMORY
    elif family == "text_editor":
        described = _editor(version)
    elif family == "computer":
        described = _computer(version, tool)
    else:
        return None
    description, properties, required = described
    schema = {"type": "object", "properties": properties, "required": list(required)}
    plain = {"name": tool.get("name") or family, "description": description}
    others = {key: tool[key] for key in tool.keys() & {"cache_control", "defer_loading"}}
    return family, {**plain, "input_schema": schema, **others}


def _editor(version: int) -> _Description:
    commands = ["view", "create", "str_replace", "insert"]
    inserted = "insert_text" if version >= _NEW_EDITOR else "new_str"
    undo = "" if version >= _NEW_EDITOR else " `undo_edit` takes the last edit of `path` back."
    description = (
        "View and edit text files. `view` shows a file, or its lines in `view_range`, or a "
        "folder. `create` writes `file_text` to `path`. `str_replace` puts `new_str` in the one "
        f"place where `old_str` stands. `insert` puts `{inserted}` after line `insert_line`."
    )
    properties = {
        "command": {"type": "string", "enum": commands if not undo else [*commands, "undo_edit"]},
        "path": _TEXT,
        "view_range": _POINT,
        "file_text": _TEXT,
        "old_str": _TEXT,
        "new_str": _TEXT,
        "insert_line": _WHOLE,
        inserted: _TEXT,
    }
    return description + undo, properties, ("command", "path")


def _computer(version: int, tool: dict[str, Any]) -> _Description:
    actions, more = [*_ACTIONS], {}
    if version >= _NEW_COMPUTER:
        actions += _MORE_ACTIONS
        more = {
            "start_coordinate": _POINT,
            "scroll_direction": {"type": "string", "enum": ["up", "down", "left", "right"]},
            "scroll_amount": _WHOLE,
            "duration": {"type": "number"},
        }
    if version >= _ZOOM and tool.get("enable_zoom"):
        actions.append("zoom")
        more["region"] = {**_POINT, "minItems": 4, "maxItems": 4}
    width, height = tool.get("display_width_px"), tool.get("display_height_px")
    description = (
        "Use a screen, a keyboard and a mouse. `text` is what `type` types, or the keys of `key`."
    )
    if isinstance(width, int) and isinstance(height, int):
        description += f" The screen is {width} x {height} pixels."
    properties = {
        "action": {"type": "string", "enum": actions},
        "coordinate": _POINT,
        "text": _TEXT,
        **more,
    }
    return description, properties, ("action",)
