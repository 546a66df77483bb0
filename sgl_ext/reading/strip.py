"""The strip: session headers that lead a system text or a raw prompt are removed, everything else
stays.

A coding agent may begin its system prompt with a line such as

    x-anthropic-billing-header: cc_version=2.1.197.3af; cc_entrypoint=sdk-cli;

whose values change with the session or the request. At token 0 it makes every prefix unique. The
grammar of what is removed:

    header = *white-space  NAME ":"  1*field  [ *blank line-end ]
    field  = *blank  key "=" value ";"
    key    = 1*( letter | digit | "_" | "." | "-" )      value = *( neither ";" nor white space )

The last field of a line may lack its ";" if a blank (or the colon) precedes it and the line ends
after it. If text follows the fields on the same line, the header ends right after the last ";"
and the text stays byte for byte, its leading blanks included. Keys and values contain no white
space, so prose after the fields is not mistaken for a field. A NAME without any field is prose
too, and stays. Several headers in a row are all removed. A text with very many fields or headers
(_MOST_FIELDS, _MOST_HEADERS) stays as it is.

Invariants: `strip(strip(t)) == strip(t)`; a text without a header is returned as the same object;
the result is always a suffix of the text.

The engine strips before tokenization, and the balancer must read a request as the engine will:
both call `strip_request`. A body is never changed in place; if nothing is stripped, the same
object is returned. A block whose text becomes empty is removed, and so is a message or field
without any block left: the prompt is then that of a request which never had the header.
"""

import copy
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

from sgl_ext.reading.protocol import INSTRUCTION_ROLES, Json, Part, Protocol
from sgl_ext.reading.rewriting import DROPPED, altered, edited, reminder

# Which lines of a system text are known to differ between sessions, by their exact shape.
#
# A rule has a kind, a text that its lines contain, and the shape of the whole lines. The
# sender does not matter: the shapes are those of the clients named here, and the balancer and the
# engine must find the same lines.

_ITEM = r"[ \t]*(?:[-*] )?"
# What `git status --short` and `git log --oneline` write, as Claude Code quotes them.
_STATUS = r"(?:\n(?:\(clean\)|[ MTADRCU?!]{1,2} [^\n]+|\.\.\. \(truncated[^\n]*))*"
_COMMITS = r"(?:\n[0-9a-f]{7,40} [^\n]*)*"
_CHECKBOX = r"[ \t]*[-*] \[[ xX~-]\] [^\n]*"


class Rule(NamedTuple):
    """Lines of one kind. needle: what a text must contain before it is searched."""

    kind: str
    needle: str
    lines: re.Pattern[str]


def _rule(kind: str, needle: str, lines: str) -> Rule:
    return Rule(kind, needle, re.compile(rf"^(?:{lines})(?:\n|\Z)", re.MULTILINE))


RULES = (
    # Claude Code, in the instructions about its memory.
    _rule(
        "memory_path",
        "file-based memory",
        r"You have a persistent,? file-based memory (?:system )?(?:at|with two directories:) "
        r"[^\n]*`[^`\n]+`[^\n]*",
    ),
    # Claude Code up to 2.1.197, at the end of its instructions.
    _rule(
        "git_status",
        "This is the git status at the start of the conversation",
        r"(?:# )?gitStatus:?[ \n]This is the git status at the start of the conversation[^\n]*"
        r"(?:\n\nCurrent branch: [^\n]*)?(?:\n\nMain branch \([^\n]*)?(?:\n\nGit user: [^\n]*)?"
        rf"(?:\n\nStatus:{_STATUS})?(?:\n\nRecent commits:{_COMMITS})?",
    ),
    # Claude Code and OpenCode.
    _rule("date", "Today's date", rf"{_ITEM}Today's date(?: is|:) [^\n]{{0,60}}[0-9][^\n]{{0,60}}"),
    # Goose and other agents.
    _rule(
        "date",
        "urrent ",
        rf"{_ITEM}(?:The c|C)urrent (?:date and time|date|time)(?: is|:) "
        r"[^\n]{0,60}[0-9][^\n]{0,60}",
    ),
    # Claude Code and OpenCode, in the description of the environment.
    _rule(
        "working_directory",
        "orking directory: ",
        rf"{_ITEM}(?:Primary w|W)orking directory: [^\n]+",
    ),
    _rule("working_directory", "Workspace root folder: ", r"[ \t]*Workspace root folder: [^\n]+"),
    # A list of tasks with checkboxes under a heading of its own.
    _rule(
        "task_list",
        "] ",
        r"#{1,4} (?:Current |Your )?(?:[Tt]asks|[Tt]ask list|[Tt]o-?do(?: list)?|TODO(?: list)?):?"
        rf"[ \t]*\n(?:[ \t]*\n)?{_CHECKBOX}(?:\n{_CHECKBOX})*",
    ),
)
KINDS = tuple(dict.fromkeys(rule.kind for rule in RULES))


