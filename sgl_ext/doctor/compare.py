"""Compares two prompts: where they diverge first, and how much cached text that costs.

The lost text follows the difference in the later prompt and is in the earlier one as well: it was
cached and is computed again. New text would have been computed in any case.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from sgl_ext.doctor.blocks import ASSISTANT, SYSTEM, TOOLS, Block
from sgl_ext.doctor.clock_or_id import CLOCK, ID, clock_or_id
from sgl_ext.doctor.labels import list_or_format, tenant_field
from sgl_ext.requests.breakpoints import common_prefix
from sgl_ext.requests.strip import HeaderStrip

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
