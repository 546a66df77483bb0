"""A request log, read line by line: its requests as far as sums need them, and their tokens."""

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

import orjson


class Tokens(NamedTuple):
    """computed: prompt tokens that an engine computed. read: those that it had in its cache.
    output: generated tokens."""

    computed: int = 0
    read: int = 0
    output: int = 0

    @property
    def prompt(self) -> int:
        """Tokens of the prompts."""
        return self.computed + self.read

    def plus(self, other: "Tokens") -> "Tokens":
        """The sums of both."""
        return Tokens(
            self.computed + other.computed, self.read + other.read, self.output + other.output
        )


_MOST_COUNT = 10**12


class Entry(NamedTuple):
    """A request that an engine answered.

    prefix, tools: the hashes of tools and instructions, and of tools; "" where there are none.
    session: its session, as its client names it, or a hash; "" if that is unknown.
    agent: what the harness sends it for, such as "subagent"; "" if it does not say.
    """

    time_s: float
    harness: str
    version: str
    agent: str
    model: str
    session: str
    prefix: str
    tools: str
    tools_count: int
    ttft_ms: float
    tokens: Tokens


def read_entry(line: bytes) -> Entry | None:
    """The request of a line; None if no engine answered it with tokens.

    Raises ValueError, TypeError or KeyError if the line is from no request log.
    """
    record = orjson.loads(line)
    estimate, read = _count(record["prompt_tokens"]), record["reported_tokens"]
    status, is_whole = record["status"], record.get("outcome", "complete") == "complete"
    if not (is_whole and estimate and status is not None and int(status) < 400):
        return None
    # Lines of older balancers have only the estimate.
    prompt = _count(record.get("counted_tokens") or estimate)
    read = min(_count(read or 0), prompt)
    client: dict[str, Any] = record.get("client") or {}
    return Entry(
        float(record["time"]),
        str(record["harness"] or "unknown"),
        str(client.get("version", "")),
        str(client.get("request_class", "")),
        str(record["model"] or ""),
        _session(record, client),
        str(record["prefix_hash"] or ""),
        str(record["tools_hash"] or ""),
        _count(record["tools_count"]),
        float(record["ttft_ms"]),
        Tokens(prompt - read, read, _count(record.get("output_tokens") or 0)),
    )


def _session(record: dict[str, Any], client: dict[str, Any]) -> str:
    """The session by the id that its client states, with that of its sub-agent. Older balancers
    wrote another `session` for each system text."""
    if not (stated := client.get("session")):
        return str(record["session"] or "")
    agent = client.get("agent_id")
    return f"{stated}/{agent}" if agent and agent != stated else str(stated)


def _count(value: Any) -> int:
    if not 0 <= (count := int(value)) <= _MOST_COUNT:
        raise ValueError(f"{count} is no count")
    return count


Read = TypeVar("Read")


class NotALog(Exception):
    """No line has the fields of a request log; the message says so."""

    def __init__(self) -> None:
        super().__init__("not a request log: no line has the fields of one")


def readable(lines: Iterable[bytes], read: Callable[[bytes], Read], command: str) -> Iterator[Read]:
    """What `read` makes of each line.

    Lines for which it raises ValueError, TypeError, KeyError or AttributeError are left out, and
    their number is printed on stderr in the name of the command. Raises NotALog if none is left.
    """
    count = unreadable = 0
    for line in lines:
        try:
            entry = read(line)
        except (ValueError, TypeError, KeyError, AttributeError):
            unreadable += 1
        else:
            count += 1
            yield entry
    if unreadable and not count:
        raise NotALog
    if unreadable:
        print(f"{command}: {unreadable} lines could not be read", file=sys.stderr)
