"""Finds the events of a balancer: it compares what its parts say with what they said before.

No request waits for that, and no part knows of events. Changes of engines are the same in every
process of a balancer, so the first process alone finds them.
"""

from collections.abc import Iterable

from sgl_ext.balancer.metrics.instruments import Counter
from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.balancer.reporting.event_log import EventLog
from sgl_ext.balancer.routing.worker import Worker
from sgl_ext.balancer.routing.workers import Workers

# What an engine's state is as an event. `ended` is the launcher's, which knows why.
_STATES = {
    "ready": "ready",
    "draining": "draining",
    "drained": "drained",
    "breaker open": "failing",
    "hung": "hung",
    "stalled": "stalled",
    "secret refused": "secret refused",
    "unreachable": "unreachable",
}


class EventWatch:
    """Call `look` once a second."""

    def __init__(
        self, events: EventLog, metrics: Metrics, workers: Workers, *, is_first: bool
    ) -> None:
        """is_first: whether this is the first process of its balancer."""
        self._events = events
        self._workers = workers
        self._is_first = is_first
        self._states: dict[str, str] | None = None
        self._names: set[str] = set()
        self._refused: dict[str, int] = {}
        limit = "limit reached"
        self._counters: list[tuple[Counter, str, str, str]] = [
            (metrics.requests_rejected, limit, "queue", "it was full, or requests waited too long"),
            (metrics.bodies_rejected, limit, "byte budget", "bodies and heads were rejected"),
            (metrics.connections_rejected, limit, "connections", "there were too many"),
            (metrics.retries_rejected, limit, "retries", "engines' 503 answers were passed on"),
            (metrics.request_log_dropped_lines, limit, "request log", "lines were dropped"),
            (
                metrics.limit_outages,
                "store failed",
                "store",
                "the limits of tenants are not shared",
            ),
        ]
        convicted = "it ended two engines, and is refused for some minutes"
        # Of counters with labels: a label that is meant, "" for any; without a subject, the first.
        self._labelled: list[tuple[Counter, str, str, str, str]] = [
            (metrics.store_events, "failed", "store failed", "store", "a read or write failed"),
            (metrics.suspect_requests, "convicted", "request convicted", "request", convicted),
            (metrics.tenant_rate_limited, "", limit, "", "the tenant was over a limit"),
        ]
        if is_first:
            kept = "it was changed and is wrong; its earlier content stays valid"
            self._labelled += [
                (metrics.membership_faults, "", "source failed", "", "it cannot be read"),
                (metrics.file_reloads, "refused", "reload refused", "", kept),
            ]
        self._counts = dict(self._now())

    def look(self) -> None:
        """Adds what has happened since the last call."""
        before, now = self._counts, dict(self._now())
        for key, count in now.items():
            if (more := count - before.get(key, 0)) > 0:
                kind, subject, text = key
                self._events.add(kind, subject, text, more)
        self._counts = now
        if self._is_first:
            self._look_at_engines()

    def _now(self) -> Iterable[tuple[tuple[str, str, str], int]]:
        for counter, kind, subject, text in self._counters:
            yield (kind, subject, text), counter.counts[()]
        for counter, meant, kind, subject, text in self._labelled:
            sums: dict[str, int] = {}
            for labels, count in counter.counts.items():
                if not meant or meant in labels:
                    shown = subject or str(labels[0])
                    sums[shown] = sums.get(shown, 0) + count
            for shown, count in sums.items():
                yield (kind, shown, text), count

    def _look_at_engines(self) -> None:
        workers = {worker.id: worker for worker in self._workers.all if not worker.is_gone}
        states = {name: worker.state for name, worker in workers.items()}
        before = self._states
        for name, worker in workers.items():
            if before is not None:
                self._note_state(worker, before.get(name), states[name])
            self._note_pins(worker, is_new=before is None)
        names = {worker.member.lasting_name for worker in workers.values()}
        for name in self._names - names:
            self._events.add("left", name)
        self._states, self._names = states, names
        self._refused = {name: self._refused.get(name, 0) for name in workers}

    def _note_state(self, worker: Worker, before: str | None, state: str) -> None:
        if before is None and worker.member.lasting_name not in self._names:
            self._events.add("added", worker.id, worker.url)
        if state == before or state not in _STATES:
            return
        if before is None and state != "ready":  # it starts
            return
        text = ""
        if state == "unreachable":
            text = worker.cause
        elif state == "draining" and worker.is_expected:
            text = "it restarts"
        self._events.add(_STATES[state], worker.id, text)

    def _note_pins(self, worker: Worker, *, is_new: bool) -> None:
        count = sum(worker.report.get("pins_declined", {}).values())
        more = count - self._refused.get(worker.id, 0)
        if more > 0 and not is_new:
            self._events.add("pins refused", worker.id, "marks got no pin: guide/pins.md", more)
        self._refused[worker.id] = count
