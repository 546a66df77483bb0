"""Why a process ended, from its log: the exception with its cause, and not the log's last page.

An engine is several processes. When one fails, the others end with exceptions that only say so;
those count if there is no other. An engine that serves logs exceptions of requests, too. One after
which it went on to serve ended nothing.
"""

import re
import signal
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from sgl_ext.node.child import Child

_TRACE = "Traceback (most recent call last):"
_CAUSE = "The above exception was the direct cause of the following exception:"
_EXCEPTION = re.compile(r"([A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Failed))(: |$)")
# A line of SGLang's log, or of our own.
_LOG_LINE = re.compile(r"\[?\d{4}-\d\d-\d\d[ T]")
# What other processes of an engine say when one has failed.
_FOLLOWS = re.compile(
    r"EOFError|BrokenPipe|KeyboardInterrupt|SystemExit|scheduler died|Child process"
    r"|subprocess\w* (died|exited|crashed)|process_group|leaked",
    re.IGNORECASE,
)
# What a process logs of its own end, and what one logs that serves.
_FATAL = re.compile(r"hit an exception")
_SERVES = re.compile(
    r"Prefill batch|Decode batch|The server is fired up|HTTP/1\.[01]\" [1-4]\d\d\b"
)
# How SGLang says that a process of the engine ended, for which it ends the others.
_OTHER_ENDED = re.compile(r"Subprocess (\S+) \(pid=(\d+)\) crashed with exit code (-?\d+)")
# The server's log has it without a traceback. What fails afterwards waits for that server.
_NO_ADDRESS = re.compile(r"\[Errno (?:98|48)\].*")
_OURS = "sgl-ext: "
_SAID = re.compile(r"(sgl-ext[\w -]*: |sglang serve: error: |usage: |\w*Error: )")
_HINTS = (
    (
        re.compile(r"Not enough host memory|No host memory is left"),
        "lower hicache-size or hicache-ratio, or free memory: each rank has a host pool of its own",
    ),
    (
        re.compile(r"out of memory|not enough memory|DefaultCPUAllocator|MemoryError", re.I),
        "lower mem-fraction-static or max-total-tokens, raise tp, or free memory",
    ),
    (
        re.compile(
            r"architectures?\b.*not supported|recognize this arch|Cannot find model module",
            re.I,
        ),
        "this version of SGLang does not serve the model's architecture",
    ),
    (
        re.compile(r"SafetensorError|header too|incomplete metadata|invalid load key", re.I),
        "a file of the model is damaged: compare its size, and copy it again",
    ),
    (
        re.compile(r"No space left on device"),
        "make room on the disk that holds logs, store, model cache or /dev/shm",
    ),
    (
        re.compile(r"\[Errno (98|48)\]|address already in use", re.IGNORECASE),
        "another process took the port meanwhile (`ss -ltnp` names it): start again, or set it",
    ),
)
_MOST_LINES = 8
_LONGEST = 400
_LAST_LINES = 5


def reason_of(child: "Child") -> str:
    """Lines that say why a child failed, each indented, with the path of its log."""
    lines = failure(child.lines_of_start(), child.exit_code, is_memory_short=child.is_memory_short)
    text = "\n".join(f"  {line}" for line in lines)
    return (
        f"{text}\nIts whole log: {child.log}" if text else f"Its log, which is empty: {child.log}"
    )


def cause_of(child: "Child") -> str:
    """Why a child ended, in a line: its exception, if any; else which of its processes ended, and
    by which signal or exit code."""
    lines, code = child.lines_of_start(), child.exit_code
    ended = "it ended" if code is None else _by(code)
    if said := next(filter(_EXCEPTION.match, failure(lines, code)), ""):
        return f"{ended}: {said}"
    other = _other(lines)
    return ended if other is None else f"{_by(int(other[3]))} of its {other[1]}"


