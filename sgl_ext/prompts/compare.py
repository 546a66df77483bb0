"""Compares two prompts: where they diverge first, and how much cached text that costs.

The lost text follows the difference in the later prompt and is in the earlier one as well: it was
cached and is computed again. New text would have been computed in any case.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from sgl_ext.prompts.blocks import ASSISTANT, SYSTEM, TOOLS, Block
from sgl_ext.reading.places import common_prefix
from sgl_ext.reading.strip import HeaderStrip

# What the text around a difference says of it: a tenant's field, a task list, an output format.
#
#     Tenant: acme                    tenant_field: the line gives the field a name
#     - [ ] write the test            task_list: a box, a status, or a heading above list items
#     Answer in this JSON schema: {   response_format: a format is announced, and not yet ended
#
# All are guesses by words, so each needs them close to the difference, in what both texts share or
# on the lines that differ.

TENANT_FIELD, TASK_LIST, RESPONSE_FORMAT = "tenant_field", "task_list", "response_format"
_LINE_BYTES = 256
_ABOVE_BYTES = 2048
_TENANT = re.compile(
    rb"(?<![a-z0-9])(?:tenant|customer|organi[sz]ation|org|account|workspace|company|department"
    rb"|team|user|member|subscriber|e-?mail|locale|virtual[ _-]key|cost[ _-]cent(?:er|re))"
    rb"(?:[ _-]?(?:id|name|key|uuid|slug|e-?mail|alias))?"
    rb"[\"'`*]{0,3} ?[:=>][ \"'`*]{0,4}[^\s\"'`,;<>]{0,64}\Z",
    re.IGNORECASE,
)
_BOX = re.compile(rb"^\s*(?:[-*+]|\d+[.)])?\s*\[[ xX~/>-]\]\s")
_STATUS = re.compile(rb"\"status\":\s*\"(?:pending|in_progress|completed|done|cancelled)\"")
_WORDS = (
    rb"(?:(?:current|open|your|my|remaining|active) )?(?:to-?do|task)(?:s|[ _-]?list)\b[^\n]{0,48}"
)
# A heading, or a line that ends in a colon; then list items up to the line of the difference.
_TASK_HEADING = re.compile(
    rb"(?:^|\n)(?:[#*<]{1,8} ?" + _WORDS + rb"|" + _WORDS + rb":[* ]*)\n"
    rb"(?:[ \t]*(?:[-*+\[\"{]|\d+[.)])[^\n]*\n|\n)*[^\n]*\Z",
    re.IGNORECASE,
)
_ITEM = re.compile(rb"^\s*(?:[-*+\[\"{]|\d+[.)])")
_FORMAT = re.compile(
    rb"json[ _-]?schema|\"\$schema\"|(?:response|output|answer)[ _-](?:format|schema)"
    rb"|\b(?:respond|reply|answer|output|return)\b[^.\n]{0,60}\b(?:json|schema|xml|yaml)\b",
    re.IGNORECASE,
)
# A blank line ends a format, unless the schema itself follows it.
_FORMAT_ENDS = re.compile(rb"\n[ \t]*\n(?!\s*(?:```|[{<]))")


def tenant_field(old: bytes, new: bytes, at: int) -> str | None:
    """TENANT_FIELD if both texts have different values of one such field at byte `at`."""
    return TENANT_FIELD if _TENANT.search(_line_start(new, at)) and _goes_on(old, new, at) else None


def list_or_format(old: bytes, new: bytes, at: int) -> str | None:
    """TASK_LIST, RESPONSE_FORMAT or None for two texts whose first difference is at byte `at`."""
    lines = [_line_start(text, at) + _line_end(text, at) for text in (old, new)]
    above = new[max(at - _ABOVE_BYTES, 0) : at]
    if any(all(map(found.search, lines)) for found in (_BOX, _STATUS)):
        return TASK_LIST
    if any(map(_ITEM.search, lines)) and _TASK_HEADING.search(above):
        return TASK_LIST
    for announced in _FORMAT.finditer(above + _line_end(new, at)):
        if not _FORMAT_ENDS.search(above, announced.end()):
            return RESPONSE_FORMAT
    return None


def _line_start(text: bytes, at: int) -> bytes:
    """The line of byte `at`, up to there."""
    return text[max(text.rfind(b"\n", 0, at) + 1, at - _LINE_BYTES) : at]


def _line_end(text: bytes, at: int) -> bytes:
    """The line of byte `at`, from there."""
    return text[at : at + _LINE_BYTES].partition(b"\n")[0]


def _goes_on(old: bytes, new: bytes, at: int) -> bool:
    """Whether neither text ends at byte `at`."""
    return at < len(old) and at < len(new)


# Whether two texts differ in a clock, in an id, or in something else.
#
# The words around the first byte that differs decide: the difference is a clock if both are in a
# date or a time, and an id if both are in a UUID, a hexadecimal or a long number.

CLOCK, ID = "clock", "id"
_AROUND_BYTES = 64
_DAY = "(?:mon|tues?|wed(?:nes)?|thu(?:rs)?|fri|sat(?:ur)?|sun)(?:day)?"
_MONTH = (
    "(?:jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?"
    "|sep(?:t(?:ember)?)?|oct(?:ober)?|nov(?:ember)?|dec(?:ember)?)"
)
_ZONE = r"(?: ?(?:z|utc|gmt)\b|[+-]\d{2}:?\d{2})"
_TIME = rf"\d{{1,2}}:\d{{2}}(?::\d{{2}}(?:[.,]\d+)?)?(?: ?[ap]\.?m\b\.?)?{_ZONE}?"
_YEAR_LAST = r"\d{1,2}[-/.]\d{1,2}[-/.]\d{4}|\d{1,2}[-/]\d{1,2}[-/]\d{2}"
_DATE = (
    rf"(?:\d{{4}}[-/.]\d{{1,2}}[-/.]\d{{1,2}}|{_YEAR_LAST}"
    rf"|{_MONTH}\.? \d{{1,2}}(?:st|nd|rd|th)?(?:,? \d{{4}})?"
    rf"|\d{{1,2}}\.? {_MONTH}\.?(?:,? \d{{4}})?|{_MONTH} \d{{4}}|{_DAY})"
)
_CLOCK = re.compile(
    rf"(?<![0-9a-z]){_DATE}(?:[t, ]{{1,4}}(?:at )?(?:{_DATE}|{_TIME})){{0,2}}(?![0-9a-z])"
    rf"|(?<![0-9a-z:]){_TIME}(?![0-9a-z:])".encode(),
    re.IGNORECASE,
)
_UUID = re.compile(rb"(?<![0-9a-f])[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)
_WORD = re.compile(rb"[0-9A-Za-z_]+")
_HEX = re.compile(rb"(?:0x)?[0-9a-f]{8,}", re.IGNORECASE)
_DIGITS = frozenset(b"0123456789")
# Seconds or milliseconds since the epoch, from 2017 on, at most a month apart.
_EPOCH = re.compile(rb"[12]\d{9}(?:\d{3})?")
_MONTH_S = 31 * 24 * 3600
_LONG_NUMBER = 6
# Mixed words of at least this length with at least this many digits.
_MIXED = ((8, 4), (16, 1))


def clock_or_id(old: bytes, new: bytes, at: int) -> str | None:
    """CLOCK, ID or None for two texts whose first difference is at byte `at`."""
    if _around(_UUID, old, at) and _around(_UUID, new, at):
        return ID
    left, right = _word(old, at), _word(new, at)
    if _are_epochs(left, right):
        return CLOCK
    if _around(_CLOCK, old, at) and _around(_CLOCK, new, at):
        return CLOCK
    if _is_id(left) and _is_id(right) and not _DIGITS.isdisjoint(left + right):
        return ID
    return None


def _around(pattern: re.Pattern[bytes], text: bytes, at: int) -> list[bytes]:
    """The matches of the pattern that contain byte `at`, or end right before it."""
    start = max(at - _AROUND_BYTES, 0)
    matches = pattern.finditer(text[start : at + _AROUND_BYTES])
    return [match[0] for match in matches if match.start() <= at - start <= match.end()]


def _word(text: bytes, at: int) -> bytes:
    """The word of letters and digits around byte `at`."""
    return max(_around(_WORD, text, at), key=len, default=b"")


def _is_id(word: bytes) -> bool:
    if word.isdigit():
        return len(word) >= _LONG_NUMBER
    if _HEX.fullmatch(word):
        return True
    digits = sum(byte in _DIGITS for byte in word)
    return any(len(word) >= size and digits >= few for size, few in _MIXED)


def _are_epochs(left: bytes, right: bytes) -> bool:
    if not (_EPOCH.fullmatch(left) and _EPOCH.fullmatch(right) and len(left) == len(right)):
        return False
    unit = 1 if len(left) == 10 else 1000
    return abs(int(left) - int(right)) <= _MONTH_S * unit and int(left) >= 1_500_000_000 * unit


def kind_at(blocks: Sequence[Block], at_bytes: int) -> str:
    """What the text at a place in a prompt's head is, by this prompt alone: a header, a clock, an
    id or a tool; "unknown" otherwise. at_bytes: the length of the canonical text before it."""
    block = next((each for each in blocks if each.end > at_bytes), None)
    if block is None:
        return "unknown"
    if block.part == TOOLS:
        return "tools_changed"
    at = max(at_bytes - (block.end - len(block.text)), 0)
    if at < _header_bytes(block.text):
        return "header"
    line = _line_start(block.text, at) + _line_end(block.text, at)
    if _CLOCK.search(line):
        return CLOCK
    words = _WORD.findall(line[len(_line_start(block.text, at)) :][:_AROUND_BYTES])
    if _UUID.search(line) or any(map(_is_id, words)):
        return ID
    return "unknown"


_HEADER_NAME = re.compile(r"\s*([A-Za-z][A-Za-z0-9]*(?:-[A-Za-z0-9]+)+):")
_HEADER_BYTES = 1024
_MIN_RECURRING = 3
COMPACTION = "compaction"
# How clients begin the summary that replaces a long history.
_SUMMARY = re.compile(
    rb"continued from a previous conversation|ran out of context|produced a summary"
    rb"|summary of (?:the|our|this) (?:conversation|work|session)|conversation summary"
    rb"|(?:context|conversation|history) (?:was|has been) (?:compacted|summari[sz]ed)|<summary>",
    re.IGNORECASE,
)
_SUMMARY_BYTES = 4096
_SUMMARY_BLOCKS = 3


class Difference(NamedTuple):
    """Where a prompt diverges from an earlier one.

    block, byte: the block of the later prompt and the byte in it where the prompts diverge. The
        block is the earlier prompt's if it is a tool that the later one lacks.
    bytes: how many bytes of the block differ from there on.
    kind: a key of `report.MEANINGS`.
    part: TOOLS, SYSTEM or "messages".
    at_bytes: the length of the canonical text before the difference.
    lost_bytes: how many bytes after the difference are in both prompts.
    rest_bytes: how many bytes follow the difference in the shorter prompt.
    is_same_agent: whether the prompts have one agent's instructions, or are one conversation.
    is_same_conversation: whether the model's output after the difference is in both prompts.
    """

    block: str
    byte: int
    bytes: int
    kind: str
    part: str
    at_bytes: int
    lost_bytes: int
    rest_bytes: int
    is_same_agent: bool
    is_same_conversation: bool


def compare(old: Sequence[Block], new: Sequence[Block]) -> Difference | None:
    """Where `new` diverges from `old`; None if one of them begins with all of the other."""
    first = _first_difference(old, new)
    if first is None:
        return None
    left, right = old[first], new[first]
    same_frame = left.frame == right.frame
    byte = common_prefix(left.text, right.text) if same_frame else 0
    if same_frame and (_ends_at(old, first, byte) or _ends_at(new, first, byte)):
        return None
    shown = left if left.part == TOOLS and right.part != TOOLS else right
    rest_of_old = [left.text[byte:], *(block.text for block in old[first + 1 :])]
    rest_of_new = [right.text[byte:], *(block.text for block in new[first + 1 :])]
    kind = _kind(old, new, first, byte)
    is_same = _are_one_conversation(old[first:], new[first:], kind)
    suffix = _common_suffix(left.text[byte:], right.text[byte:])
    return Difference(
        block=shown.label,
        byte=byte,
        bytes=max(len(left.text), len(right.text)) - byte - suffix,
        kind=kind,
        part=shown.part if shown.in_head else "messages",
        at_bytes=right.end - len(right.text) + byte,
        lost_bytes=_recurring(rest_of_old, rest_of_new),
        rest_bytes=min(sum(map(len, rest_of_old)), sum(map(len, rest_of_new))),
        is_same_agent=is_same or _have_one_agent(old, new),
        is_same_conversation=is_same,
    )


def _first_difference(old: Sequence[Block], new: Sequence[Block]) -> int | None:
    pairs = enumerate(zip(old, new, strict=False))
    return next((n for n, (a, b) in pairs if a.text != b.text or a.frame != b.frame), None)


def _ends_at(blocks: Sequence[Block], number: int, byte: int) -> bool:
    return number == len(blocks) - 1 and byte == len(blocks[number].text)


def _of(blocks: Iterable[Block], part: str) -> Counter[bytes]:
    return Counter(block.text for block in blocks if block.part == part and block.text)


def _are_one_conversation(old: Sequence[Block], new: Sequence[Block], kind: str) -> bool:
    """Whether most of the model's output in the shorter prompt is in the other one, too.

    Two conversations may begin with the same tool call, so a few equal blocks prove nothing,
    unless the difference before them is a clock or an id.
    """
    left, right = _of(old, ASSISTANT), _of(new, ASSISTANT)
    recurs = left & right
    if recurs.total() < (1 if kind in (CLOCK, ID) else _MIN_RECURRING):
        return False
    return 4 * _bytes(recurs) >= 3 * min(_bytes(left), _bytes(right))


def _bytes(texts: Counter[bytes]) -> int:
    return sum(len(text) * count for text, count in texts.items())


def _have_one_agent(old: Sequence[Block], new: Sequence[Block]) -> bool:
    """Whether at least half of the instructions are the same; without any, of the tools."""
    for part in (SYSTEM, TOOLS):
        left = [block.text for block in old if block.part == part]
        right = [block.text for block in new if block.part == part]
        if left or right:
            smaller = min(sum(map(len, left)), sum(map(len, right)))
            return smaller > 0 and 2 * _recurring(left, right) >= smaller
    return False


def _recurring(old: Sequence[bytes], new: Sequence[bytes]) -> int:
    """How many bytes of `new` are in `old`, by whole texts, and by lines of the other texts."""
    left, right = Counter(old), Counter(new)
    same = left & right
    lost = _bytes(same)
    left -= same
    right -= same
    if not left or not right:
        return lost
    lines_left = Counter(line for text in left.elements() for line in text.splitlines(True))
    lines_right = Counter(line for text in right.elements() for line in text.splitlines(True))
    by_lines = _bytes(lines_left & lines_right)
    one, other = next(iter(left)), next(iter(right))
    prefix = common_prefix(one, other)
    return lost + max(by_lines, prefix + _common_suffix(one[prefix:], other[prefix:]))


def _kind(old: Sequence[Block], new: Sequence[Block], first: int, byte: int) -> str:
    left, right = old[first], new[first]
    if TOOLS in (left.part, right.part):
        if left.part != right.part:
            return "tools_changed"
        ours, theirs = _of(old, TOOLS), _of(new, TOOLS)
        if ours == theirs:
            return "tool_order"
        # One tool changed and all others stayed: its text may show a clock or an id.
        one_changed = (ours - theirs).total() == (theirs - ours).total()
        return (one_changed and _in_text(left.text, right.text, byte)) or "tools_changed"
    if left.part == right.part == SYSTEM and all(
        byte < _header_bytes(text) for text in (left.text, right.text)
    ):
        return "header"
    if right.in_head:
        return (
            _in_text(left.text, right.text, byte)
            or list_or_format(left.text, right.text, byte)
            or "unknown"
        )
    if _is_compaction(old, new, first):
        return COMPACTION
    if kind := clock_or_id(left.text, right.text, byte):
        return kind
    dropped = any(block.text == right.text for block in old[first + 1 :])
    if dropped or 2 * len(right.text) < len(left.text) or 2 * new[-1].end < old[-1].end:
        return "truncated"
    return list_or_format(left.text, right.text, byte) or "rewritten"


def _in_text(left: bytes, right: bytes, byte: int) -> str | None:
    return tenant_field(left, right, byte) or clock_or_id(left, right, byte)


def begins_with_summary(blocks: Sequence[Block]) -> bool:
    """Whether the messages begin with the summary of a longer conversation."""
    first = [block.text[:_SUMMARY_BYTES] for block in blocks if not block.in_head][:_SUMMARY_BLOCKS]
    return any(map(_SUMMARY.search, first))


def _is_compaction(old: Sequence[Block], new: Sequence[Block], first: int) -> bool:
    """Whether a summary replaces most of the messages from the first difference on: its words say
    so, or what follows is few and mostly new messages."""
    rest, left = new[first:], old[first:]
    if 2 * _size(rest) >= _size(left):
        return False
    known = {block.text for block in left}
    fresh = [block for block in rest if block.text not in known]
    is_new = 2 * _size(fresh) > _size(rest) and 2 * len(rest) < len(left)
    return begins_with_summary(rest) or is_new


def _size(blocks: Sequence[Block]) -> int:
    return sum(len(block.text) for block in blocks)


def shrinks_to_head(old: Sequence[Block], new: Sequence[Block]) -> bool:
    """Whether two prompts have the same tools and instructions, and the later one has much less
    after them: what a compaction leaves."""
    left, right = ([b for b in blocks if b.in_head] for blocks in (old, new))
    texts = [[(block.part, block.text) for block in head] for head in (left, right)]
    if not left or texts[0] != texts[1]:
        return False
    return 2 * _size(new[len(right) :]) < _size(old[len(left) :])


def _header_bytes(text: bytes) -> int:
    """The length of a leading header that --strip-header could remove."""
    opening = text[:_HEADER_BYTES].decode("utf-8", "replace")
    name = _HEADER_NAME.match(opening)
    left = HeaderStrip((name[1],)).strip(opening).text if name else opening
    return len(opening.encode()) - len(left.encode())


def _common_suffix(left: bytes, right: bytes) -> int:
    return common_prefix(left[::-1], right[::-1])