class Found(NamedTuple):
    """Lines of a text, with the line end that follows them."""

    start: int
    end: int
    kind: str


def find_lines(text: str) -> Iterator[Found]:
    """The volatile lines of a text, in order, without overlaps."""
    found = [
        Found(*match.span(), rule.kind)
        for rule in RULES
        if rule.needle in text
        for match in rule.lines.finditer(text)
    ]
    end = 0
    for each in sorted(found):
        if each.start >= end:
            yield each
            end = each.end


# Moves volatile lines from the system text to the beginning of the first user message.
#
#     tools, system text with a date, first message        tools, system text, date, first message
#     |-- stable --|-------- differs -------------|   ->   |-- stable ---------|---- differs ----|
#
# Templates render tools before or after the system text, but always before the first message. So
# sessions that differ only in such lines share tools and the whole system text.
#
# Only instructions in front of the first message are searched. The lines come in the order in which
# they stood, each once, inside a `<system-reminder>`, which agents' models know as a text of the
# system. Everything else stays byte for byte and in order; a block that had nothing else is
# removed. A second move finds nothing. Where the first message is not the user's, or begins with a
# tool's result, there is no place for the lines: the body stays as it is, and they count as KEPT.

KEPT = "kept"
_MOST_CHARS = 1 << 20


class Moved(NamedTuple):
    """A body, the same object if nothing was moved, and how often lines of each kind were found."""

    body: Any
    kinds: Mapping[str, int]


def move_lines(protocol: Protocol, body: Any) -> Moved:
    """Moves the volatile lines of a parsed body. Never raises on a malformed body.

    Texts of over a MiB are not searched. Raw prompts have no messages and stay as they are, and so
    do bodies that continue a response which is not in them.
    """
    if not isinstance(body, dict) or body.get("previous_response_id") is not None:
        return Moved(body, {})
    turns = protocol.turns_field
    if turns is None or not isinstance(body.get(turns), str | list):
        return Moved(body, {})
    taker = _Taker()
    edits: Json = {
        name: taker.content(body[name]) for name in protocol.instruction_fields if name in body
    }
    is_items = (Part.ITEMS, turns) in protocol.prompt
    messages = _with_lines(body[turns], taker, "input_text" if is_items else "text")
    if messages is None:
        return Moved(body, {KEPT: taker.kinds.total()})
    if not taker.lines:
        return Moved(body, {})
    return Moved(edited(body, {**edits, turns: messages}), taker.kinds)


def _with_lines(messages: str | list[Any], taker: "_Taker", text_type: str) -> Any:
    """The messages without the lines of the instructions that they begin with, and with all taken
    lines before the first message; None if that takes none."""
    if isinstance(messages, str):
        return f"{taker.reminder()}\n{messages}" if taker.lines else messages
    count = 0
    while count < len(messages) and _role(messages[count]) in INSTRUCTION_ROLES:
        count += 1
    head = altered(messages[:count], taker.message)
    if not taker.lines:
        return messages
    if count == len(messages) or _role(messages[count]) != "user":
        return None
    first = messages[count]
    text, content = taker.reminder(), first.get("content")
    if isinstance(content, str):
        content = f"{text}\n{content}"
    elif isinstance(content, list) and content and not _is_result(content[0]):
        content = [{"type": text_type, "text": text}, *content]
    else:
        return None
    return [*head, {**first, "content": content}, *messages[count + 1 :]]


