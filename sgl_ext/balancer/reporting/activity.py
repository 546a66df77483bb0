"""What the answered requests of late were: their history, sessions and tenants, in bounded tables.

Each process of a balancer has its own. `merged` adds up the `as_json` of all of them. An agent is
one conversation. A session is what its client names: the agents that state no id of their own are
one session.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sgl_ext.balancer.metrics.instruments import Tables
from sgl_ext.balancer.reporting.history import History, series
from sgl_ext.reading.client import NO_FACTS, ClientFacts
from sgl_ext.reading.usage import Usage

MOST_SESSIONS = 1024
MOST_TENANTS = 256
SHOWN_SESSIONS = 200
SESSION_S = 3600.0
OTHERS = "other tenants"
"""Stands for the tenants beyond the bound."""

# tenant, engine, turns, prompt tokens and time of the last turn; prompt tokens of all turns whose
# answer reported a usage, and cached ones of these; harness, class and type of agent of the last
# turn, the harness's session, and the name of the session
_Session = tuple[Any, ...]
# requests; prompt tokens of those that reported a usage, and cached ones of these
_Totals = list[int]


class Activity:
    """One process's answered requests. Times are wall-clock seconds."""

    def __init__(self, started_s: float) -> None:
        self.history = History(started_s)
        self._sessions: dict[int, _Session] = {}
        self._tenants: dict[str, _Totals] = {}

    def add_tables(self, tables: Tables) -> None:
        """Shows the sizes of its tables."""
        tables.add("recent_sessions", lambda: len(self._sessions), lambda: MOST_SESSIONS)
        tables.add("recent_tenants", lambda: len(self._tenants), lambda: MOST_TENANTS)

    def add(
        self,
        now_s: float,
        tenant: str,
        session: int | None,
        engine: str,
        prompt_tokens: int,
        usage: Usage | None,
        ttft_s: float | None,
        facts: ClientFacts = NO_FACTS,
        name: str | None = None,
    ) -> None:
        """Adds an answered request. session: the number of its agent's conversation.
        prompt_tokens: an estimate, for answers that report none. ttft_s: None if the answer is an
        error. facts: of its client. name: of its session; None: the number."""
        prompt = cached = output = 0
        if usage is not None and usage.cached_tokens is not None:
            prompt = prompt_tokens = usage.prompt_tokens or prompt_tokens
            cached = usage.cached_tokens
            output = usage.output_tokens or 0
        self.history.add(now_s, ttft_s, prompt, cached, output)
        totals = self._tenants.get(tenant)
        if totals is None:
            row_name = tenant if len(self._tenants) < MOST_TENANTS else OTHERS
            totals = self._tenants.setdefault(row_name, [0, 0, 0])
        totals[0] += 1
        totals[1] += prompt
        totals[2] += cached
        if session is not None:
            row = self._sessions.get(session)
            turns = 1
            if row is not None:
                turns, prompt, cached = row[2] + 1, row[5] + prompt, row[6] + cached
            self._sessions[session] = (
                tenant if row is None else row[0],
                engine,
                turns,
                prompt_tokens,
                now_s,
                prompt,
                cached,
                facts.harness,
                facts.request_class,
                facts.agent_type,
                facts.session,
                f"{session:032x}" if name is None else name,
            )
            if row is None and len(self._sessions) > MOST_SESSIONS:
                self._drop_sessions()

    def _drop_sessions(self) -> None:
        """Drops those that were not used for longest, many at once."""
        rows = sorted(self._sessions.items(), key=lambda item: item[1][4])
        self._sessions = dict(rows[len(rows) // 4 :])

    def as_json(self, now_s: float) -> dict[str, Any]:
        """What `merged` adds up: the most recent sessions, and all tenants."""
        rows = [(id, *row) for id, row in self._sessions.items() if now_s - row[4] < SESSION_S]
        recent = sorted(rows, key=lambda row: -row[5])[:SHOWN_SESSIONS]
        return {
            "history": self.history.as_json(),
            "session_count": len(rows),
            "sessions": [[f"{id:032x}", *row] for id, *row in recent],
            "tenants": self._tenants,
        }


def merged(documents: Iterable[Mapping[str, Any]], now_s: float) -> dict[str, Any]:
    """`history`, `session_count`, `sessions`, the most recent first, `agents`, which are the rows
    of the sessions' agents, and `tenants`, those with the most requests first, of all processes.
    A share is null where no answer reported a usage."""
    documents = list(documents)
    agents: dict[str, list[Any]] = {}
    tenants: dict[str, _Totals] = {}
    for document in documents:
        for id, *row in document["sessions"]:
            agents[id] = _added(agents.get(id), row)
        for name, totals in document["tenants"].items():
            known_totals = tenants.get(name, (0, 0, 0))
            tenants[name] = [*map(sum, zip(known_totals, totals, strict=True))]
    sessions: dict[tuple[str, str], list[Any]] = {}
    for row in agents.values():
        key = row[0], row[-1]
        sessions[key] = _added(sessions.get(key), row)
    newest = sorted(sessions.values(), key=lambda row: -row[4])[:SHOWN_SESSIONS]
    largest = sorted(tenants.items(), key=lambda item: -item[1][0])
    # A session of several agents, or that several processes answered, counts once if all of its
    # rows are listed.
    repeated = sum(len(document["sessions"]) for document in documents) - len(sessions)
    return {
        "history": series((document["history"] for document in documents), now_s),
        "session_count": sum(document["session_count"] for document in documents) - repeated,
        "sessions": [_session(*row) for row in newest],
        "agents": [_session(*row) for row in agents.values()],
        "tenants": [
            {
                "name": name,
                "requests": requests,
                "prompt_tokens": prompt,
                "cached_share": _share(cached, prompt),
            }
            for name, (requests, prompt, cached) in largest
        ],
    }


def _added(known: list[Any] | None, row: Sequence[Any]) -> list[Any]:
    """Two rows as one: what the later of them says, and the sums of turns and tokens."""
    if known is None:
        return [*row]
    total = [*max(known, row, key=lambda each: float(each[4]))]
    for at in (2, 5, 6):
        total[at] = known[at] + row[at]
    return total


def _session(
    tenant: str,
    engine: str,
    turns: int,
    tokens: int,
    last_s: float,
    prompt: int,
    hit: int,
    harness: str,
    request_class: str,
    agent: str,
    harness_session: str,
    name: str,
) -> dict[str, Any]:
    return {
        "id": name,
        "tenant": tenant,
        "engine": engine,
        "turns": turns,
        "prompt_tokens": tokens,
        "cached_share": _share(hit, prompt),
        "last_s": round(last_s, 1),
        "harness": harness,
        "class": request_class or None,
        "agent": agent or None,
        "harness_session": harness_session or None,
    }


def _share(part: int, whole: int) -> float | None:
    return round(part / whole, 4) if whole else None
