"""Administration: adds and drains workers, restarts engines, explains placements, reloads.

GET    /sgl_ext/workers                         every worker and its state, and every source
POST   /sgl_ext/workers  {"url": "http://..."}  adds a worker, or ends its draining; with
                                                "wait": false one that is new must answer now
DELETE /sgl_ext/workers?url=http://...          drains a worker: it gets no new requests, and
                                                is drained after its last one; also ?id=...
GET    /v1/pins                                 the pinned prefixes of every engine, with its id
                                                and its data-parallel rank
DELETE /v1/pins?prefix=HASH                     deletes pins at every engine; also ?session=ID; with
                                                &worker=ID at this one
GET    /sgl_ext/divergences                     where prompts diverge from earlier ones
POST   /sgl_ext/explain/v1/messages             where this request would go, and why; every path
                                                whose requests are placed
GET    /sgl_ext/usage?month=2026-11             what tenants and their keys used on each day
GET    /sgl_ext/requests                        past requests, the latest first, with what took
                                                each its time: `doctor/requests.py`. Any of
                                                ?session=BEGIN, &tenant=NAME, &id=BEGIN, &limit=N,
                                                &status=529, 5xx, errors or refused, &since=SECONDS
                                                ago, or &after=TIME; &slow=1: the slowest first
GET    /sgl_ext/requests/ID                     the request log's line of the latest request with
                                                this id; without a request log, of the latest
                                                requests. 404 if there is none
POST   /sgl_ext/reload                          reads the file of settings again, and applies what
                                                can change, as SIGHUP does
POST   /sgl_ext/restart                         restarts engines through the launcher of this node,
                                                one after another: 202 with the restart that begins
GET    /sgl_ext/restart                         the last restart

A reload answers {"changed": [KEY, ..], "unchanged_until_restart": [{"key", "why"}, ..],
"engines": [{"id", "applied", "why"}, ..]}; 400 if the file is wrong, naming the table, the key and
the value, and 409 if there is no file: then nothing changes.

A restart takes {"engine": NAME or null, "model_path": PATH or null, "engine_args": [..] or null};
`null` keeps what there is. It is shown as {"id", "state": "running" | "done" | "failed", "error":
null or text, "engines": [{"name", "state": "waiting" | "draining" | "stopping" | "starting" |
"ready" | "failed", "reason"}]}.
"""

import asyncio
import os
import re
import time
from collections.abc import Awaitable, Mapping, Sequence
from http import HTTPStatus
from typing import Any

import aiohttp
import orjson
from aiohttp import web

from sgl_ext import pin_mirror
from sgl_ext.balancer.cluster.launcher import Answer, Launcher, LauncherUnreachable
from sgl_ext.balancer.relay.reading import ReadPlan, parse_json
from sgl_ext.balancer.relay.services import Services
from sgl_ext.balancer.reporting.request_log import SearchTooLong
from sgl_ext.balancer.routing.router import explain
from sgl_ext.balancer.routing.worker import Worker
from sgl_ext.balancer.routing.worker_probes import WorkerProbes
from sgl_ext.balancer.routing.workers import MOST_ADDED, Workers
from sgl_ext.balancer.store.documents import StoreFailed
from sgl_ext.doctor.requests import MOST_ROWS, STATUS, Search
from sgl_ext.protocols import routes
from sgl_ext.protocols.errors import BalancerError, no_engine
from sgl_ext.protocols.request_ids import is_valid_id
from sgl_ext.reading.client import read_client
from sgl_ext.settings.reloading import NothingToRead
from sgl_ext.settings.schema import SettingsError
from sgl_ext.settings.sources import worker_url_problem
from sgl_ext.wire.headers import OWNER_HEADER, RANK_HEADER, TENANT_HEADER
from sgl_ext.wire.probes import READY_PATH

SERVICES = web.AppKey("services", Services)
_TIMEOUT = aiohttp.ClientTimeout(total=120)
_ANSWER = aiohttp.ClientTimeout(total=2.5)
_FORWARDED_HEADERS = (TENANT_HEADER, OWNER_HEADER)


async def show_workers(request: web.Request) -> web.Response:
    services = request.app[SERVICES]
    rows = [_shown(services.workers, worker) for worker in services.workers.all]
    return json_response({"workers": rows, "sources": services.sources.rows()})


