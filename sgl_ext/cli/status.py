"""`sgl-ext status`: a node at a glance."""

import re
from typing import Any

import msgspec
import typer
from msgspec import Struct
from rich.table import Table
from rich.text import Text

from sgl_ext.cli.node import HERE, Json, Key, Node, NodeError, Url, node_at
from sgl_ext.cli.show import cell, console, duration, percent, plain, print_json, state, table

OK = "ok"
DEGRADED = "degraded"
DEGRADED_CODE = 3
_HEADS = ("state", "#running", "#waiting", "#KV used", "#pinned", "#free", "#hit rate")
STATE = "/sgl_ext/state"
LIVE = "/sgl_ext/live"


class Version(Struct):
    sgl_ext: str | None = None
    commit: str | None = None
    sglang: str | None = None


class Summary(Struct):
    """status: "ok", "degraded", "draining" or "no engine is ready". engines_wanted: how many should
    be ready.

    saved_bytes: what clients did not send because requests named what is stored.
    """

    status: str
    engines_ready: int | None = None
    engines_wanted: int | None = None
    started_s: float | None = None
    now_s: float | None = None
    in_flight: int | None = None
    model: str | None = None
    saved_bytes: int | None = None


class KvCache(Struct):
    used_tokens: int | None = None
    pinned_tokens: int | None = None
    free_tokens: int | None = None
    total_tokens: int | None = None


class LastExit(Struct):
    """When a process ended, and why."""

    time_s: float
    cause: str


class Engine(Struct):
    """progress: how far it has loaded, 0 to 1. fault: why it gets no requests. note: what of it
    works less well than usual. crashes: how often it ended without being stopped."""

    id: str
    url: str | None = None
    model: str | None = None
    state: str = "unknown"
    stage: str | None = None
    progress: float | None = None
    running: int | None = None
    waiting: int | None = None
    in_flight: int | None = None
    fault: str | None = None
    note: str | None = None
    kv: KvCache | None = None
    hit_rate: float | None = None
    restarts: int | None = None
    crashes: int | None = None
    last_exit: LastExit | None = None


class Band(Struct):
    priority: int | str
    waiting: int


class Queue(Struct):
    limit: int | None = None
    waiting: int | None = None
    by_priority: list[Band] = []


class History(Struct):
    """A value for each interval, the newest last."""

    interval_s: float | None = None
    hit_rate: list[float | None] = []
    ttft_p50_s: list[float | None] = []
    ttft_p99_s: list[float | None] = []
    requests_per_s: list[float | None] = []
    output_tokens_per_s: list[float | None] = []


class Figures(Struct):
    """The values of the last minute together."""

    hit_rate: float | None = None
    ttft_p50_s: float | None = None
    ttft_p99_s: float | None = None
    requests_per_s: float | None = None
    output_tokens_per_s: float | None = None


class Event(Struct):
    """What happened, and to what. times: how often, within a minute."""

    time_s: float
    kind: str
    level: str = "info"
    subject: str = ""
    text: str = ""
    times: int = 1


class Failure(Struct):
    """Requests that were refused or failed within the last minute, and why."""

    reason: str
    count: int


class Session(Struct):
    """last_s: when its last request ended, by the node's clock. request_class, agent: what the last
    one was for, and the kind of sub-agent. harness_session: equal for a lead and its sub-agents."""

    id: str
    tenant: str | None = None
    engine: str | None = None
    turns: int | None = None
    prompt_tokens: int | None = None
    cached_share: float | None = None
    last_s: float | None = None
    harness: str | None = None
    request_class: str | None = msgspec.field(name="class", default=None)
    agent: str | None = None
    harness_session: str | None = None


class Pin(Struct):
    prefix: str
    tokens: int | None = None
    hits: int | None = None
    owner: str | None = None
    session: str | None = None
    worker: str | None = None
    left_s: float | None = None


class Tenant(Struct):
    name: str
    requests: int | None = None
    prompt_tokens: int | None = None
    cached_share: float | None = None


class Counts(Struct):
    """How many there are; the lists may hold fewer."""

    sessions: int | None = None
    pins: int | None = None
    tenants: int | None = None


class ServedModel(Struct):
    """ready: its engines that take requests, of all its engines."""

    name: str
    engines: int = 0
    ready: int = 0
    waiting: int = 0
    in_flight: int = 0
    fallback: str | None = None
    hit_rate: float | None = None


class State(Struct):
    node: Summary
    models: list[ServedModel] = []
    version: Version = msgspec.field(default_factory=Version)
    engines: list[Engine] = []
    queue: Queue = msgspec.field(default_factory=Queue)
    recent: Figures = msgspec.field(default_factory=Figures)
    failures: list[Failure] = []
    events: list[Event] = []
    history: History = msgspec.field(default_factory=History)
    sessions: list[Session] = []
    pins: list[Pin] = []
    tenants: list[Tenant] = []
    counts: Counts = msgspec.field(default_factory=Counts)


