"""The state of the whole balancer and its engines as one document: `GET /sgl_ext/state`.

    part(services)  -- of each process, written to a file once a second --.
         |                                                                |
         '--> document(services, parts of the other processes) <----------'

docs/guide/operations.md describes its fields. What is not known is null. Lists are bounded: what
they leave out is the smallest or the oldest, and `counts` has how many there are.

GET /sgl_ext/state    the document
GET /sgl_ext/sessions all sessions of the last hour, by ?search=WORDS and &sort=ttft
GET /sgl_ext/live     `event: state` with it as `data:`, about once a second

The document is made when a client requests it, and one serves all clients of about that time. A
stream has no queue: each event is the latest document, so a client that reads slowly gets fewer of
them, and one that reads nothing is dropped.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from http import HTTPStatus
from itertools import islice
from typing import Any

import orjson
from aiohttp import web

from sgl_ext.balancer.admin.operations import SERVICES
from sgl_ext.balancer.relay.services import Services
from sgl_ext.balancer.reporting.activity import (
    MOST_SESSIONS,
    SHOWN_PROGRAMS,
    SORTS,
    last_minute,
    merged,
    programs_of,
    searched,
)
from sgl_ext.balancer.routing.models import MOST_MODELS
from sgl_ext.balancer.routing.worker import Worker
from sgl_ext.doctor.report import add_advice
from sgl_ext.key_file import MinuteLimits
from sgl_ext.protocols import routes
from sgl_ext.protocols.errors import BalancerError
from sgl_ext.reading.client import shown_name
from sgl_ext.version import versions

SHOWN_PINS = SHOWN_FOUND = 200
SHOWN_TENANTS = 100
SHOWN_DIVERGENCES = 50
SHOWN_PRIORITIES = 32
SHOWN_REASONS = 8


def part(services: Services, now_s: float) -> dict[str, Any]:
    """What only this process knows, for the documents of all. now_s: by the wall clock."""
    pools = services.models.all
    by_priority: Counter[int] = Counter()
    for pool in pools:
        by_priority.update(pool.queue.by_priority())
    return {
        "activity": services.activity.as_json(now_s),
        "queue": {
            "limit": sum(pool.queue.limit for pool in services.models.listed or pools[:1]),
            "by_priority": [*by_priority.items()],
            "by_model": {pool.name: len(pool.queue) for pool in services.models.listed},
        },
        "cached": {
            worker.id: services.hit_rates.recent(worker.id) for worker in services.workers.all
        },
        "saved_bytes": services.metrics.saved_bytes.counts[()],
        "failures": services.activity.failures.as_json(),
    }


def document(
    services: Services, children: Sequence[Mapping[str, Any]], now_s: float
) -> dict[str, Any]:
    """The state of the whole balancer.

    children: what the launcher tells of its processes. now_s: by the wall clock.
    """
    others = [orjson.loads(text) for text in services.whole.other_states()]
    parts = [part(services, now_s), *others]
    activity = merged((each["activity"] for each in parts), now_s)
    hashes = services.router.hashes_sessions
    pins = _pins(services.workers.all, asyncio.get_running_loop().time(), hashes=hashes)
    tenants, tenant_count = _tenants(services, activity["tenants"])
    divergences = _divergences(services.whole.divergences())
    programs = programs_of(activity["agents"])
    workers, started = services.workers, {each.get("url"): each for each in children}
    ready, wanted = workers.readiness()
    return {
        "version": versions()._asdict(),
        "node": {
            "status": services.status,
            "engines_ready": ready,
            "engines_wanted": wanted,
            "started_s": round(min(each["activity"]["history"]["started_s"] for each in parts), 3),
            "now_s": round(now_s, 3),
            "in_flight": sum(_in_flight(worker) for worker in workers.all),
            "model": services.models.default.name or None,
            "saved_bytes": sum(each.get("saved_bytes", 0) for each in parts),
        },
        "engines": [
            _engine(worker, started.get(worker.url, {}), _hit_rate([worker], parts))
            for worker in workers.all
        ],
        "models": _models(services, parts),
        "queue": _queue(parts),
        "failures": last_minute((each.get("failures", ()) for each in parts), now_s),
        "recent": activity["history"].pop("recent"),
        "history": activity["history"],
        "programs": programs[:SHOWN_PROGRAMS],
        "sessions": activity["sessions"],
        "pins": pins[:SHOWN_PINS],
        "divergences": divergences[:SHOWN_DIVERGENCES],
        "tenants": tenants,
        "counts": {
            "programs": len(programs),
            "sessions": activity["session_count"],
            "pins": len(pins),
            "divergences": len(divergences),
            "tenants": tenant_count,
        },
    }


def _engine(worker: Worker, child: Mapping[str, Any], hit_rate: float | None) -> dict[str, Any]:
    """child: what its launcher tells of it, if it has one here."""
    state = _state(worker, is_starting=child.get("state") == "starting")
    report = worker.report
    total, used = report.get("capacity_tokens", 0), report.get("used_tokens", 0)
    kv = {
        "used_tokens": used,
        "pinned_tokens": report.get("pinned_tokens", 0),
        "free_tokens": max(total - used, 0),
        "total_tokens": total,
    }
    return {
        "id": worker.id,
        "url": worker.url,
        "model": worker.model or None,
        "state": state,
        "fault": worker.fault or None,
        "note": _note(worker) or None if state == "ready" else None,
        "stage": child.get("stage") if state == "starting" else None,
        "progress": child.get("progress") if state == "starting" else None,
        "running": report.get("running"),
        "waiting": report.get("queued"),
        "in_flight": _in_flight(worker),
        "kv": kv if total else None,
        "pin_budget_tokens": report.get("pin_budget_tokens"),
        "pins_declined": _declined(report),
        "hit_rate": hit_rate,
        "restarts": child.get("restarts"),
        "crashes": child.get("crashes"),
        "last_exit": child.get("last_exit"),
    }


def _declined(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The marks that got no pin, by the reason, the most first."""
    counted = report.get("pins_declined", {})
    rows = sorted(counted.items(), key=lambda item: (-item[1], item[0]))[:SHOWN_REASONS]
    return [{"reason": reason, "marks": marks} for reason, marks in rows]


