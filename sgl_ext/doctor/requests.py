"""Past requests by the request log's lines: which ones a search finds, and why each took its time.

    search.run(lines, the latest first) --> {"requests": rows, "groups", "searched"}
    sentence(record) --> "waited 0 ms in the queue and 41 ms behind a prefill; ..."

A search reads a bounded number of lines for a bounded time. `searched` says how far it came, so
that what it did not read is not taken for what is not there.
"""

import heapq
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import orjson

from sgl_ext.doctor.report import MEANINGS

MOST_ROWS = 1000
MOST_LINES = 200_000
MOST_GROUPS = 50
# Processes write about once a second, so lines are in the order of their times but for that.
_LATE_S = 5.0
_TIME = re.compile(rb'"time":([0-9]{1,12}(?:\.[0-9]{1,9})?),')
_EVERY = 256
_BAD_REQUEST = 400
ERRORS, REFUSED = "errors", "refused"
STATUS = re.compile(r"[1-5][0-9][0-9]|[1-5]xx|errors|refused")
"""What a search for a status can name: one, a class of them, or one of these words."""


class Search(NamedTuple):
    """What is searched for; "" and 0 are any.

    session: the beginning of the session's id. model: that answered. status: as STATUS.
    since_s: the earliest time at which a request may have ended. request: the beginning of the id
    of a request.
    is_slow: those whose first token came latest, in place of the latest ones.
    """

    session: str = ""
    tenant: str | None = None
    model: str = ""
    status: str = ""
    since_s: float = 0.0
    request: str = ""
    is_slow: bool = False
    limit: int = 100

    def run(
        self, lines: Iterable[bytes], deadline_s: float, clock: Callable[[], float]
    ) -> dict[str, Any]:
        """The requests that it finds in these lines. The first line is the latest.

        Each row has what tables show and its sentence. `groups` counts, of all that it finds, those
        that ended in an error, by tenant, status and error. `searched.complete`: all lines since
        `since_s` were read.
        """
        needles, matches = self._needles(), 0
        rows: list[tuple[float, int, dict[str, Any]]] = []
        groups: Counter[tuple[str, int | None, str, str]] = Counter()
        reading = _Reading(lines, self.since_s, deadline_s, clock)
        for line in reading:
            if any(needle not in line for needle in needles):
                continue
            record = _record(line)
            if record is None or not self.matches(record):
                continue
            matches += 1
            if failed(record):
                group = (_text(record, "tenant"), record.get("status"))
                groups[
                    (
                        *group,
                        _text(record, "outcome"),
                        _text(record, "error") or _text(record, "error_type"),
                    )
                ] += 1
            if self.is_slow:
                heapq.heappush(rows, (_first_token_ms(record), -matches, row_of(record)))
                if len(rows) > self.limit:
                    heapq.heappop(rows)
            elif len(rows) < self.limit:
                rows.append((0.0, 0, row_of(record)))
            if matches >= self.limit and not self.is_slow and not self.since_s:
                reading.is_complete = False
                break
        if self.is_slow:
            rows.sort(reverse=True)
        return {
            "requests": [row for *_, row in rows],
            "found": matches,
            "groups": [
                {"tenant": tenant, "status": status, "outcome": outcome, "error": error or None}
                | {"requests": times}
                for (tenant, status, outcome, error), times in groups.most_common(MOST_GROUPS)
            ],
            "searched": {
                "lines": reading.count,
                "back_to_s": reading.earliest_s,
                "complete": reading.is_complete,
            },
        }

    def matches(self, record: Mapping[str, Any]) -> bool:
        """Whether a line's record is searched for."""
        status = record.get("status")
        if self.session and not _text(record, "session").startswith(self.session):
            return False
        if self.tenant is not None and _text(record, "tenant") != self.tenant:
            return False
        if self.model and record.get("served_model") != self.model:
            return False
        if self.request and not _text(record, "id").startswith(self.request):
            return False
        if not self.status:
            return True
        if self.status == REFUSED:
            return record.get("outcome") == "rejected"
        if self.status == ERRORS:
            return failed(record)
        if self.status.endswith("xx"):
            return isinstance(status, int) and status // 100 == int(self.status[0])
        return bool(status == int(self.status))

    def _needles(self) -> list[bytes]:
        """What each line that matches contains, so that no other line need be parsed."""
        needles = []
        if self.session:
            needles.append(b'"session":' + orjson.dumps(self.session)[:-1])
        if self.tenant is not None:
            needles.append(b'"tenant":' + orjson.dumps(self.tenant))
        if self.model:
            needles.append(b'"served_model":' + orjson.dumps(self.model))
        if self.request:
            needles.append(b'{"id":' + orjson.dumps(self.request)[:-1])
        if self.status.isdigit():
            needles.append(b'"status":%b,' % self.status.encode())
        if self.status == REFUSED:
            needles.append(b'"outcome":"rejected"')
        return needles


