"""Anthropic's tools that the client runs, with their documented inputs.

A request only names such a tool, `{"type": "bash_20250124", "name": "bash"}`, because Anthropic's
models are trained on it. Any other model needs a description and a schema, as for any tool.
"""

import re
from collections.abc import Callable

from sgl_ext.requests.protocol import Json

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