async def add_worker(request: web.Request) -> web.Response:
    document = parse_json(await request.read())
    url = document.get("url") if isinstance(document, dict) else None
    services = request.app[SERVICES]
    workers = services.workers
    if not isinstance(url, str) or worker_url_problem(url):
        problem = worker_url_problem(str(url))
        raise BalancerError(HTTPStatus.BAD_REQUEST, f"url: {problem}, not {url!r}")
    known = workers.find_url(url)
    if known is None and len(workers.admin.added) >= MOST_ADDED:
        message = f"url: at most {MOST_ADDED} workers can be added; list more in a file"
        raise BalancerError(HTTPStatus.CONFLICT, message)
    if known is None and document.get("wait") is False:
        await _require_answer(services, url)
    worker = workers.add(url, time.time())
    if worker is None:
        message = "url: a source lists it, and that entry is ignored; the log has the reason"
        raise BalancerError(HTTPStatus.CONFLICT, message)
    failed = services.metrics.background_failed
    probes = WorkerProbes(workers, services.session, failed, stated=services.models.note)
    await probes.probe(worker)
    return json_response(_shown(workers, worker), HTTPStatus.OK if known else HTTPStatus.CREATED)


async def _require_answer(services: Services, url: str) -> None:
    """Raises BalancerError if nothing answers at a URL within _ANSWER."""
    try:
        async with services.session.get(url.rstrip("/") + READY_PATH, timeout=_ANSWER):
            return
    except TimeoutError:
        why = f"no answer in {_ANSWER.total:g} s"
    except aiohttp.ClientError as error:
        number = getattr(error, "errno", None)
        why = os.strerror(number) if number else str(error) or type(error).__name__
    message = f"url: no engine answers at {url} ({why}). To add one that starts later: --wait"
    raise BalancerError(HTTPStatus.CONFLICT, message)


async def drain_worker(request: web.Request) -> web.Response:
    url, name = request.query.get("url", ""), request.query.get("id")
    workers = request.app[SERVICES].workers
    worker = workers.find_url(url) if name is None else workers.find(name)
    if worker is None:
        wrong = f"url: no worker is {url!r}" if name is None else f"id: no worker is {name!r}"
        raise BalancerError(HTTPStatus.NOT_FOUND, wrong)
    workers.remove(worker, time.time())
    return json_response(_shown(workers, worker), HTTPStatus.ACCEPTED)


async def show_pins(request: web.Request) -> web.Response:
    now_s = asyncio.get_running_loop().time()
    workers = [w for w in request.app[SERVICES].workers.all if w.state != "drained"]
    owner = request.headers.get(OWNER_HEADER)
    pins = [
        row | {"worker": w.id, "rank": w.rank} for w in workers for row in w.pins.rows(now_s, owner)
    ]
    return json_response({"pins": pins})


async def delete_pins(request: web.Request) -> web.Response:
    name = request.query.get("worker")
    if name is None:
        return await to_all(request)
    worker = request.app[SERVICES].workers.find(name)
    if worker is None:
        raise BalancerError(HTTPStatus.NOT_FOUND, f"worker: no worker is {name!r}")
    return await _to_each(request, [worker], are_ranks=worker.has_ranks)


async def show_divergences(request: web.Request) -> web.Response:
    services = request.app[SERVICES]
    with_less = {worker.id: worker.degraded for worker in services.workers.all if worker.degraded}
    return json_response({**services.whole.divergences(), "with_less": with_less})


async def explain_request(request: web.Request) -> web.Response:
    path = "/" + request.match_info["path"]
    if path not in routes.PLACED:
        raise BalancerError(HTTPStatus.NOT_FOUND, f"{path}: requests to this path are not placed")
    body, services, hints = await request.read(), request.app[SERVICES], hints_in(request)
    tenant = services.tenants.of_headers(hints)
    target = request.raw_path.encode("latin-1", "replace")
    names = tuple(name.lower().encode("latin-1", "replace") for name in request.headers)
    fields = {name.encode(): value.encode("latin-1", "replace") for name, value in hints.items()}
    defaults = services.bodies.hint_rules.of(tenant.name, fields)
    ceiling = tenant.max_priority
    plan = ReadPlan(
        path, target, names, hints, True, False, ceiling, False, defaults, tenant=tenant.name
    )
    reading = await services.bodies.read(tenant.name, plan, body)
    assert reading.prompt is not None, "it would run"
    router = services.models.choose(reading.model).router
    routing = router.routing_of(reading.prompt, hints)
    stripped = reading.stripped
    explained = {
        "client": read_client(fields, stripped.fields).known(),
        "headers_stripped": stripped.headers,
        "moved_lines": stripped.moved,
        "priority": routing.priority,
        "output_tokens": routing.output_tokens,
        "default_hints": defaults.explain(stripped.body, stripped.fields),
    }
    return json_response({**explain(router, routing), **explained})