def failure(
    lines: Sequence[str], exit_code: int | None = None, *, is_memory_short: bool = True
) -> list[str]:
    """The lines of a log that say why its process failed, and a hint where the cause is known.

    is_memory_short: whether the system may have ended a process of this machine for memory."""
    served = max((at for at, line in enumerate(lines) if _SERVES.search(line)), default=-1)
    # An exception before that was one of a request.
    found = [each.said for each in _exceptions(lines) if each.is_fatal or each.at > served]
    causes = [each for each in found if not _FOLLOWS.search(" ".join(each))]
    taken = [match[0] for line in lines[served + 1 :] if (match := _NO_ADDRESS.search(line))]
    ours = [line for line in lines if line.startswith(_OURS)]
    other = _other(lines)
    if taken and exit_code != -signal.SIGKILL:
        shown = taken[-1:]
    elif causes:
        shown = causes[-1]
    elif other is not None:
        what = f"Its {other[1]} (process {other[2]})"
        shown = [_ended(what, int(other[3]), is_memory_short), "It ended its other processes then."]
    elif ours:  # why it ends without an exception; several ranks may say the same
        shown = [*dict.fromkeys(ours)][-_MOST_LINES:]
    elif found:
        shown = found[-1]
    else:
        said = [at for at, line in enumerate(lines) if at > served and _SAID.match(line)]
        shown = [*lines[said[-1] :][:_MOST_LINES]] if said else [*lines[-_LAST_LINES:]]
    # An engine with an exception kills itself.
    if not (causes or taken or other) and exit_code is not None and exit_code < 0:
        shown = [*shown, _ended("It", exit_code, is_memory_short)]
    text = "\n".join(shown)
    shown = [f"{line[:_LONGEST]}..." if len(line) > _LONGEST else line for line in shown]
    return [*shown, *(f"Hint: {hint}." for pattern, hint in _HINTS if pattern.search(text))]


def _other(lines: Sequence[str]) -> re.Match[str] | None:
    """What an engine says of a process of its own for whose end it ended; None if it does not."""
    return next((match for line in lines if (match := _OTHER_ENDED.search(line))), None)


def _by(code: int) -> str:
    """How a process ended: by a signal, or with an exit code."""
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _ended(what: str, code: int, is_memory_short: bool) -> str:
    if code >= 0:
        return f"{what} ended with exit code {code}."
    why = ""
    if code == -signal.SIGKILL:
        why = (
            ": the system does so when memory runs out (dmesg)"
            if is_memory_short
            else ": by somebody, for the system has ended no process for memory meanwhile"
        )
    return f"{what} was ended by {_by(code)}{why}."


class _Exception(NamedTuple):
    """What a traceback ends with. at: the line after it. is_fatal: its process says so."""

    said: list[str]
    at: int
    is_fatal: bool


def _exceptions(lines: Sequence[str]) -> list[_Exception]:
    """What each traceback ends with, those of a chain as one: the last, then what caused it."""
    found: list[_Exception] = []
    is_cause = False
    at = 0
    while at < len(lines):
        line = lines[at]
        is_cause = is_cause or line.strip() == _CAUSE
        at += 1
        if _TRACE not in line:
            continue
        is_fatal = bool(_FATAL.search(line))
        end, at = _end_of_traceback(lines, at)
        if end and is_cause and found:
            first = found[-1]
            said = [*end, *(f"caused by {one}" for one in first.said[:1])]
            found[-1] = _Exception(said, at, first.is_fatal or is_fatal)
        elif end:
            found.append(_Exception(end, at, is_fatal))
        is_cause = False
    return found


def _end_of_traceback(lines: Sequence[str], at: int) -> tuple[list[str], int]:
    """The exception at the end of a traceback, with the lines of its message; where it ends."""
    while at < len(lines) and (lines[at].startswith(" ") or not _EXCEPTION.match(lines[at])):
        if _LOG_LINE.match(lines[at]):
            return [], at
        at += 1
    end: list[str] = []
    while at < len(lines) and len(end) < _MOST_LINES:
        line = lines[at]
        if end and (_LOG_LINE.match(line) or _TRACE in line or line.strip() == _CAUSE):
            break
        if end and line.startswith(("During handling", "Exception ignored", "  warnings.warn")):
            break
        end.append(line.rstrip())
        at += 1
    return end, at
