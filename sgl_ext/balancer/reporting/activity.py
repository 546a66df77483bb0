"""The recently answered requests: their history, sessions and tenants, in bounded tables.

Each process of a balancer has its own. `merged` adds up the `as_json` of all of them. An agent is
one conversation. A session is what its client names: the agents that state no id of their own are
one session.

The history has the requests of the last hour, summed by interval: hit rate, TTFT, requests and
tokens a second. Intervals are numbered by the wall clock, so those of several processes are the
same, and their sums add up. An interval without requests takes no memory. TTFTs are counted in
buckets whose bounds grow by GROWTH, so a quantile is off by about 5% at most.
"""

import re
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from math import ceil, log
from typing import Any

from sgl_ext.balancer.metrics.instruments import Labels, Tables
from sgl_ext.reading.client import NO_FACTS, OF_NO_AGENT, OF_SUBAGENTS, SDK, UNKNOWN, ClientFacts
from sgl_ext.reading.usage import Usage

INTERVAL_S = 10
HISTORY_INTERVALS = 360
_RECENT = 6
GROWTH = 1.1
_SHORTEST_S = 0.0001
_PER_LOG = 1 / log(GROWTH)

# Requests; tokens of the prompts whose answers reported a usage, cached ones, output tokens.
_Sums = list[int]
_Counts = dict[float, int]
_Interval = tuple[_Sums, _Counts]


class History:
    """One process's sums, by interval. Times are wall-clock seconds."""

    def __init__(self, started_s: float) -> None:
        self._started_s = started_s
        self._intervals: dict[float, _Interval] = {}
        self._latest: float | None = None
        self._interval = _nothing()

    def add(
        self, now_s: float, ttft_s: float | None, prompt: int, cached: int, output: int
    ) -> None:
        """Adds an answered request. ttft_s: None if it does not count. The tokens are 0 if the
        answer reported no usage."""
        number = now_s // INTERVAL_S
        if number != self._latest:
            self._latest, self._interval = (
                number,
                self._intervals.get(number) or self._begin(number),
            )
        sums, counts = self._interval
        sums[0] += 1
        if prompt:
            sums[1] += prompt
            sums[2] += cached
            sums[3] += output
        if ttft_s is not None:
            bucket = log(ttft_s if ttft_s > _SHORTEST_S else _SHORTEST_S) * _PER_LOG // 1
            counts[bucket] = counts.get(bucket, 0) + 1

    def _begin(self, number: float) -> _Interval:
        for old in [
            each for each in self._intervals if not number - HISTORY_INTERVALS <= each <= number
        ]:
            del self._intervals[old]
        interval = self._intervals[number] = ([0, 0, 0, 0], {})
        return interval

    def as_json(self) -> dict[str, Any]:
        """What `series` adds up."""
        rows = [
            [int(number), sums, [*counts.items()]]
            for number, (sums, counts) in self._intervals.items()
        ]
        return {"started_s": self._started_s, "intervals": rows}