async def to_all(request: web.Request) -> web.Response:
    """Sends the request to every ready engine. The status is the highest of theirs."""
    return await _to_each(request, _ready(request))


async def _to_each(
    request: web.Request, workers: Sequence[Worker], *, are_ranks: bool = False
) -> web.Response:
    sent = [_send(worker, request, is_for_rank=are_ranks) for worker in workers]
    answers = await asyncio.gather(*sent)
    document = {w.url: _decoded(text) for w, (_, text) in zip(workers, answers, strict=True)}
    return json_response(document, max(status for status, _ in answers))


async def to_holder(request: web.Request) -> web.Response:
    """Tries one worker after another, and returns the first answer that is not 404."""
    status, text = HTTPStatus.NOT_FOUND.value, b""
    for worker in _ready(request):
        status, text = await _send(worker, request)
        if status != HTTPStatus.NOT_FOUND:
            break
    return web.Response(status=status, body=text, content_type="application/json")


def _ready(request: web.Request) -> list[Worker]:
    if workers := request.app[SERVICES].workers.ready:
        return [*{worker.url: worker for worker in workers}.values()]  # each engine once
    raise no_engine()


async def _send(
    worker: Worker, request: web.Request, *, is_for_rank: bool = False
) -> tuple[int, bytes]:
    body = await request.read()
    headers = {
        name: request.headers[name] for name in _FORWARDED_HEADERS if name in request.headers
    }
    if is_for_rank:
        headers[RANK_HEADER] = str(worker.rank)
    if body:
        headers["content-type"] = request.content_type
    url = worker.url + request.path_qs
    try:
        async with request.app[SERVICES].session.request(
            request.method, url, data=body or None, headers=headers, timeout=_TIMEOUT
        ) as answer:
            return answer.status, await answer.read()
    except (aiohttp.ClientError, TimeoutError) as error:
        message = orjson.dumps({"error": f"no answer: {type(error).__name__}"})
        return HTTPStatus.BAD_GATEWAY.value, message


def _decoded(text: bytes) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return text.decode("utf-8", "replace").strip()


def hints_in(request: web.Request) -> dict[str, str]:
    """The headers of a request, with lower-case names."""
    return {name.lower(): value for name, value in request.headers.items()}


def json_response(document: Any, status: int = HTTPStatus.OK) -> web.Response:
    """`document` as a JSON response."""
    body = orjson.dumps(document)
    return web.Response(status=int(status), body=body, content_type="application/json")


def _shown(workers: Workers, worker: Worker) -> dict[str, Any]:
    state: str = "gone" if worker.is_gone else worker.member.state
    if state == "drained":
        state = worker.state  # until its last request has ended, it drains
    return {
        "id": worker.id,
        "url": worker.url,
        "rank": worker.rank,
        "role": worker.role,
        "model": worker.model,
        "labels": dict(worker.member.labels),
        "source": worker.source,
        "state": state,
        "ready": workers.is_ready_in_all(worker),
        "draining": worker.draining,
        "fault": worker.fault,
        "breaker": worker.breaker.state,
        "in_flight": worker.in_flight,
        "pending_tokens": worker.pending_tokens,
        "publishes_prefixes": worker.publishes,
    }


_RELOAD = "/sgl_ext/reload"


async def reload(request: web.Request) -> web.Response:
    try:
        return json_response(await request.app[SERVICES].reloads.reload())
    except NothingToRead as error:
        raise BalancerError(HTTPStatus.CONFLICT, str(error)) from None
    except SettingsError as error:
        raise BalancerError(HTTPStatus.BAD_REQUEST, str(error)) from None
    except LauncherUnreachable as error:
        raise BalancerError(HTTPStatus.BAD_GATEWAY, str(error)) from None


async def show_request(request: web.Request) -> web.Response:
    request_id, line = request.match_info["id"], None
    try:
        if is_valid_id(request_id):
            line = await request.app[SERVICES].request_log.find(request_id)
    except SearchTooLong:
        message = "The request log is too large to be searched in time. Search its files with grep."
        raise BalancerError(HTTPStatus.SERVICE_UNAVAILABLE, message) from None
    except OSError as error:
        message = f"The request log cannot be read: {error.strerror}."
        raise BalancerError(HTTPStatus.SERVICE_UNAVAILABLE, message) from None
    if line is None:
        raise BalancerError(HTTPStatus.NOT_FOUND, "no request has this id")
    return web.Response(body=line, content_type="application/json")


