"""One line of a request log (`balancer/reporting/ended_request.py`), as far as sums need it."""

from typing import Any, NamedTuple

import orjson

from sgl_ext.doctor.logs.tokens import Tokens

_MOST = 10**12


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
    if not 0 <= (count := int(value)) <= _MOST:
        raise ValueError(f"{count} is no count")
    return count
