"""Access to the blocks of a body by place. No function modifies a body: edits make copies."""

from typing import Any

from sgl_ext.requests.protocol import INSTRUCTION_ROLES, Place

Path = tuple[str | int, ...]
"""The keys and indices that lead to a value in a body."""
TURNS = ("messages", "input")
"""The fields that can hold a conversation."""


def last_text(body: Any, place: Place) -> str | None:
    """The text with which the block at `place` ends; None if it does not end with one, or if it is
    not the last block of the body."""
    path = path_of(place)
    if path[0] not in TURNS or path[1] != len(body[path[0]]) - 1:
        return None
    if len(path) > 2 and path[-1] != len(value_at(body, path[:-1])) - 1:
        return None
    text = text_path(body, place)
    return None if text is None else str(value_at(body, text))


def path_of(place: Place) -> Path:
    """The path of the block at a place."""
    if len(place) > 2 and place[0] == "messages":
        return (*place[:2], "content", *place[2:])
    return place


def value_at(body: Any, path: Path) -> Any:
    """The value at a path; None if there is none."""
    for key in path:
        if isinstance(body, dict):
            body = body.get(key)
        elif isinstance(body, list) and isinstance(key, int) and 0 <= key < len(body):
            body = body[key]
        else:
            return None
    return body


def edited(holder: Any, path: Path, value: Any) -> Any:
    """A copy with another value at `path`; it shares everything that is not on the path."""
    if not path:
        return value
    copy: Any = holder.copy()
    copy[path[0]] = edited(holder[path[0]], path[1:], value)
    return copy


def text_path(body: Any, place: Place) -> Path | None:
    """The path of the text with which a block ends; None if it does not end with one."""
    if not place or place[0] == "tools":
        return None
    path = path_of(place)
    while True:
        block = value_at(body, path)
        if isinstance(block, str):
            return path if block.strip() else None
        if isinstance(block, list):
            path = (*path, len(block) - 1)
        elif not isinstance(block, dict) or block.get("tool_calls"):
            return None
        else:
            path = (*path, "text" if isinstance(block.get("text"), str) else "content")


def last_instruction(body: Any) -> Place:
    """The last block of the instructions that precede the conversation."""
    count = _instructions(body)
    if count:
        return (_turns(body), count - 1)
    field = "instructions" if _turns(body) == "input" else "system"
    system = value_at(body, (field,))
    return (field, len(system) - 1) if isinstance(system, list) else (field,)


def first_text(body: Any) -> Path | None:
    """The path of the first text in the conversation's first message; None if it has none."""
    turns, i = _turns(body), _instructions(body)
    content = value_at(body, (turns, i, "content"))
    places: list[Place] = [(turns, i)]
    if isinstance(content, list):
        between = ("content",) if turns == "input" else ()
        places = [(turns, i, *between, j) for j in range(len(content))]
    return next((path for each in places if (path := text_path(body, each))), None)


def _turns(body: Any) -> str:
    """The field that holds the body's conversation."""
    return "input" if isinstance(value_at(body, ("input",)), list) else "messages"


def _instructions(body: Any) -> int:
    """How many messages at the beginning are instructions."""
    count = 0
    while value_at(body, (_turns(body), count, "role")) in INSTRUCTION_ROLES:
        count += 1
    return count