class _Reading:
    """The lines since a time, as many as may be read. Lines without a time are left out.

    earliest_s: the time of the last line that it gave. is_complete: it read all of them.
    """

    def __init__(
        self,
        lines: Iterable[bytes],
        since_s: float,
        deadline_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._lines = lines
        self._since_s = since_s
        self._deadline_s = deadline_s
        self._clock = clock
        self.count = 0
        self.earliest_s: float | None = None
        self.is_complete = True

    def __iter__(self) -> Iterator[bytes]:
        for line in self._lines:
            is_late = self.count % _EVERY == 0 and self._clock() > self._deadline_s
            if self.count >= MOST_LINES or is_late:
                self.is_complete = False
                return
            self.count += 1
            if (stated := _TIME.search(line)) is None:
                continue
            time_s = float(stated[1])
            if time_s >= self._since_s:
                self.earliest_s = time_s
                yield line
            elif time_s < self._since_s - _LATE_S:
                return


def _first_token_ms(record: Mapping[str, Any]) -> float:
    """When its first token came; of a request without one, when it ended."""
    return float(record.get("ttft_ms") or record.get("total_ms") or 0)


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = orjson.loads(line)
        return record if isinstance(record, dict) else None
    except orjson.JSONDecodeError:
        return None


def failed(record: Mapping[str, Any]) -> bool:
    """Whether it ended in an error; a client that leaves is none."""
    status, outcome = record.get("status"), record.get("outcome")
    is_error = isinstance(status, int) and status >= _BAD_REQUEST
    return is_error or outcome in ("rejected", "failed", "cut")


def _text(record: Mapping[str, Any], name: str) -> str:
    return str(record.get(name) or "")


def row_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """What a table shows of a request."""
    client = record.get("client")
    return {
        **{name: record.get(name) for name in ("id", "time", "route", "status", "outcome")},
        **{name: record.get(name) for name in ("error", "tenant", "session", "harness")},
        "version": client.get("version") if isinstance(client, dict) else None,
        **{name: record.get(name) for name in ("worker", "reason", "model", "served_model")},
        **{name: record.get(name) for name in ("queue_ms", "prefix_ms", "ttft_ms", "total_ms")},
        "prompt_tokens": record.get("counted_tokens") or record.get("prompt_tokens"),
        "cached_tokens": record.get("reported_tokens"),
        "output_tokens": record.get("output_tokens"),
        "attempts": record.get("attempts"),
        "sentence": sentence(record),
    }


def sentence(record: Mapping[str, Any]) -> str:
    """One sentence: where the time of a request of the log went, and how it ended."""
    outcome, error, status = (record.get(name) for name in ("outcome", "error", "status"))
    total, why = _ms(record.get("total_ms")), f": {error}" if error else ""
    why = why.rstrip(".")
    if outcome == "rejected":
        return f"refused with {status} after {total}, before any engine had it{why}"
    if outcome == "failed":
        tries = record.get("attempts") or 1
        times = "one attempt" if tries == 1 else f"{tries} attempts"
        return f"failed with {status} after {total} and {times}{why}"
    parts = [_waited(record), _cached(record)]
    if outcome == "disconnected":
        begun = record.get("ttft_ms")
        when = f"after its first token at {_ms(begun)}" if begun else "before its first token"
        parts.append(f"its client left after {total}, {when}")
    elif isinstance(status, int) and status >= _BAD_REQUEST:
        kind = f" ({record['error_type']})" if record.get("error_type") else ""
        parts.append(f"the engine answered {status}{kind} after {total}")
    else:
        parts.append(f"first token after {_ms(record.get('ttft_ms'))}")
    if outcome == "cut":
        parts.append(f"the answer was cut after {total}{why}")
    return "; ".join(part for part in parts if part)


def _waited(record: Mapping[str, Any]) -> str:
    """Where it waited. An engine's own queue is seen from outside: as what it had to compute."""
    prefix = float(record.get("prefix_ms") or 0)
    queue = max(float(record.get("queue_ms") or 0) - prefix, 0.0)
    text = f"waited {_ms(queue)} in the queue and {_ms(prefix)} behind a prefill"
    chosen = record.get("worker")
    rows = [row for row in record.get("workers") or () if row.get("name") == chosen]
    pending = rows[0].get("pending") if rows else 0
    if pending:
        text += f"; its engine had {pending:,} tokens of other prompts to compute"
    attempts = record.get("attempts") or 0
    return text + (f"; it was sent {attempts} times" if attempts > 1 else "")


def _cached(record: Mapping[str, Any]) -> str:
    """What was in the cache, and where the prompt diverged if it did."""
    prompt = record.get("counted_tokens") or record.get("prompt_tokens")
    cached, text = record.get("reported_tokens"), ""
    if prompt and cached is not None:
        text = f"{cached:,} of {prompt:,} tokens were cached"
    found = record.get("divergence")
    if isinstance(found, dict):
        kind = str(found.get("kind"))
        means = MEANINGS.get(kind, kind)
        text += ", as " if text else ""
        where = (
            f" at {found.get('block')}, byte {found.get('byte', 0):,}" if found.get("bytes") else ""
        )
        text += f"{means}{where}"
    return text


def _ms(value: object) -> str:
    """A time for people; those of a request are in milliseconds."""
    number = float(value) if isinstance(value, int | float) else 0.0
    if number < 10_000:
        return f"{number:,.0f} ms"
    return f"{number / 1000:,.1f} s"
