"""Which requests were routed for a prefix that their worker no longer held, and why.

A request is mispredicted if the worker read fewer tokens from its cache than the balancer
predicted, by more than TOLERANCE_TOKENS and a tenth. It is then one of:

    evicted in the queue   its worker withdrew some of the prefix after the request had arrived
                           here and before it was computed there: no balancer could have known
    within the lag         the same in the last LAG_S before it arrived: the event was on its way
    misrouted              otherwise: the balancer had had the time to know better ("stale"), or
                           the engine never withdrew the prefix ("unwithdrawn")

A request is computed when its worker's events say that it holds the prompt, or at its first byte
if that is earlier. The balancer predicts from engines' events and from the requests that it sent
there; both are judged.

A request that had to be sent again, though no engine was killed within the lag of its arrival,
was routed to a dead worker and is misrouted too.

Without events: the same requests on the same workers, as predicted by an index that remembers
what each worker was sent, and forgets only workers that died. It is a lower bound: such a
balancer would also have sent sessions back to prefixes that were evicted.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.lib.misroute.events import Diary
from bench.lib.misroute.load import Sent

LAG_S = 1.0
TOLERANCE_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Line:
    """A request that was answered, by the balancer's log and by its client."""

    sent: Sent
    worker: str
    reason: str
    predicted: int  # what was counted on, known or still being computed when it was placed
    reported: int
    is_booked: bool  # whether the balancer read the report off the answer, too
    arrived_s: float
    first_byte_s: float
    ended_s: float
    attempts: int


def read_log(log: Path, sent: Iterable[Sent], engines: Sequence[str]) -> list[Line]:
    """The log's lines of answered requests. What was cached is by the client's reading.

    engines: their URLs, by number.
    """
    by_key = {
        (f"{request.chain.session:032x}", len(request.chain.hashes)): request
        for request in sent
        if request.outcome == "answered"
    }
    lines = []
    for text in log.read_text().splitlines():
        entry = json.loads(text)
        request = by_key.get((entry["session"], entry["segments"]))
        if request is None or entry["status"] != 200:
            continue
        arrived_s = entry["time"] - entry["total_ms"] / 1000
        lines.append(
            Line(
                request,
                engines[_number(entry["worker"])],
                entry["reason"],
                entry["expected_tokens"],
                request.cached_tokens,
                entry["reported_tokens"] == request.cached_tokens,
                arrived_s,
                arrived_s + entry["ttft_ms"] / 1000,
                entry["time"],
                entry["attempts"],
            )
        )
    return lines


def _number(worker: str) -> int:
    """Of engine-1@NODE, and of engine-1.2@NODE, which is its second start: 1."""
    return int(worker.partition("@")[0].partition(".")[0].removeprefix("engine-"))


def fell_short(predicted: int, reported: int) -> bool:
    """Whether a worker held less than was counted on."""
    return predicted - reported > max(TOLERANCE_TOKENS, predicted / 10)


class Judge:
    """Verdicts by what the engines published and when they were killed."""

    def __init__(self, diary: Diary, kills: Sequence[tuple[float, str]]) -> None:
        self._diary = diary
        self._kills = kills

    def excuse(self, line: Line) -> str:
        """Why a shortfall is not the balancer's or the engine's mistake; "" if it is."""
        times = self._diary.withdrawn(line.worker, line.sent.chain.hashes)
        stored = self._diary.stored(line.worker, line.sent.chain.hashes[-1])
        computed_s = min([line.first_byte_s, *(at for at in stored if at >= line.arrived_s)])
        if any(line.arrived_s <= at <= computed_s for at in times):
            return "evicted_in_queue"
        if any(line.arrived_s - LAG_S <= at < line.arrived_s for at in times):
            return "within_lag"
        return ""

    def verdicts(self, line: Line) -> Counter[str]:
        """What there is to be said of one request, each thing counted once."""
        found = Counter(requests=1)
        if line.attempts > 1:
            found["retried"] = 1
            if not any(
                at - LAG_S <= line.ended_s and line.arrived_s <= at + LAG_S for at, _ in self._kills
            ):
                found["dead_worker"] = found["misrouted"] = 1
        if fell_short(line.predicted, line.reported):
            found["mispredicted"] = 1
            excuse = self.excuse(line)
            if not excuse:
                found["misrouted"] = 1
                excuse = "stale" if self._was_told(line) else "unwithdrawn"
            found[excuse] = 1
        return found

    def without_events(self, lines: Sequence[Line]) -> dict[int, Counter[str]]:
        """The same of an index that hears nothing, by the place of the line."""
        steps: list[tuple[float, int, Any]] = [(at, 0, worker) for at, worker in self._kills]
        for place, line in enumerate(lines):
            steps += [(line.arrived_s, 2, place), (line.ended_s, 1, place)]
        memory: defaultdict[str, dict[int, int]] = defaultdict(dict)
        found: dict[int, Counter[str]] = {}
        for _, what, which in sorted(steps, key=lambda step: step[:2]):
            if what == 0:
                memory.pop(which, None)
                continue
            line = lines[which]
            chain, known = line.sent.chain, memory[line.worker]
            if what == 1:
                for segment, end in zip(chain.hashes, chain.ends, strict=True):
                    known[segment] = line.sent.prompt_tokens * end // chain.ends[-1]
                continue
            predicted = next((known[s] for s in reversed(chain.hashes) if s in known), 0)
            missed = fell_short(predicted, line.reported)
            found[which] = Counter(
                mispredicted_without_events=int(missed),
                misrouted_without_events=int(missed and not self.excuse(line)),
            )
        return found

    def store_lags_ms(self, lines: Iterable[Line]) -> list[float]:
        """How long after a stream's first byte its prompt was heard to be held, if it was new."""
        lags = []
        for line in lines:
            times = self._diary.stored(line.worker, line.sent.chain.hashes[-1])
            if line.sent.streams and times and min(times) >= line.arrived_s:
                lags.append((min(times) - line.first_byte_s) * 1000)
        return lags

    def _was_told(self, line: Line) -> bool:
        """Whether the engine had withdrawn the prefix, and not stored it again, by then."""
        before = [
            at
            for at in self._diary.withdrawn(line.worker, line.sent.chain.hashes)
            if at < line.arrived_s
        ]
        return bool(before) and not any(
            max(before) < at < line.arrived_s
            for segment in line.sent.chain.hashes[1:]
            for at in self._diary.stored(line.worker, segment)
        )
