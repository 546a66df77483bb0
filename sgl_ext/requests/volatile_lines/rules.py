"""Which lines of a system text are known to differ between sessions, by their exact shape.

A rule has a kind, a text that its lines contain, and the shape of the whole lines. The
sender does not matter: the shapes are those of the clients named here, and the balancer and the
engine must find the same lines.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

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
    """Lines of a text, with the line end behind them."""

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
