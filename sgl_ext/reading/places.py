"""Blocks of a body by place, and where each ends in the rendered prompt."""

import re
import secrets
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from sgl_ext.reading.protocol import INSTRUCTION_ROLES, Place, Protocol

# Access to the blocks of a body by place. No function modifies a body: edits make copies.

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


# Finds where a marked block ends in the rendered prompt.
#
# A chat template is an unknown program: it may trim a text, merge blocks, write the tools into the
# system turn or before the last user's turn, and drop an assistant's thinking. So the ends are not
# computed but observed, by rendering altered copies of the body in the way of a real request.
#
#     system "You help."  ->  "You help.#0#"  ->  <|system|>You help.#0#<|end|><|user|>Hi#1#...
#     user   "Hi "            "Hi#1# "                              ^ 0                ^ 1
#
# A block that ends with a text gets a marker after the last character that is not a space, so
# trimming has the same effect as without the marker. One copy carries all of these markers;
# without them, its rendering is the prompt. A marker is ASCII letters and digits, which no
# escaping changes.
#
# For a tool, a call, or another block without text, a copy gets a made-up neighbor after the block,
# and the block ends where the renderings of the body and of the copy diverge. They may agree on the
# text that frames any neighbor, but never beyond the neighbor's marker. For a tool, they must also
# agree with the rendering without the later tools. If a block cannot have a neighbor, the body is
# rendered without everything after the block. That is the last resort, because templates may
# treat the last turn differently: those that drop thinking do.
#
# In Anthropic's order tools precede the system prompt. So a block that ends with the system prompt
# includes the tools, even if the template writes them after it.

Render = Callable[[Any], str | None]


class Located(NamedTuple):
    """A rendered prompt and the ends of its marked blocks.

    text: the prompt; "" if it cannot be rendered.
    ends: for each place, the characters of `text` up to its block's end; None if the block
        cannot be found.
    """

    text: str
    ends: tuple[int | None, ...]


def locate(protocol: Protocol, body: Any, places: Sequence[Place], render: Render) -> Located:
    """Where the blocks at `places` end in `render(body)`. Never raises.

    `render` converts and renders a body as SGLang does for a real request; it returns None or
    raises if it cannot. It is called once, and up to twice more for each tool and for each block
    without text. Its bodies share their unchanged parts with `body`, so it must not modify them.
    """
    nothing = Located("", (None,) * len(places))
    try:
        return _Search(protocol, body, render).locate(places) or nothing
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError):
        return nothing


