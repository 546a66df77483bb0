"""Calls that a model writes as JSON objects, read piece by piece, with their arguments as written.

    <tool_call>  {"name": "look", "arguments":  {"n": 1}  }  </tool_call>
    -----------  ----------------------------  ---------  ---------------
      (start)               HEAD               ARGUMENTS     TAIL, HEAD

SGLang's parsers read the object so far and write it again as JSON. So a call that is cut off gets
an end that the model did not write, and numbers and spaces change. Here each character of the
arguments is passed on when it is read.

A call ends with its object. The end marker inside of a text is a part of the text; elsewhere it
ends the block, whatever the model left out. Words after the last object belong to no call.
"""

import json
import re
from enum import Enum, auto
from typing import Any, NamedTuple

from sgl_ext.reading.rewriting import sendable_text

_TEXT = r'"(?:[^"\\]|\\.)*"'
_HEAD = re.compile(
    rf'\{{\s*"name"\s*:\s*({_TEXT})\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\S)', re.DOTALL
)
_BETWEEN = " \t\r\n[],}"


class Part(NamedTuple):
    """A part of a call. number: of the call in its block. name: in its first part."""

    number: int
    name: str | None
    arguments: str


class _State(Enum):
    HEAD = auto()
    ARGUMENTS = auto()
    TAIL = auto()


class Value:
    """Finds the end of a JSON value. Outside of texts it also finds a marker's first character."""

    def __init__(self, stop: str) -> None:
        self._stop = stop
        self._depth = 0
        self._in_text = self._is_escaped = False
        self._is_plain: bool | None = None  # a number, true, false or null

    def read(self, text: str, begin: int = 0) -> tuple[int, bool]:
        """Where the value ends and True; or else where the marker may begin, or the text's end."""
        for at in range(begin, len(text)):
            char = text[at]
            if self._in_text:
                if self._is_escaped:
                    self._is_escaped = False
                elif char == "\\":
                    self._is_escaped = True
                elif char == '"':
                    self._in_text = False
                    if self._depth == 0:
                        return at + 1, True
                continue
            if self._is_plain is None and not char.isspace():
                self._is_plain = char not in '"{['
            if char == '"':
                self._in_text = True
            elif char == self._stop:
                return at, False
            elif self._is_plain:
                if char in ",}]" or char.isspace():
                    return at, True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return at + 1, True
        return len(text), False


class JsonCalls:
    """The calls of one block, behind its start marker.

    end: the end marker. count: how many calls have begun. is_done: the block has ended.
    is_cut: the arguments of the last call have no end. rest: what was read behind the block.
    """

    def __init__(self, end: str) -> None:
        self.end = end
        self.count = 0
        self.is_done = False
        self.rest = ""
        self._state = _State.HEAD
        self._left = ""
        self._value, self._at = Value(end[:1]), 0

    @property
    def is_cut(self) -> bool:
        """Whether the arguments of the last call have no end."""
        return self._state is _State.ARGUMENTS

    def feed(self, text: str) -> list[Part]:
        """The parts of calls that are in a piece of the block."""
        self._left += text
        found: list[Part] = []
        while not self.is_done and self._read(found):
            pass
        return found

    def _read(self, found: list[Part]) -> bool:
        """Whether there may be more to read."""
        if self._state is _State.HEAD:
            return self._read_head(found)
        if self._state is _State.ARGUMENTS:
            return self._read_arguments(found)
        return self._read_tail()

    def _read_head(self, found: list[Part]) -> bool:
        if not self._at:
            self._left = self._left.lstrip(_BETWEEN)
            if not self._left.startswith("{"):
                return self._read_end()
        if head := _HEAD.match(self._left):
            self._left = self._left[head.end() :]
            self._put(found, _name(head[1]), "")
            self._state = _State.ARGUMENTS
            self._begin_value()
            return True
        self._at, is_end = self._value.read(self._left, self._at)
        if is_end:
            written, self._left = self._left[: self._at], self._left[self._at :]
            self._begin_value()
            self._read_whole(found, written)
            return True
        behind = self._left[self._at :]
        if behind.startswith(self.end):
            return self._finish(self._at + len(self.end))
        if not self.end.startswith(behind):
            self._at += 1
            return True
        return False

    def _read_end(self) -> bool:
        """Ends the block at its marker, or before what is neither that nor a call."""
        if self._left.startswith(self.end):
            return self._finish(len(self.end))
        return False if self.end.startswith(self._left) else self._finish(0)

    def _read_whole(self, found: list[Part], written: str) -> None:
        """A call whose keys have another order."""
        try:
            call = json.loads(written, strict=False)
        except (ValueError, RecursionError):
            return
        if isinstance(call.get("name"), str):
            self._put(found, sendable_text(call["name"]), _arguments_in(written, call))

    def _read_arguments(self, found: list[Part]) -> bool:
        at, is_end = self._value.read(self._left)
        self._put(found, None, self._left[:at])
        self._left = self._left[at:]
        if is_end:
            self._state = _State.TAIL
            return True
        if self._left.startswith(self.end):  # what the model left out stays out
            return self._finish(len(self.end))
        if not self.end.startswith(self._left):
            self._put(found, None, self._left[0])
            self._left = self._left[1:]
            return True
        return False

    def _read_tail(self) -> bool:
        """Reads the rest of a call's object, which may have further keys."""
        self._left = self._left.lstrip()
        if not self._left:
            return False
        if self._left.startswith(","):
            at, is_end = Value(self.end[:1]).read("{" + self._left)
            if not is_end:
                return False
            self._left = self._left[at - 1 :]
        elif self._left.startswith("}"):
            self._left = self._left[1:]
        self._state = _State.HEAD
        self._begin_value()
        return True

    def _begin_value(self) -> None:
        self._value, self._at = Value(self.end[:1]), 0

    def _put(self, found: list[Part], name: str | None, arguments: str) -> None:
        self.count += name is not None
        if name is not None or arguments:
            found.append(Part(self.count - 1, name, arguments))

    def _finish(self, length: int) -> bool:
        self.is_done, self.rest, self._left = True, self._left[length:], ""
        return False


def _name(written: str) -> str:
    return sendable_text(str(json.loads(written, strict=False)))


def _arguments_in(written: str, call: dict[str, Any]) -> str:
    """The arguments of a whole call, as they were written."""
    for key in ("arguments", "parameters"):
        begin = re.search(rf'"{key}"\s*:\s*(?=\S)', written)
        if begin is not None and key in call:
            at, is_end = Value("").read(written, begin.end())
            if is_end:
                return written[begin.end() : at]
    return "{}"


def value_end(text: str, begin: int) -> int | None:
    """Where the object or list that begins in a text ends; None if it has no end."""
    at, is_end = Value("").read(text, begin)
    return at if is_end else None
