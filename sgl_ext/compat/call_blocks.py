"""An answer as words and blocks of calls, in the order in which the model wrote them.

    One. <tool_call> {...} </tool_call> Between. <tool_call> {...} </tool_call> After.
    ---- ------------------------------ -------- ------------------------------ ------
    words            block               words              block               words

SGLang's parsers read a whole answer, and lose the words that stand between its calls and after
them. Here the blocks are found by their markers, and the words are passed on. A block is read by
`JsonCalls` if its calls are JSON objects, otherwise by a parser of SGLang's of its own.

A block of SGLang's is read twice: as it arrives, and once more when it is complete. The second
reading adds what the first one has missed, since few of SGLang's parsers read every piece that a
stream can be cut into. A block that is cut off is read once, and gets no end.

White space before a block, and an answer's last one if it has calls, belong to the format. What is
read of a block and is no call is words: the whole block, or its end if the answer is cut there.

`JsonCalls` reads calls that a model writes as JSON objects, piece by piece, and passes their
arguments on as written:

    <tool_call>  {"name": "look", "arguments":  {"n": 1}  }  </tool_call>
    -----------  ----------------------------  ---------  ---------------
      (start)               HEAD               ARGUMENTS     TAIL, HEAD

SGLang's parsers read the object so far and write it again as JSON. So a call that is cut off gets
an end that the model did not write, and numbers and spaces change.

A call ends with its object. The end marker inside of a text is a part of the text; elsewhere it
ends the block, whatever the model left out. Words after the last object belong to no call.

    fault     parsers of whole answers lose words between calls, and write arguments again
    hooks     no hook of its own: `tool_calls` reads with it
    test      tests/compat/test_call_blocks.py
    upstream  no patch yet
    ends with a version whose parsers keep words and arguments as written
"""

import copy
import json
import re
from collections.abc import Callable, Iterator
from enum import Enum, auto
from itertools import pairwise
from typing import Any, NamedTuple

from sgl_ext.reading.rewriting import is_object, sendable_text

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
    unread: what was read behind the last call, and is none.
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

    @property
    def unread(self) -> str:
        """What was read behind the last call, and is none."""
        return self._left if self._state is _State.HEAD else ""

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
            self._put(found, _name_in_head(head[1]), "")
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


def _name_in_head(written: str) -> str:
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


_CALL = ("<tool_call>", "</tool_call>")
_PARAMETER = ("<parameter=", "</parameter>")
_VALUE = ("<arg_value>", "</arg_value>")
_MESSAGE = "<|message_sep|>"
_DSML = "\uff5cDSML\uff5c"


class Block(NamedTuple):
    """The markers of a block. end: None if it ends with the JSON value that follows.

    inner: the markers of a value; an end inside a value does not count.
    is_json: its calls are JSON objects with a `name` and `arguments` or `parameters`.
    separates: its end stands before it, too, and belongs to the format.
    """

    start: str
    end: str | None
    inner: tuple[str, str] | None = None
    is_json: bool = False
    separates: bool = False


def _deepseek(what: str) -> Block:
    begin, end = (f"<\uff5ctool\u2581{what}\u2581{side}\uff5c>" for side in ("begin", "end"))
    return Block(begin, end)


def _dsml(calls: str, space: str = "") -> tuple[Block, ...]:
    tag = f"{_DSML}{space}"
    inner = (f"<{tag}parameter", f"</{tag}parameter>")
    return tuple(
        Block(begin, f"</{tag}{name}>", inner)
        for name, begin in ((calls, f"<{tag}{calls}>"), ("invoke", f"<{tag}invoke"))
    )