def _note(worker: Worker) -> str:
    """What works less well than usual."""
    off = f"caches off: {', '.join(worker.caches_off)}" if worker.caches_off else ""
    less = ""
    if worker.degraded:
        less = f"with less: {', '.join(worker.degraded)} (docs/guide/models.md)"
    return "; ".join(note for note in (worker.unpublished, off, less) if note)


def _state(worker: Worker, *, is_starting: bool) -> str:
    if worker.ready and not worker.draining:
        return "stalled" if worker.is_stalled else "ready"
    if is_starting:
        return "starting"
    if worker.draining:
        return worker.state
    return "unreachable" if worker.was_ready or worker.fault else "starting"


def _in_flight(worker: Worker) -> int:
    return worker.in_flight + worker.peer_load.in_flight


def _hit_rate(workers: Sequence[Worker], parts: Iterable[Mapping[str, Any]]) -> float | None:
    cached = prompt = 0
    for each in parts:
        for worker in workers:
            hits, tokens = each["cached"].get(worker.id, (0, 0))
            cached, prompt = cached + hits, prompt + tokens
    return round(cached / prompt, 4) if prompt else None


def _models(services: Services, parts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each model, with what waits for it in all processes, and the hit rate of its engines."""
    rows = services.models.rows()
    for row in rows:
        waiting = (each["queue"].get("by_model", {}).get(row["name"], 0) for each in parts)
        row["waiting"] = sum(waiting)
        own = [worker for worker in services.workers.all if worker.model == row["name"]]
        row["in_flight"] = sum(map(_in_flight, own))
        row["hit_rate"] = _hit_rate(own, parts)
    return rows


def _queue(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    waiting: Counter[int] = Counter()
    limit = 0
    for each in parts:
        limit += each["queue"]["limit"]
        waiting.update(dict(each["queue"]["by_priority"]))
    rows = sorted(waiting.most_common(SHOWN_PRIORITIES), reverse=True)
    return {
        "limit": limit,
        "waiting": waiting.total(),
        "by_priority": [{"priority": priority, "waiting": count} for priority, count in rows],
    }


def _pins(workers: Iterable[Worker], now_s: float, *, hashes: bool) -> list[dict[str, Any]]:
    """The pins of all engines, the largest first. Their sessions have the names of `sessions`."""
    heard = [worker for worker in workers if worker.state != "drained"]
    rows = [row | {"worker": worker.id} for worker in heard for row in worker.pins.rows(now_s)]
    for row in rows:
        row["session"] = shown_name(row["session"], row["owner"], hashes=hashes)
    return sorted(rows, key=lambda row: (-row["tokens"], row["prefix"], row["worker"]))


def _divergences(found: dict[str, Any]) -> list[dict[str, Any]]:
    """The doctor's table as one list, the rows that cost most first."""
    add_advice(found)
    rows = [
        {"harness": entry["harness"], "model": entry["model"], **row}
        for entry in found["harnesses"]
        for row in entry["findings"]
    ]
    return sorted(rows, key=lambda row: (-row["tokens"], -row["times"]))


def _tenants(
    services: Services, found: Sequence[dict[str, Any]]
) -> tuple[list[dict[str, Any]], int]:
    """The tenants with requests, and then those of the key file without, and how many these are."""
    key_file = services.rate_limits.key_file
    keys = None if key_file is None else key_file.keys
    named = {row["name"] for row in found}
    idle = [] if keys is None else sorted(keys.tenants - named)
    none = {"requests": 0, "prompt_tokens": 0, "cached_share": None}
    rows = [*found, *({"name": name, **none} for name in idle[:SHOWN_TENANTS])][:SHOWN_TENANTS]
    for row in rows:
        row["limits"] = None
        if keys is not None and row["name"] in keys.tenants:
            allowance = keys.allowance(row["name"])
            row["limits"] = {
                **_per_minute(allowance),
                "max_priority": services.tenants.of(row["name"]).max_priority,
                "models": {
                    model: _per_minute(of)
                    for model, of in islice(allowance.models.items(), MOST_MODELS)
                },
            }
    return rows, len(named) + len(idle)


def _per_minute(limits: MinuteLimits) -> dict[str, float | None]:
    return {
        "requests_per_minute": limits.requests_per_minute,
        "tokens_per_minute": limits.tokens_per_minute,
    }


SESSIONS = "/sgl_ext/sessions"
_MOST_WORDS = 200


async def find_sessions(request: web.Request) -> web.Response:
    """Sessions of the last hour that a search finds, in an order: of all processes, in a thread."""
    query, states = request.query, request.app[STATES]
    words, sort = query.get("search", "")[:_MOST_WORDS], query.get("sort", "last")
    if sort not in SORTS:
        message = f"sort: must be one of {', '.join(SORTS)}, not {sort!r}"
        raise BalancerError(HTTPStatus.BAD_REQUEST, message)
    sessions = await states.sessions()
    rows, count = await asyncio.to_thread(searched, sessions, words, sort, SHOWN_FOUND)
    document = {"sessions": rows, "count": count, "of": len(sessions)}
    headers = {"cache-control": "no-store"}
    body = orjson.dumps(document)
    return web.Response(body=body, content_type="application/json", headers=headers)


MOST_STREAMS = 16
_SLOW_S = 10.0
_RETRY_AFTER_S = 10


class States:
    """The latest document as JSON.

    interval_s: how long it is the latest, and the time between two events of a stream.
    streams: how many streams are open.
    """

    def __init__(self, services: Services, interval_s: float) -> None:
        self.interval_s = interval_s
        self.streams = 0
        self._services = services
        self._json = b""
        self._making, self._merging = asyncio.Lock(), asyncio.Lock()
        self._sessions: list[dict[str, Any]] = []
        self._merged_s = float("-inf")
        self._made_s = float("-inf")
        services.metrics.live_streams.set_function(lambda: self.streams)
        add_table = services.metrics.tables.add
        add_table("live_streams", lambda: self.streams, lambda: MOST_STREAMS)

    async def latest(self) -> bytes:
        """The document."""
        # Streams that wake together share one.
        async with self._making:
            if time.monotonic() - self._made_s >= self.interval_s / 2:
                self._json = await self._make()
                self._made_s = time.monotonic()
        return self._json

    async def sessions(self) -> list[dict[str, Any]]:
        """All sessions of the last hour, as of about now. Those who ask together share them."""
        async with self._merging:
            if time.monotonic() - self._merged_s >= self.interval_s:
                services, now_s = self._services, time.time()
                activity = services.activity.as_json(now_s)
                self._sessions = await asyncio.to_thread(_sessions, services, activity, now_s)
                self._merged_s = time.monotonic()
        return self._sessions

    async def _make(self) -> bytes:
        await asyncio.to_thread(versions)  # which may run git, the first time
        children = await self._services.launcher.children()
        events = await asyncio.to_thread(self._services.events.latest)
        return orjson.dumps({"events": events} | document(self._services, children, time.time()))


def _sessions(
    services: Services, activity: Mapping[str, Any], now_s: float
) -> list[dict[str, Any]]:
    others = [orjson.loads(text)["activity"] for text in services.whole.other_states()]
    found: list[dict[str, Any]] = merged([activity, *others], now_s, MOST_SESSIONS)["sessions"]
    return found


STATES = web.AppKey("states", States)


async def show(request: web.Request) -> web.Response:
    body = await request.app[STATES].latest()
    headers = {"cache-control": "no-store"}
    return web.Response(body=body, content_type="application/json", headers=headers)


async def stream(request: web.Request) -> web.StreamResponse:
    states, services = request.app[STATES], request.app[SERVICES]
    dropped = services.metrics.live_streams_dropped.counts
    if states.streams >= MOST_STREAMS:
        dropped[("many",)] += 1
        message = f"At most {MOST_STREAMS} live streams may be open."
        raise BalancerError(HTTPStatus.SERVICE_UNAVAILABLE, message, _RETRY_AFTER_S)
    response = web.StreamResponse(headers={"cache-control": "no-store"})
    response.content_type = "text/event-stream"
    states.streams += 1
    try:
        await response.prepare(request)
        while True:
            event = b"event: state\ndata: %b\n\n" % await states.latest()
            async with asyncio.timeout(_SLOW_S):
                await response.write(event)
            if services.draining:  # the last event says so, and the balancer need not wait
                return response
            await asyncio.sleep(states.interval_s)
    except TimeoutError:
        dropped[("slow",)] += 1
        return response
    finally:
        states.streams -= 1


STATE_ROUTES = (
    web.route("GET", routes.STATE, show),
    web.route("GET", routes.LIVE, stream),
    web.route("GET", SESSIONS, find_sessions),
)