def series(documents: Iterable[Mapping[str, Any]], now_s: float) -> dict[str, Any]:
    """The history of all processes, from their `as_json`: one value for each interval that is
    complete, the oldest first, since the first process began, for an hour at most.

    `recent` has the values of the last minute together. A rate is null where no prompt, and a TTFT
    where no answer, is known.
    """
    documents = list(documents)
    end = int(now_s) // INTERVAL_S
    began = min((document["started_s"] for document in documents), default=now_s)
    first = max(end - HISTORY_INTERVALS, int(began) // INTERVAL_S)
    found: dict[int, _Interval] = {}
    for document in documents:
        for number, sums, counts in document["intervals"]:
            if first <= number < end:
                _add(found.setdefault(number, _nothing()), sums, counts)
    intervals = [found.get(number) or _nothing() for number in range(first, end)]
    last_minute = _nothing()
    for sums, buckets in intervals[-_RECENT:]:
        _add(last_minute, sums, buckets.items())
    span_s = INTERVAL_S * len(intervals[-_RECENT:])
    values = [_values(interval, INTERVAL_S) for interval in intervals]
    names = _values(_nothing(), INTERVAL_S)
    return {
        "interval_s": INTERVAL_S,
        "end_s": end * INTERVAL_S,
        **{name: [each[name] for each in values] for name in names},
        "recent": {"span_s": span_s, **_values(last_minute, span_s)},
    }


def _nothing() -> _Interval:
    return [0, 0, 0, 0], {}


def _add(to: _Interval, sums: _Sums, counts: Iterable[tuple[float, int]]) -> None:
    to[0][:] = map(sum, zip(to[0], sums, strict=True))
    for bucket, count in counts:
        to[1][bucket] = to[1].get(bucket, 0) + count


def _values(interval: _Interval, span_s: int) -> dict[str, float | None]:
    (requests, prompt, cached, output), counts = interval
    return {
        "hit_rate": round(cached / prompt, 4) if prompt else None,
        "ttft_p50_s": _quantile(counts, 0.5),
        "ttft_p99_s": _quantile(counts, 0.99),
        "requests_per_s": round(requests / span_s, 2) if span_s else None,
        "output_tokens_per_s": round(output / span_s, 1) if span_s else None,
    }


def _quantile(counts: _Counts, share: float) -> float | None:
    """The geometric middle of the bucket with the quantile; None without counts."""
    rank = ceil(sum(counts.values()) * share)
    for bucket in sorted(counts):
        rank -= counts[bucket]
        if rank <= 0:
            return float(f"{GROWTH ** (bucket + 0.5):.3g}")
    return None


MOST_SESSIONS = 1536
MOST_TENANTS = 256
SHOWN_SESSIONS = 200
SESSION_S = 3600.0
OTHERS = "other tenants"
"""Stands for the tenants beyond the bound."""

# tenant, engine, turns, prompt tokens and time of the last turn; prompt tokens of all turns whose
# answer reported a usage, and cached ones of these; times to the first token, their number, and the
# requests that ended in an error; harness, class and type of agent of the last turn, the harness's
# session, and the name of the session
_Session = tuple[Any, ...]
# requests; prompt tokens of those that reported a usage, and cached ones of these
_Totals = list[int]


class Activity:
    """One process's answered requests. Times are wall-clock seconds."""

    def __init__(self, started_s: float) -> None:
        self.history = History(started_s)
        self.failures = Failures()
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
            turns, firsts, errors = 1, int(ttft_s is not None), int(ttft_s is None)
            waited_s = ttft_s or 0.0
            if row is not None:
                turns, prompt, cached = row[2] + 1, row[5] + prompt, row[6] + cached
                waited_s, firsts, errors = row[7] + waited_s, row[8] + firsts, row[9] + errors
            self._sessions[session] = (
                tenant if row is None else row[0],
                engine,
                turns,
                prompt_tokens,
                now_s,
                prompt,
                cached,
                waited_s,
                firsts,
                errors,
                facts.harness,
                facts.request_class,
                facts.agent_type,
                facts.session,
                f"{session:032x}" if name is None else name,
            )
            if row is None and len(self._sessions) > MOST_SESSIONS:
                self._drop_sessions()

    def add_error(
        self,
        now_s: float,
        tenant: str,
        session: int,
        engine: str,
        prompt_tokens: int,
        facts: ClientFacts,
        name: str | None,
    ) -> None:
        """Adds a request that the balancer refused, or that ended in an error."""
        row = self._sessions.get(session)
        if row is not None:
            kept = [*row]
            kept[4], kept[9] = now_s, row[9] + 1
            self._sessions[session] = tuple(kept)
            return
        of_client = facts.harness, facts.request_class, facts.agent_type, facts.session
        shown = f"{session:032x}" if name is None else name
        totals = 0, 0, 0.0, 0, 1
        about = tenant, engine, 0, prompt_tokens, now_s
        self._sessions[session] = (*about, *totals, *of_client, shown)
        if len(self._sessions) > MOST_SESSIONS:
            self._drop_sessions()

    def _drop_sessions(self) -> None:
        """Drops those that were not used for longest, many at once."""
        rows = sorted(self._sessions.items(), key=lambda item: item[1][4])
        self._sessions = dict(rows[len(rows) // 4 :])

    def as_json(self, now_s: float) -> dict[str, Any]:
        """What `merged` adds up: the sessions, the most recent first, and all tenants."""
        rows = [(id, *row) for id, row in self._sessions.items() if now_s - row[4] < SESSION_S]
        recent = sorted(rows, key=lambda row: -row[5])
        return {
            "history": self.history.as_json(),
            "session_count": len(rows),
            "sessions": [[f"{id:032x}", *row] for id, *row in recent],
            "tenants": self._tenants,
        }


def merged(
    documents: Iterable[Mapping[str, Any]], now_s: float, most: int = SHOWN_SESSIONS
) -> dict[str, Any]:
    """`history`, `session_count`, `sessions`, the most recent first, `agents`, which are the rows
    of the sessions' agents, and `tenants`, those with the most requests first, of all processes.
    A share is null where no answer reported a usage. most: sessions of each process, and of all."""
    documents = list(documents)
    agents: dict[str, list[Any]] = {}
    tenants: dict[str, _Totals] = {}
    for document in documents:
        for id, *row in document["sessions"][:most]:
            agents[id] = _added(agents.get(id), row)
        for name, totals in document["tenants"].items():
            known_totals = tenants.get(name, (0, 0, 0))
            tenants[name] = [*map(sum, zip(known_totals, totals, strict=True))]
    sessions: dict[tuple[str, str], list[Any]] = {}
    for row in agents.values():
        key = row[0], row[-1]
        sessions[key] = _added(sessions.get(key), row)
    newest = sorted(sessions.values(), key=lambda row: -row[4])[:most]
    largest = sorted(tenants.items(), key=lambda item: -item[1][0])
    # A session of several agents, or that several processes answered, counts once if all of its
    # rows are listed.
    repeated = sum(len(each["sessions"][:most]) for each in documents) - len(sessions)
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
    for at in (2, 5, 6, 7, 8, 9):
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
    waited_s: float,
    firsts: int,
    errors: int,
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
        "ttft_s": round(waited_s / firsts, 4) if firsts else None,
        "errors": errors,
        "last_s": round(last_s, 1),
        "harness": harness,
        "class": request_class or None,
        "agent": agent or None,
        "harness_session": harness_session or None,
    }


def _share(part: int, whole: int) -> float | None:
    return round(part / whole, 4) if whole else None


SORTS: Mapping[str, tuple[str, bool]] = {
    "last": ("last_s", True),
    "ttft": ("ttft_s", True),
    "errors": ("errors", True),
    "turns": ("turns", True),
    "prompt": ("prompt_tokens", True),
    "cached": ("cached_share", False),
}
"""What sessions are sorted by: the field, and whether the largest is first."""


def searched(
    sessions: Iterable[Mapping[str, Any]], words: str, sort: str, limit: int
) -> tuple[list[Mapping[str, Any]], int]:
    """The sessions that have all of these words in their names, in this order, and how many there
    are. Those without the figure are last."""
    wanted = words.lower().split()
    named = ("id", "tenant", "engine", "harness", "class", "agent")
    found = []
    for session in sessions:
        text = " ".join(str(session[name] or "") for name in named).lower()
        if all(word in text for word in wanted):
            found.append(session)
    field, is_reversed = SORTS[sort]
    sign = -1 if is_reversed else 1
    found.sort(key=lambda each: (each[field] is None, sign * (each[field] or 0), -each["last_s"]))
    return found[:limit], len(found)


HIT_RATE_S = 10.0
HIT_RATE_SAMPLES = 30

Pair = tuple[int, int]


class HitRates:
    """Samples two counters by engine, so that it knows their increase in the last five minutes.

    cached, prompt: the counters of reported cached tokens, and of these prompts' tokens.
    """

    def __init__(self, cached: Mapping[Labels, int], prompt: Mapping[Labels, int]) -> None:
        self._cached = cached
        self._prompt = prompt
        self._samples: dict[str, deque[Pair]] = {}
        self._sampled_s = float("-inf")

    def sample(self, now_s: float, engines: Sequence[str]) -> None:
        """Call it periodically with all engines; it forgets the others."""
        if now_s - self._sampled_s < HIT_RATE_S:
            return
        self._sampled_s = now_s
        nothing: deque[Pair] = deque([(0, 0)], maxlen=HIT_RATE_SAMPLES)
        self._samples = {name: self._samples.get(name) or nothing.copy() for name in engines}
        for name, samples in self._samples.items():
            samples.append(self._totals(name))

    def recent(self, engine: str) -> Pair:
        """Cached tokens, and tokens of the prompts, since the oldest sample."""
        samples = self._samples.get(engine)
        before = samples[0] if samples else (0, 0)
        now = self._totals(engine)
        if now < before:  # the engine left, and another came that has its name
            before = (0, 0)
        return now[0] - before[0], now[1] - before[1]

    def _totals(self, engine: str) -> Pair:
        return self._cached.get((engine,), 0), self._prompt.get((engine,), 0)


SHOWN_PROGRAMS = 100


def programs_of(agents: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The programs of agents, as `activity.merged` has them, the one with the latest request first.
    A session whose client names none is left out, and so is a single one of no harness that is
    known. What a harness sends beside its agents is part of the program, and no agent of it.
    `cached_share` is the mean of the agents' shares, weighted by the tokens of their last prompts.
    """
    found: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for agent in agents:
        if name := agent["harness_session"]:
            found.setdefault((agent["tenant"], name), []).append(agent)
    programs = [
        _program(tenant, name, agents)
        for (tenant, name), agents in found.items()
        if len(agents) > 1 or agents[0]["harness"] not in (SDK, UNKNOWN)
    ]
    return sorted(programs, key=lambda program: -program["last_s"])


def _program(tenant: str, name: str, agents: list[Mapping[str, Any]]) -> dict[str, Any]:
    shares = [one for one in agents if one["cached_share"] is not None]
    tokens = sum(one["prompt_tokens"] for one in shares)
    cached = sum(one["cached_share"] * one["prompt_tokens"] for one in shares)
    return {
        "session": name,
        "tenant": tenant,
        "harness": agents[0]["harness"],
        "agents": max(sum(one["class"] not in OF_NO_AGENT for one in agents), 1),
        "subagents": sum(one["class"] in OF_SUBAGENTS for one in agents),
        "turns": sum(one["turns"] for one in agents),
        "prompt_tokens": sum(one["prompt_tokens"] for one in agents),
        "cached_share": round(cached / tokens, 4) if tokens else None,
        "engines": len({one["engine"] for one in agents}),
        "last_s": max(one["last_s"] for one in agents),
    }


# What a node refused or failed of late, by reason: of each process, and of all in the last minute.
#
# A reason is the error's message without its numbers, so reasons are few. An engine's own error has
# its status in place of its words. Wrong requests, whose answers are the clients' fault, are not
# counted.

_FAILURE_INTERVALS = 6
MOST_REASONS = 32
OTHER_REASONS = "other reasons"
_NUMBER = re.compile(r"\d[\d.e+]*")
_TOO_MANY, _SERVER_ERROR = 429, 500


def reason_of(status: int | None, outcome: str, error: str | None) -> str | None:
    """Why a request was refused or failed; None if it was neither. outcome, error: as its line of
    the request log has them."""
    if outcome == "cut":
        return "A stream was cut."
    if status is None or (status != _TOO_MANY and status < _SERVER_ERROR):
        return None
    if error is None or outcome == "complete":
        return f"An engine answered {status}."
    return _NUMBER.sub("N", error)


class Failures:
    """One process's failures of the last minute. Times are wall-clock seconds."""

    def __init__(self) -> None:
        self._intervals: dict[int, Counter[str]] = {}
        self._reasons: set[str] = set()

    def add(self, now_s: float, reason: str) -> str:
        """Counts one. Returns the reason that it counts under, one of MOST_REASONS."""
        if reason not in self._reasons:
            if len(self._reasons) >= MOST_REASONS:
                reason = OTHER_REASONS
            self._reasons.add(reason)
        number = int(now_s) // INTERVAL_S
        if number not in self._intervals:
            oldest = number - _FAILURE_INTERVALS
            self._intervals = {at: c for at, c in self._intervals.items() if at >= oldest}
            self._intervals[number] = Counter()
        self._intervals[number][reason] += 1
        return reason

    def as_json(self) -> list[Any]:
        """What `last_minute` adds up."""
        return [[number, dict(counts)] for number, counts in self._intervals.items()]


def last_minute(documents: Iterable[Iterable[Any]], now_s: float) -> list[Mapping[str, Any]]:
    """How many requests were refused or failed within the last minute in all processes, by reason,
    the most frequent first."""
    total: Counter[str] = Counter()
    first = int(now_s) // INTERVAL_S - _FAILURE_INTERVALS
    for document in documents:
        for number, counts in document:
            if number > first:
                total.update(counts)
    return [{"reason": reason, "count": count} for reason, count in total.most_common()]