def status(url: Url = HERE, key: Key = None, as_json: Json = False) -> None:
    """Show a node: its engines, queue and cache.

    Exit code 3: fewer engines are ready than should be. 1: none is ready, the node drains, or none
    answers.
    """
    node = node_at(url, key)
    document = node.get(STATE)
    found = read_state(document, node)
    if as_json:
        print_json(document)
    else:
        shown = console()
        for line in (headline(found, node.url), figures(found)):
            shown.print(line, soft_wrap=True)
        if found.engines:
            shown.print()
            shown.print(engines_table(found.engines))
        for line in (*failures(found), *exits(found)):
            shown.print(line, soft_wrap=True)
    if found.node.status != OK:
        raise typer.Exit(DEGRADED_CODE if found.node.status == DEGRADED else 1)


def status_line(found: State) -> str:
    """The node's status, with how many engines are ready if those are not all."""
    node = found.node
    if node.status != DEGRADED:
        return node.status
    return f"{node.status}: {cell(node.engines_ready)} of {cell(node.engines_wanted)} engines ready"


def failures(found: State) -> list[str]:
    """How many requests were refused or failed within the last minute, and why, if any."""
    if not found.failures:
        return []
    total = sum(each.count for each in found.failures)
    why = "; ".join(f"{each.count:,} x {each.reason.rstrip('.')}" for each in found.failures[:3])
    return [plain(f"{total:,} requests refused or failed in the last minute: {why}")]


def exits(found: State) -> list[str]:
    """For each engine that ended without being stopped: when it did so last, and why."""
    lines = []
    for engine in found.engines:
        if (last := engine.last_exit) is None:
            continue
        ago = "" if found.node.now_s is None else f" {duration(found.node.now_s - last.time_s)} ago"
        times = f"; {engine.crashes:,} times in all" if (engine.crashes or 0) > 1 else ""
        lines.append(plain(f"{engine.id} ended{ago}: {last.cause}{times}"))
    return lines


def headline(found: State, url: str) -> str:
    """Where the node is, and what runs there."""
    version = found.version
    commit = f" ({version.commit})" if version.commit else ""
    parts = [f"sgl-ext {version.sgl_ext}{commit}" if version.sgl_ext else "sgl-ext"]
    parts += [f"SGLang {version.sglang}"] if version.sglang else []
    parts += [url]
    return plain(", ".join(parts))


def figures(found: State) -> str:
    """Its state and load in a line."""
    node, recent = found.node, found.recent
    parts = [status_line(found)]
    if len(found.models) > 1:
        parts += [
            f"model {each.name} ({each.ready} of {each.engines} ready, {each.waiting:,} queued)"
            for each in found.models
        ]
    elif node.model:
        parts.append(f"model {node.model}")
    if node.started_s is not None and node.now_s is not None:
        parts.append(f"up {duration(node.now_s - node.started_s)}")
    parts.append(f"{cell(node.in_flight)} in flight")
    parts.append(queue_line(found))
    if recent.hit_rate is not None:
        parts.append(f"hit rate {percent(recent.hit_rate)}")
    if recent.ttft_p50_s is not None:
        parts.append(f"TTFT p50 {cell(recent.ttft_p50_s)} s, p99 {cell(recent.ttft_p99_s)} s")
    if node.saved_bytes:
        parts.append(f"{node.saved_bytes / 1e6:,.1f} MB not sent again")
    return plain("   ".join(parts))


def queue_line(found: State) -> str:
    """How many requests wait, of how many that may, and at which priorities."""
    queue = found.queue
    limit = "" if queue.limit is None else f" of {queue.limit:,}"
    bands = [band for band in queue.by_priority if band.waiting]
    shown = ", ".join(f"{band.waiting:,} at priority {band.priority}" for band in bands)
    return f"{cell(queue.waiting)}{limit} queued" + (f" ({shown})" if shown else "")


def engines_table(engines: list[Engine]) -> Table:
    """A row for each engine."""
    if len({engine.model for engine in engines}) < 2:
        return table(("engine", *_HEADS), map(engine_row, engines))
    rows = (((row := engine_row(each))[0], each.model, *row[1:]) for each in engines)
    return table(("engine", "model", *_HEADS), rows)


def engine_row(engine: Engine) -> tuple[object, ...]:
    """Its id, state, running and waiting requests, used, pinned and free tokens, and hit rate."""
    kv = engine.kv
    tokens = (kv.used_tokens, kv.pinned_tokens, kv.free_tokens) if kv else (None,) * 3
    return (
        engine.id,
        _state_of(engine),
        engine.running,
        engine.waiting,
        *tokens,
        percent(engine.hit_rate),
    )


def _state_of(engine: Engine) -> Text:
    """Its state, with the stage and the part that is loaded, or with its fault."""
    said = state(engine.state)
    loaded = "" if engine.progress is None else f" {engine.progress:.0%}"
    detail = f"{engine.stage}{loaded}" if engine.stage else engine.fault
    detail = engine.note if engine.state == "ready" else detail
    if detail:
        said.append(plain(f": {detail}"), style="default")
    return said


def read_state(document: Any, node: Node) -> State:
    """The state in a document of a node. Raises NodeError if it has another form."""
    try:
        found = msgspec.convert(document, State)
    except msgspec.ValidationError as error:
        other = f"the state of {node.url} is that of another version of sgl-ext: {error}"
        raise NodeError(other) from None
    found.engines.sort(key=lambda engine: _natural(engine.id))
    return found


def _natural(name: str) -> list[int | str]:
    """Sorts engine-10 after engine-9.2: every second part of a name is a number."""
    parts = enumerate(re.split(r"([0-9]+)", name))
    return [int(part) if n % 2 else part for n, part in parts]