_MOST_DIGITS = 20
_NUMBER = re.compile(r"[0-9]+(\.[0-9]+)?")


async def find_requests(request: web.Request) -> web.Response:
    try:
        found = await request.app[SERVICES].request_log.search(_search(request.query, time.time()))
    except OSError as error:
        message = f"The request log cannot be read: {error.strerror}."
        raise BalancerError(HTTPStatus.SERVICE_UNAVAILABLE, message) from None
    headers = {"cache-control": "no-store"}
    return web.Response(body=orjson.dumps(found), content_type="application/json", headers=headers)


def _search(query: Mapping[str, str], now_s: float) -> Search:
    """The search that a query states. Raises BalancerError 400."""
    status = query.get("status", "")
    if status and not STATUS.fullmatch(status):
        message = (
            f"status: must be a status, a class such as 5xx, errors or refused, not {status!r}"
        )
        raise BalancerError(HTTPStatus.BAD_REQUEST, message)
    since_s = _number(query, "since", 0.0)
    limit = min(max(int(_number(query, "limit", 100)), 1), MOST_ROWS)
    return Search(
        query.get("session", ""),
        query.get("tenant"),
        query.get("model", ""),
        status,
        now_s - since_s if since_s else _number(query, "after", 0.0),
        query.get("id", ""),
        query.get("slow") == "1",
        limit,
    )


def _number(query: Mapping[str, str], name: str, usual: float) -> float:
    text = query.get(name, "")
    if not text:
        return usual
    if len(text) > _MOST_DIGITS or not _NUMBER.fullmatch(text):
        raise BalancerError(HTTPStatus.BAD_REQUEST, f"{name}: must be a number, not {text!r}")
    return float(text)


_MONTH = re.compile(r"20[0-9]{2}-(0[1-9]|1[0-2])")


async def show_usage(request: web.Request) -> web.Response:
    """What tenants and their keys used on each day of a month of UTC."""
    month = request.query.get("month") or time.strftime("%Y-%m", time.gmtime())
    if not _MONTH.fullmatch(month):
        message = f"month: must be a month as 2026-11, not {month!r}"
        raise BalancerError(HTTPStatus.BAD_REQUEST, message)
    try:
        found = await request.app[SERVICES].rate_limits.usage.days(month)
    except StoreFailed:
        message = "The store, which has the usage, is unavailable."
        raise BalancerError(HTTPStatus.SERVICE_UNAVAILABLE, message) from None
    return json_response({"month": month, "usage": [use._asdict() for use in found]})


_RESTART = "/sgl_ext/restart"


async def restart(request: web.Request) -> web.Response:
    launcher = request.app[SERVICES].launcher
    return await _passed_on(launcher, launcher.restart(await request.read()))


async def show_restart(request: web.Request) -> web.Response:
    launcher = request.app[SERVICES].launcher
    return await _passed_on(launcher, launcher.last_restart())


async def _passed_on(launcher: Launcher, answering: Awaitable[Answer]) -> web.Response:
    """The launcher's answer. Raises BalancerError for an error, in the shape of this server."""
    try:
        answer = await answering
    except LauncherUnreachable as error:
        is_there = launcher.is_there
        status = HTTPStatus.BAD_GATEWAY if is_there else HTTPStatus.NOT_IMPLEMENTED
        raise BalancerError(status, str(error)) from None
    if answer.status >= HTTPStatus.BAD_REQUEST:
        raise BalancerError(HTTPStatus(answer.status), answer.document["error"])
    return json_response(answer.document, answer.status)


OPERATION_ROUTES = (
    web.route("GET", "/sgl_ext/workers", show_workers),
    web.route("POST", "/sgl_ext/workers", add_worker),
    web.route("DELETE", "/sgl_ext/workers", drain_worker),
    web.route("GET", "/sgl_ext/divergences", show_divergences),
    web.route("GET", pin_mirror.PATH, show_pins),
    web.route("DELETE", pin_mirror.PATH, delete_pins),
    web.route("POST", "/sgl_ext/explain/{path:.+}", explain_request),
    web.route("POST", _RELOAD, reload),
    web.route("POST", _RESTART, restart),
    web.route("GET", _RESTART, show_restart),
    web.route("GET", "/sgl_ext/usage", show_usage),
    web.route("GET", "/sgl_ext/requests", find_requests),
    web.get("/sgl_ext/requests/{id:.+}", show_request, allow_head=False),
)