class _Search:
    """The rendered prompt of one body, and the renderings of its altered copies."""

    def __init__(self, protocol: Protocol, body: Any, render: Render) -> None:
        self._protocol = protocol
        self._body = body
        self._render_body = render
        self._nonce = secrets.token_hex(8)
        self._tool_ends: dict[int, int | None] = {}
        self.text = ""

    def locate(self, places: Sequence[Place]) -> Located | None:
        """The prompt and the ends of blocks; None if the body cannot be rendered."""
        paths = [text_path(self._body, place) for place in places]
        instructions = text_path(self._body, last_instruction(self._body))
        tools = value_at(self._body, ("tools",))
        covers_tools = bool(tools) and isinstance(tools, list) and instructions in paths
        first = first_text(self._body) if covers_tools and instructions is not None else None
        found = self._mark({path for path in paths if path is not None}, first)
        if found is None:
            return None
        ends, conversation_start = found
        located: list[int | None] = []
        for place, path in zip(places, paths, strict=True):
            end = self._end_by_neighbor(place) if path is None else ends.get(path)
            if conversation_start is not None and end is not None and path == instructions:
                last = self._tool_end(len(tools) - 1)
                end = last if last is not None and end < last <= conversation_start else end
            located.append(end)
        return Located(self.text, tuple(located))

    def _marker(self, number: int) -> str:
        return f"zq{self._nonce}n{number}z"

    def _render(self, body: Any) -> str:
        """The rendered body; "" if it cannot be rendered."""
        try:
            return self._render_body(body) or ""
        except Exception:
            return ""

    def _mark(
        self, paths: Iterable[Path], first: Path | None
    ) -> tuple[dict[Path, int], int | None] | None:
        """Renders with a marker after each text, and one before the text at `first`.

        Returns the markers' positions, without those that appear never or twice.
        """
        body = self._body
        marked = [(path, True) for path in paths] + ([] if first is None else [(first, False)])
        for number, (path, at_end) in enumerate(marked):
            text = _with_marker(value_at(body, path), self._marker(number), at_end)
            body = edited(body, path, text)
        rendered = self._render(body)
        if not rendered:
            return None
        pieces = re.split(rf"zq{self._nonce}n(\d+)z", rendered)
        self.text = "".join(pieces[::2])
        if self._nonce in self.text:
            return None
        seen = [int(number) for number in pieces[1::2]]
        positions = zip(seen, accumulate(map(len, pieces[::2])), strict=False)
        once = {number: at for number, at in positions if seen.count(number) == 1}
        ends = {path: once[n] for n, (path, at_end) in enumerate(marked) if at_end and n in once}
        return ends, once.get(len(marked) - 1) if first is not None else None

    def _end_by_neighbor(self, place: Place) -> int | None:
        """The end of a tool or of a block without text; None if there is no such block."""
        try:
            if value_at(self._body, path_of(place)) is None:
                return None
            if place[0] == "tools":
                return self._tool_end(int(place[1]))
            end = self._divergence(_with_neighbor(self._body, place, self._marker(0)))
            return end if end is not None or place[0] == "system" else self._end_by_cut(place)
        except (LookupError, TypeError, ValueError, AttributeError):
            return None

    def _tool_end(self, k: int) -> int | None:
        if k not in self._tool_ends:
            self._tool_ends[k] = self._find_tool_end(k)
        return self._tool_ends[k]

    def _find_tool_end(self, k: int) -> int | None:
        form = self._protocol.tool_form
        if form is None:
            return None
        tools, marker = self._body["tools"], self._marker(0)
        schema = {"type": "object", "properties": {}}
        made_up = form.write({"name": marker, "description": marker}, schema)
        end = self._divergence({**self._body, "tools": [*tools[: k + 1], made_up, *tools[k + 1 :]]})
        if end is None or k + 1 == len(tools):
            return end
        fewer = self._render({**self._body, "tools": tools[: k + 1]})
        return min(end, common_prefix(self.text, fewer)) or None

    def _divergence(self, body: Any) -> int | None:
        """Where the prompt diverges from that of a body to which the marker was added.

        None if the body cannot be rendered, or its prompt lacks the marker.
        """
        rendered = self._render(body)
        at = rendered.find(self._marker(0))
        return None if at < 0 else min(at, common_prefix(self.text, rendered))

    def _end_by_cut(self, place: Place) -> int | None:
        """Where the prompt diverges from that of a body which ends with the block."""
        turns, i, *inside = path_of(place)
        items = self._body[turns]
        last = items[int(i)]
        if inside:
            key, j = inside
            last = {**last, key: last[key][: int(j) + 1]}
        rendered = self._render({**self._body, turns: [*items[: int(i)], last]})
        shared = common_prefix(self.text, rendered)
        return shared if 0 < shared < len(self.text) else None


def common_prefix(left: Sequence[Any], right: Sequence[Any]) -> int:
    """The length of the common prefix, by bisection, because comparing slices is cheap."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _with_marker(text: str, marker: str, at_end: bool) -> str:
    """A text with a marker after its last character, or before its first, that is no space."""
    at = len(text.rstrip()) if at_end else len(text) - len(text.lstrip())
    return text[:at] + marker + text[at:]


def _with_neighbor(body: Any, place: Place, marker: str) -> Any:
    """The body with a made-up block after a block, or inside it if the block has content."""
    path = path_of(place)
    block = value_at(body, path)
    text = {"type": "input_text" if path[0] == "input" else "text", "text": marker}
    if isinstance(block, str):
        return edited(body, path, block + marker)
    is_message = path[0] == "messages" and len(path) == 2
    if is_message and block.get("tool_calls"):
        calls = block["tool_calls"]
        made_up = {**calls[-1], "function": {"name": marker, "arguments": "{}"}}
        return edited(body, path, {**block, "tool_calls": [*calls, made_up]})
    kind = block.get("type")
    if is_message or kind in ("tool_result", "search_result"):
        content = block.get("content")
        longer = [*content, text] if isinstance(content, list) else (content or "") + marker
        return edited(body, path, {**block, "content": longer})
    neighbor = {**block, "name": marker, "input": {}} if kind == "tool_use" else text
    blocks = value_at(body, path[:-1])
    k = int(path[-1]) + 1
    return edited(body, path[:-1], [*blocks[:k], neighbor, *blocks[k:]])