class _Taker:
    """Takes the volatile lines out of texts, and keeps them in order.

    Each method returns the same object if nothing was taken, and DROPPED if nothing is left.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.kinds: Counter[str] = Counter()

    def reminder(self) -> str:
        """All lines as one text."""
        return reminder("".join(self.lines)[:-1])

    def content(self, value: Any) -> Any:
        """A text, or a list of texts and of blocks with a `text`."""
        if not isinstance(value, list):
            return self._text(value)
        blocks = altered(value, self._block)
        return blocks if blocks is value or blocks else DROPPED

    def message(self, message: Json) -> Any:
        content = self.content(message.get("content"))
        return DROPPED if content is DROPPED else edited(message, {"content": content})

    def _block(self, block: Any) -> Any:
        if not isinstance(block, dict):
            return self._text(block)
        text = self._text(block.get("text"))
        return DROPPED if text is DROPPED else edited(block, {"text": text})

    def _text(self, text: Any) -> Any:
        if not isinstance(text, str) or len(text) > _MOST_CHARS:
            return text
        rest, end = [], 0
        for found in find_lines(text):
            lines = text[found.start : found.end]
            self.lines.append(lines if lines.endswith("\n") else f"{lines}\n")
            self.kinds[found.kind] += 1
            rest.append(text[end : found.start])
            end = found.end
        return ("".join([*rest, text[end:]]) or DROPPED) if rest else text


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, dict) else None


def _is_result(block: Any) -> bool:
    return isinstance(block, dict) and block.get("type") == "tool_result"


BILLING_HEADER = "x-anthropic-billing-header"
# A text with more is not a harness's. It stays as it is, and costs little to read.
_MOST_FIELDS, _MOST_HEADERS = 256, 64
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]*\Z")


class StrippedText(NamedTuple):
    """The rest of a text, the number of headers removed, and their fields (later wins)."""

    text: str
    headers: int
    fields: dict[str, str]


class HeaderStrip:
    """Removes leading headers of the given names from a text.

    Names match in any case. Raises ValueError for a name that is not letters, digits and hyphens.
    moves_lines: whether `strip_request` also moves volatile lines out of the system texts.
    """

    def __init__(
        self, names: Iterable[str] = (BILLING_HEADER,), *, moves_lines: bool = False
    ) -> None:
        self.moves_lines = moves_lines
        lower = tuple(dict.fromkeys(name.lower() for name in names))
        for name in lower:
            if not _NAME.match(name):
                raise ValueError(f"not a header name: {name!r}")
        alternatives = "|".join(re.escape(name) for name in lower) or r"(?!)"
        field, line_end = r"[A-Za-z0-9_.-]+=[^;\s]*", r"[ \t]*(?:\r\n|\n|\r|\Z)"
        self._header = re.compile(
            rf"\s*(?:{alternatives}):"
            rf"(?P<fields>(?:[ \t]*{field};){{0,{_MOST_FIELDS}}}"
            rf"(?:(?:(?<=:)|[ \t])[ \t]*{field}(?={line_end}))?)"
            rf"(?:{line_end})?",
            re.IGNORECASE,
        )
        self._needles = tuple(
            cased.encode() for name in lower for cased in {name, name.upper(), name.title()}
        )

    @property
    def headers_only(self) -> "HeaderStrip":
        """The same, which moves no lines: for a part of a body, whose whole has them moved."""
        alone = copy.copy(self)
        alone.moves_lines = False
        return alone

    def finds(self, text: str) -> bool:
        """Whether a header may lead a text, for which `strip` has to look."""
        return self._header.match(text) is not None

    def strip(self, text: str) -> StrippedText:
        """Removes every header at the beginning of `text`."""
        start, headers, fields = 0, 0, {}
        while match := self._header.match(text, start):
            found = match["fields"]
            if not found:
                break
            if found.count(";") >= _MOST_FIELDS or headers >= _MOST_HEADERS:
                return StrippedText(text, 0, {})
            for field in found.split(";"):
                key, separator, value = field.strip().partition("=")
                if separator:
                    fields[key] = value
            headers += 1
            start = match.end()
        return StrippedText(text[start:] if start else text, headers, fields)

    def mentions(self, raw: bytes) -> int:
        """How often a header's name occurs in `raw`, in lower, upper or title case.

        A count for a metric. Names in mixed case are stripped, too, but not counted here: folding
        the case of a whole body costs more than reading it.
        """
        return sum(map(raw.count, self._needles))


class Stripped(NamedTuple):
    """A request body after the strip, the number of headers, their fields (later wins), and how
    many volatile lines of each kind were moved."""

    body: Any
    headers: int
    fields: dict[str, str]
    moved: Mapping[str, int] = {}


def strip_request(protocol: Protocol, body: Any, strip: HeaderStrip) -> Stripped:
    """Strips the system texts of a parsed request body, and moves their volatile lines if the
    settings say so.

    A body that is not an object passes unchanged. Never raises on a malformed body: a field
    without the protocol's structure is left for the engine to reject.
    """
    if not isinstance(body, dict):
        return Stripped(body, 0, {})
    visitor = _Visitor(strip)
    edits: Json = {}
    for part, name in _texts_of(protocol):
        if name in body:
            new = visitor.visit(part, body[name])
            if new is not body[name]:
                edits[name] = [] if new is DROPPED and part is not Part.INSTRUCTIONS else new
    if edits:
        body = edited(body, edits)
    kinds: Mapping[str, int] = {}
    if strip.moves_lines:
        body, kinds = move_lines(protocol, body)
    return Stripped(body, visitor.headers, visitor.fields, kinds)


@cache
def _texts_of(protocol: Protocol) -> tuple[tuple[Part, str], ...]:
    """The fields that may have system texts."""
    return tuple((part, name) for part, name in protocol.prompt if part is not Part.TOOLS)


class _Visitor:
    """Strips the texts of one body and adds up what it found.

    Each method returns the same object if nothing changed, and DROPPED if nothing is left.
    """

    def __init__(self, strip: HeaderStrip) -> None:
        self._strip = strip
        self.headers = 0
        self.fields: dict[str, str] = {}

    def visit(self, part: Part, value: Any) -> Any:
        if part is Part.INSTRUCTIONS:
            return self._content(value)
        if part is Part.TEXT:
            return self._prompts(value)
        if not isinstance(value, list):
            return value
        if part is Part.INSTANCES:
            return _each(value, self._instance)
        changed: dict[int, Any] = {}
        for at in _instructions_in(value):
            item = value[at]
            text = item.get("content")
            if type(text) is str and not self._strip.finds(text):
                continue
            new = self._message(item)
            if new is not item:
                changed[at] = new
        if not changed:
            return value
        visited = [changed.get(at, item) for at, item in enumerate(value)]
        return [item for item in visited if item is not DROPPED] or DROPPED

    def _content(self, value: Any) -> Any:
        """A text, or a list of texts and of blocks with a `text`."""
        if not isinstance(value, list):
            return self._text(value)
        for block in value:
            text = block.get("text") if isinstance(block, dict) else block
            if isinstance(text, str) and self._strip.finds(text):
                return _each(value, self._block)
        return value

    def _block(self, value: Any) -> Any:
        return self._text(value) if isinstance(value, str) else _member(value, "text", self._text)

    def _text(self, value: Any) -> Any:
        if not isinstance(value, str) or not self._strip.finds(value):
            return value
        text, headers, fields = self._strip.strip(value)
        self.headers += headers
        self.fields.update(fields)
        return text if text or not headers else DROPPED

    def _message(self, message: Json) -> Any:
        """A message or input item with instructions."""
        return _member(message, "content", self._content)

    def _prompts(self, value: Any) -> Any:
        """A raw prompt, or a batch of them, which keeps its length: an empty prompt stays as ""."""
        if isinstance(value, list):
            is_tokens = bool(value) and isinstance(value[0], int)
            return value if is_tokens else _each(value, self._prompt)
        return self._prompt(value)

    def _prompt(self, value: Any) -> Any:
        stripped = self._text(value)
        return "" if stripped is DROPPED else stripped

    def _instance(self, instance: Any) -> Any:
        return _member(instance, "text", self._prompts)


def _instructions_in(items: list[Any]) -> list[int]:
    """The places of the few messages, of many, that are instructions."""
    try:
        return [at for at, item in enumerate(items) if item["role"] in INSTRUCTION_ROLES]
    except (KeyError, TypeError):
        return [at for at, item in enumerate(items) if _role(item) in INSTRUCTION_ROLES]


def _each(items: list[Any], visit: Callable[[Any], Any]) -> Any:
    visited = altered(items, visit)
    return visited if visited is items or visited else DROPPED


def _member(holder: Any, key: str, visit: Callable[[Any], Any]) -> Any:
    """`holder` with one member visited."""
    if not isinstance(holder, dict) or key not in holder:
        return holder
    new = visit(holder[key])
    if new is holder[key]:
        return holder
    return new if new is DROPPED else edited(holder, {key: new})