_FUNCTIONS = (Block(*_CALL, _PARAMETER), Block("<function=", "</function>", _PARAMETER))
_VALUES = (Block(*_CALL, _VALUE),)
_LINES = (Block("<tool_call>\n", "</tool_call>", is_json=True),)
BLOCKS: dict[str, tuple[Block, ...]] = {
    "apertus2509": (Block("<|tools_prefix|>", "<|tools_suffix|>"),),
    "cohere_command4": (Block("<|START_ACTION|>", "<|END_ACTION|>"),),
    "deepseekv3": (_deepseek("calls"), _deepseek("call")),
    "deepseekv31": (_deepseek("calls"), _deepseek("call")),
    "deepseekv32": _dsml("function_calls"),
    "deepseekv4": _dsml("tool_calls"),
    "deepseekv41": _dsml("calls", " "),
    "dots": (Block("<dots_function_call>", "</dots_function_call>"),),
    "gemma4": (Block("<|tool_call>", "<tool_call|>"),),
    "gigachat3": (
        Block("<|function_call|>", _MESSAGE, is_json=True, separates=True),
        Block("function call<|role_sep|>\n", _MESSAGE, is_json=True, separates=True),
    ),
    "gigachat35": (Block("<\uff5cGCML\uff5ctool_calls>", "</\uff5cGCML\uff5ctool_calls>"),),
    "hermes": (Block(*_CALL, is_json=True),),
    "hunyuan": (Block("<tool_calls>", "</tool_calls>", _VALUE),),
    "interns1": (Block("<|action_start|> <|plugin|>", "<|action_end|>", is_json=True),),
    "iquest_q1": (Block("<iquest_tool_call>", "</iquest_tool_call>", _VALUE),),
    "k2_horizon": (Block("<ifm|tool_call>", "</ifm|tool_call>"),),
    "kimi_k2": (
        Block("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        Block("<|tool_call_begin|>", "<|tool_call_end|>"),
    ),
    "lfm2": (Block("<|tool_call_start|>", "<|tool_call_end|>"),),
    "mimo": (Block(*_CALL, _PARAMETER),),
    "minicpm5": (Block("<function", "</function>"),),
    "minimax-m2": (Block("<minimax:tool_call>", "</minimax:tool_call>"),),
    "minimax-m3": (Block("]<]minimax[>[<tool_call>", "]<]minimax[>[</tool_call>"),),
    "mistral": (Block("[TOOL_CALLS", None),),
    "spark25": _VALUES,
    "step3": (Block("<\uff5ctool_calls_begin\uff5c>", "<\uff5ctool_calls_end\uff5c>"),),
    **dict.fromkeys(("glm", "glm45", "glm47", "ling3", "poolside_v1"), _VALUES),
    **dict.fromkeys(("qwen", "qwen25", "trinity"), _LINES),
    **dict.fromkeys(("nanbeige", "qwen3_coder", "step3p5"), _FUNCTIONS),
}
"""The blocks of each of SGLang's parsers whose calls have an end."""


class Cutter:
    """Cuts a stream's pieces where a block begins or ends, so that each is words or calls."""

    def __init__(self, blocks: tuple[Block, ...]) -> None:
        self._starts = [block.start for block in blocks]
        self._ends = [block.end for block in blocks if block.end]
        if any(block.separates or not block.end for block in blocks):
            self._ends += ["]", "}"]  # a call may end without a marker
        self._longest = max(map(len, (*self._starts, *self._ends)), default=1)
        self._before = ""

    def pieces(self, text: str) -> list[str]:
        """The parts of a piece, at least one."""
        known, whole = len(self._before), self._before + text
        places = {at for start in self._starts for at in _found(whole, start)}
        places |= {at + len(end) for end in self._ends for at in _found(whole, end)}
        self._before = whole[-self._longest :]
        cuts = [known, *sorted(at for at in places if known < at < len(whole)), len(whole)]
        return [whole[a:b] for a, b in pairwise(cuts)]


def _found(text: str, marker: str) -> Iterator[int]:
    at = text.find(marker)
    while at >= 0:
        yield at
        at = text.find(marker, at + 1)


class Foreign:
    """A block that a parser of SGLang's reads."""

    def __init__(self, block: Block, detector: Any, tools: Any) -> None:
        self.count = 0
        self.is_done = False
        self.rest = ""
        self._block, self._tools, self._text = block, tools, block.start
        self._pristine, self._detector = detector, _copied(detector)
        self._numbers: dict[int, int] = {}
        self._arguments: list[str] = []
        self._values: list[Value | None] = []
        self._fed = False

    @property
    def is_cut(self) -> bool:
        """Whether the arguments of the last call have no end."""
        return bool(self._arguments) and not is_object(self._arguments[-1])

    @property
    def unread(self) -> str:
        """What was read behind the last call, and is none: what follows the shortest beginning of
        the block in which a parser finds all of its calls."""
        low, high = len(self._block.start), len(self._text)
        while low < high:
            middle = (low + high) // 2
            if self._calls_in(self._text[:middle]) == self._arguments:
                high = middle
            else:
                low = middle + 1
        return self._text[low:]

    def _calls_in(self, text: str) -> list[str]:
        """The arguments of the calls that are found in the beginning of a block."""
        found = Foreign(self._block, self._pristine, self._tools)
        found.feed(text[len(self._block.start) :])
        return found._arguments

    def feed(self, text: str) -> list[Part]:
        """The parts of calls that are in a piece of the block."""
        known = len(self._text)
        self._text += text
        end = self._end(known)
        if end is None:
            return self._increment(text if self._fed else self._text)
        self._text, self.rest = self._text[:end], self._text[end:]
        self.is_done = True
        found = self._increment(self._text[known:]) if self._fed else []
        return found + self.finish(is_cut=False)

    def finish(self, *, is_cut: bool) -> list[Part]:
        """Reads the block once more, as a whole, for what is missing."""
        if is_cut:
            return []
        found: list[Part] = []
        calls = _copied(self._pristine).detect_and_parse(self._text, self._tools).calls
        for number, call in enumerate(calls):
            if number >= self.count:
                self._begin(call.parameters)
                found += [Part(number, _name(call), ""), Part(number, None, call.parameters)]
            elif more := self._missing(self._arguments[number], call.parameters):
                found.append(Part(number, None, more))
                self._arguments[number] += more
        return found

    def _missing(self, sent: str, whole: str) -> str:
        if whole.startswith(sent):
            return whole[len(sent) :]
        at = self._text.find(sent)
        if is_object(sent) or at < 0:
            return ""
        end = value_end(self._text, at)
        return self._text[at + len(sent) : end] if end else ""

    def _increment(self, text: str) -> list[Part]:
        self._fed = True
        found: list[Part] = []
        while True:
            calls = self._detector.parse_streaming_increment(text, self._tools).calls
            read = [part for call in calls if (part := self._part(call)) is not None]
            found += read
            if not read:
                return found
            text = ""

    def _part(self, call: Any) -> Part | None:
        if not (call.name or call.parameters):
            return None
        number = self._numbers.setdefault(call.tool_index, self.count)
        if number == self.count:
            self._begin("")
        arguments, value = call.parameters or "", self._values[number]
        if value is None:  # the beginning of an end marker, read as arguments
            arguments = ""
        else:
            at, is_end = value.read(arguments)
            if is_end:
                arguments, self._values[number] = arguments[:at], None
        self._arguments[number] += arguments
        return Part(number, _name(call), arguments) if call.name or arguments else None

    def _begin(self, arguments: str) -> None:
        self.count += 1
        self._arguments.append(arguments)
        self._values.append(Value(""))

    def _end(self, known: int) -> int | None:
        """Where the block ends in what is read of it; None if it does not yet."""
        block, text = self._block, self._text
        if block.end is None:
            return _end_of_mistral(text)
        at = text.find(block.end, max(len(block.start), known - len(block.end)))
        while at >= 0:
            inner = block.inner
            if inner is None or text.rfind(inner[0], 0, at) <= text.rfind(inner[1], 0, at):
                return at + len(block.end)
            at = text.find(block.end, at + 1)
        return None


def _name(call: Any) -> str | None:
    return call.name.strip() if call.name else None


def _end_of_mistral(text: str) -> int | None:
    """The end of a list of calls, or of the arguments of one call behind its name."""
    behind = text.find("[TOOL_CALLS") + len("[TOOL_CALLS")
    begin = behind + (text[behind : behind + 1] == "]")
    body = text[begin:].lstrip()
    at = len(text) - len(body) if body.startswith("[") else text.find("{", begin)
    return value_end(text, at) if at >= 0 else None


def _copied(detector: Any) -> Any:
    """A parser with a state of its own."""
    made = copy.copy(detector)
    for name, value in vars(made).items():
        if isinstance(value, dict | list | set):
            setattr(made, name, copy.copy(value))
    return made


Said = str | Part
"""Words, or a part of a call."""


class Reader:
    """Reads an answer piece by piece.

    has_called: whether a call has begun. calls: how many there are in the blocks that have ended.
    is_cut: the arguments of the last call have no end.
    """

    def __init__(self, blocks: tuple[Block, ...], foreign: Callable[[Block], Any]) -> None:
        self.has_called = self.is_cut = False
        self._blocks, self._foreign = blocks, foreign
        self._markers = [block.start for block in blocks]
        self._ends = [block.end for block in blocks if block.end]
        self._separators = [block.end for block in blocks if block.end and block.separates]
        self._held = ""
        self._block: JsonCalls | Foreign | None = None
        self._raw = ""
        self.calls = 0

    def feed(self, text: str) -> list[Said]:
        """What a piece of the answer completes, in order."""
        said: list[Said] = []
        left = text
        while left:
            left = self._read_words(said, left) if self._block is None else self._read(said, left)
        return said

    def end(self, *, is_cut: bool) -> list[Said]:
        """What is left. is_cut: the answer was ended by something else than its model."""
        said: list[Said] = []
        block, self._block = self._block, None
        if block is not None:
            if isinstance(block, Foreign):
                self._put(said, block.finish(is_cut=is_cut))
            self.is_cut, self.calls = block.is_cut, self.calls + block.count
            if not block.count:
                said.append(self._raw)
            elif is_cut and not block.is_cut and not _is_begun(block.unread.strip(), self._ends):
                said.append(block.unread)
        elif not self.has_called:
            said += [self._held] if self._held else []
        elif (words := self._held.rstrip()) and not _is_begun(words.lstrip(), self._ends):
            said.append(words)
        self._held = ""
        return said

    def _read_words(self, said: list[Said], text: str) -> str:
        """Passes words on. Returns what follows the start of a block, or the end of one."""
        text, self._held = self._held + text, ""
        found = [(at, -len(each), each) for each in self._markers if (at := text.find(each)) >= 0]
        ends = self._ends if self.has_called else self._separators
        found += [(at, -len(each), each) for each in ends if (at := text.find(each)) >= 0]
        if found:
            at, _, marker = min(found)
            words = text[:at].rstrip()
            if words:
                said.append(words)
            if marker in self._markers:
                block = self._blocks[self._markers.index(marker)]
                self._raw = text[len(words) : at] + marker
                self._block = JsonCalls(block.end or "") if block.is_json else self._foreign(block)
            return text[at + len(marker) :]
        begun = max((_begun(text, each) for each in (*self._markers, *ends)), default=0)
        words = text[: len(text) - begun].rstrip()
        self._held = text[len(words) :]
        if words:
            said.append(words)
        return ""

    def _read(self, said: list[Said], text: str) -> str:
        """Reads calls. Returns what follows their block."""
        block = self._block
        assert block is not None
        if not block.count:
            self._raw += text
        parts = block.feed(text)
        self._put(said, parts)
        if not block.is_done:
            return ""
        self._block, self.is_cut = None, block.is_cut
        if not block.count:  # words that begin as a block does
            said.append(self._raw[: len(self._raw) - len(block.rest)])
        self.calls += block.count
        return block.rest

    def _put(self, said: list[Said], parts: list[Part]) -> None:
        said += [part._replace(number=self.calls + part.number) for part in parts]
        self.has_called |= bool(parts)


def _begun(text: str, marker: str) -> int:
    """How many of the last characters begin a marker."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if marker.startswith(text[-length:]):
            return length
    return 0


def _is_begun(text: str, markers: list[str]) -> bool:
    return any(marker.startswith(text) for marker in markers)
