"""Where a marked block ends in the rendered prompt.

A chat template is a program that nobody here knows: it may trim a text, merge blocks, write
the tools into the system turn or before the last user's, and drop what an assistant thought.
So the ends are not computed but observed, by rendering altered copies of the body in the
very way of a real request.

    system "You help."  ->  "You help.#0#"  ->  <|system|>You help.#0#<|end|><|user|>Hi#1#...
    user   "Hi "            "Hi#1# "                              ^ 0                ^ 1

A text gets a marker behind its last character that is no space, so trimming does what it
would do without. All of these go into one copy; without its markers its rendering is the
prompt. A marker is ASCII letters and digits, which no escaping changes.

Where there is no text to mark, a made-up neighbor is added behind the block, a tool behind
a tool and a call behind a call, and the block ends where the two renderings part. They may
agree in what frames any neighbor, hence never further than to the neighbor's marker, and for a
tool no further than where the rendering without the later tools parts as well. For other
blocks the rendering of a body that was cut behind the block is only the resort: a
template may treat the last turn of a conversation differently, and does where it drops thoughts.

In Anthropic's order tools precede the system prompt, so what ends with the system prompt
has the tools, too, even where a template writes them behind it.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sgl_ext.requests.protocol import INSTRUCTION_ROLES, Place

Render = Callable[[Any], str | None]
_Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Located:
    """A rendered prompt and where its marked blocks end.

    text: the prompt; "" if it cannot be rendered.
    ends: for each place the characters of `text` up to its block's end; None if the block
        cannot be found in it.
    """

    text: str
    ends: tuple[int | None, ...]


def locate(body: Any, places: Sequence[Place], render: Render) -> Located:
    """Where the blocks at `places` end in `render(body)`. Never raises.

    `render` converts and renders a body as a real request's and returns None, or raises, if
    it cannot. It is called once, and up to twice more for each tool and each block without
    text. The bodies it gets share what is unchanged with `body`: it must not alter them.
    """
    nothing = Located("", (None,) * len(places))
    try:
        search = _Search(body, render)
        ends = search.ends(places)
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError):
        return nothing
    return nothing if ends is None else Located(search.text, tuple(ends))


def block_at(body: Any, place: Place) -> Any:
    """What stands at `place`; None if nothing does."""
    return _at(body, _path(place))


def text_of(body: Any, place: Place) -> str | None:
    """The text that the block at `place` ends with, None if it has none."""
    try:
        path = _text_path(body, place)
    except (LookupError, TypeError, ValueError, AttributeError):
        return None
    found = None if path is None else _at(body, path)
    return found if isinstance(found, str) else None


def is_last(body: Any, place: Place) -> bool:
    """Whether nothing of the body comes behind the block at `place`."""
    messages = body.get("messages")
    if place[0] != "messages" or place[1] != len(messages) - 1:
        return False
    return len(place) == 2 or place[2] == len(messages[-1]["content"]) - 1


class _Search:
    """The rendered prompt of one body, and what its altered copies tell about it."""

    def __init__(self, body: Any, render: Render) -> None:
        self._body = body
        self._render_body = render
        self._nonce = secrets.token_hex(8)
        self._tool_ends: dict[int, int | None] = {}
        self.text = ""

    def ends(self, places: Sequence[Place]) -> list[int | None] | None:
        """The ends of blocks; None if the body cannot be rendered."""
        paths = [_text_path(self._body, place) for place in places]
        instructed = _text_path(self._body, _last_instruction(self._body))
        tools = _at(self._body, ("tools",))
        covers = bool(tools) and isinstance(tools, list) and instructed in paths
        first = _first_text(self._body) if covers and instructed is not None else None
        found = self._mark({path for path in paths if path is not None}, first)
        if found is None:
            return None
        ends, begin = found
        located: list[int | None] = []
        for place, path in zip(places, paths, strict=True):
            end = self._probed(place) if path is None else ends.get(path)
            if begin is not None and end is not None and path == instructed:
                last = self._tool_end(len(tools) - 1)
                end = last if last is not None and end < last <= begin else end
            located.append(end)
        return located

    def _marker(self, number: int) -> str:
        return f"zq{self._nonce}n{number}z"

    def _render(self, body: Any) -> str | None:
        try:
            text = self._render_body(body)
        except Exception:
            return None
        return text if isinstance(text, str) else None

    def _mark(
        self, paths: Iterable[_Path], first: _Path | None
    ) -> tuple[dict[_Path, int], int | None] | None:
        """Renders with a marker behind each text, and one before the text at `first`.

        Returns where they stand; one that stands nowhere, or twice, is left out.
        """
        body = self._body
        numbered = list(paths)
        for number, path in enumerate(numbered):
            body = _edited(body, path, _behind_text(_at(body, path), self._marker(number)))
        if first is not None:
            body = _edited(body, first, _before_text(_at(body, first), self._marker(len(numbered))))
        rendered = self._render(body)
        if rendered is None:
            return None
        self.text, positions = _without(rendered, re.compile(rf"zq{self._nonce}n(\d+)z"))
        if self._nonce in self.text:
            return None
        once = {number: seen[0] for number, seen in positions.items() if len(seen) == 1}
        ends = {path: once[number] for number, path in enumerate(numbered) if number in once}
        return ends, once.get(len(numbered))

    def _probed(self, place: Place) -> int | None:
        """The end of a tool or of a block without text; None for what is not there."""
        try:
            if _at(self._body, _path(place)) is None:
                return None
            if place[0] == "tools":
                return self._tool_end(int(place[1]))
            end = self._parting(_with_neighbor(self._body, place, self._marker(0)))
            return end if end is not None or place[0] == "system" else self._cut_behind(place)
        except (LookupError, TypeError, ValueError, AttributeError):
            return None

    def _tool_end(self, k: int) -> int | None:
        if k not in self._tool_ends:
            self._tool_ends[k] = self._find_tool_end(k)
        return self._tool_ends[k]

    def _find_tool_end(self, k: int) -> int | None:
        tools = self._body["tools"]
        made_up = _made_up_tool(tools[k], self._marker(0))
        end = self._parting({**self._body, "tools": [*tools[: k + 1], made_up, *tools[k + 1 :]]})
        if end is None or k + 1 == len(tools):
            return end
        fewer = self._render({**self._body, "tools": tools[: k + 1]})
        return None if fewer is None else min(end, shared_chars(self.text, fewer))

    def _parting(self, body: Any) -> int | None:
        """How far the prompt agrees with that of a body to which the marker was added.

        None if the body cannot be rendered or the marker is not in its prompt.
        """
        rendered = self._render(body)
        at = -1 if rendered is None else rendered.find(self._marker(0))
        return None if rendered is None or at < 0 else min(at, shared_chars(self.text, rendered))

    def _cut_behind(self, place: Place) -> int | None:
        """How far the prompt agrees with that of a body which ends with the block."""
        messages = self._body["messages"]
        i = int(place[1])
        last = messages[i]
        if len(place) > 2:
            last = {**last, "content": last["content"][: int(place[2]) + 1]}
        rendered = self._render({**self._body, "messages": [*messages[:i], last]})
        shared = 0 if rendered is None else shared_chars(self.text, rendered)
        return shared if 0 < shared < len(self.text) else None


def shared_chars(left: str, right: str) -> int:
    """How many characters two texts begin with in common."""
    low, high = 0, min(len(left), len(right))
    if left[:high] == right[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle
    return low


def _without(rendered: str, marker: re.Pattern[str]) -> tuple[str, dict[int, list[int]]]:
    """A text without its markers, and where in that each number stood."""
    parts: list[str] = []
    positions: dict[int, list[int]] = {}
    start = size = 0
    for match in marker.finditer(rendered):
        parts.append(rendered[start : match.start()])
        size += match.start() - start
        positions.setdefault(int(match[1]), []).append(size)
        start = match.end()
    parts.append(rendered[start:])
    return "".join(parts), positions


def _behind_text(text: str, marker: str) -> str:
    size = len(text.rstrip())
    return text[:size] + marker + text[size:]


def _before_text(text: str, marker: str) -> str:
    size = len(text) - len(text.lstrip())
    return text[:size] + marker + text[size:]


def _path(place: Place) -> _Path:
    """The keys that lead to a place in the body."""
    if len(place) > 2 and place[0] == "messages":
        return (*place[:2], "content", *place[2:])
    return place


def _at(body: Any, path: _Path) -> Any:
    """What stands at a path; None if nothing does."""
    for key in path:
        if isinstance(body, dict):
            body = body.get(key)
        elif isinstance(body, list) and isinstance(key, int) and 0 <= key < len(body):
            body = body[key]
        else:
            return None
    return body


def _edited(holder: Any, path: _Path, value: Any) -> Any:
    """A copy with another value at `path`; what is not on the path is shared."""
    if not path:
        return value
    copy: Any = holder.copy()
    copy[path[0]] = _edited(holder[path[0]], path[1:], value)
    return copy


def _text_path(body: Any, place: Place) -> _Path | None:
    """Where the text stands with which a block ends; None if it does not end with one."""
    if not place or place[0] == "tools":
        return None
    path = _path(place)
    while True:
        block = _at(body, path)
        if isinstance(block, str):
            return path if block.strip() else None
        if isinstance(block, list):
            path = (*path, len(block) - 1)
        elif not isinstance(block, dict) or block.get("tool_calls"):
            return None
        else:
            path = (*path, "text" if isinstance(block.get("text"), str) else "content")


def _last_instruction(body: Any) -> Place:
    """The last block of what instructs in front of the conversation."""
    count = _instructions(body)
    if count:
        return ("messages", count - 1)
    system = _at(body, ("system",))
    return ("system", len(system) - 1) if isinstance(system, list) else ("system",)


def _instructions(body: Any) -> int:
    """How many messages at the beginning instruct."""
    count = 0
    while _at(body, ("messages", count, "role")) in INSTRUCTION_ROLES:
        count += 1
    return count


def _first_text(body: Any) -> _Path | None:
    """Where the first text of the conversation stands, if its first message has any."""
    i = _instructions(body)
    content = _at(body, ("messages", i, "content"))
    places: list[Place] = [("messages", i)]
    if isinstance(content, list):
        places = [("messages", i, j) for j in range(len(content))]
    return next((path for each in places if (path := _text_path(body, each))), None)


def _made_up_tool(tool: Any, marker: str) -> dict[str, Any]:
    """A tool in the form of `tool`; its name and its description are the marker."""
    schema = {"type": "object", "properties": {}}
    if isinstance(tool, dict) and isinstance(tool.get("function"), dict):
        function = {"name": marker, "description": marker, "parameters": schema}
        return {"type": "function", "function": function}
    return {"name": marker, "description": marker, "input_schema": schema}


def _with_neighbor(body: Any, place: Place, marker: str) -> Any:
    """The body with something made up behind a block; in it where the block has content."""
    path = _path(place)
    block = _at(body, path)
    text = {"type": "text", "text": marker}
    if isinstance(block, str):
        return _edited(body, path, block + marker)
    if len(path) == 2 and path[0] == "messages" and block.get("tool_calls"):
        return _edited(body, path, _with_call(block, marker))
    kind = block.get("type")
    if (path[0] == "messages" and len(path) == 2) or kind in ("tool_result", "search_result"):
        content = block.get("content")
        grown = [*content, text] if isinstance(content, list) else (content or "") + marker
        return _edited(body, path, {**block, "content": grown})
    added = {**block, "name": marker, "input": {}} if kind == "tool_use" else text
    siblings = _at(body, path[:-1])
    k = int(path[-1]) + 1
    return _edited(body, path[:-1], [*siblings[:k], added, *siblings[k:]])


def _with_call(message: dict[str, Any], marker: str) -> dict[str, Any]:
    calls = message["tool_calls"]
    made_up = {**calls[-1], "function": {"name": marker, "arguments": "{}"}}
    return {**message, "tool_calls": [*calls, made_up]}
