"""The state document of a node, `GET /sgl_ext/state`: what `status` and `top` show of it.

A figure that the node does not know is None.
"""

import re
from typing import Any

import msgspec
from msgspec import Struct

from sgl_ext.cli.node import Node, NodeError

STATE = "/sgl_ext/state"
LIVE = "/sgl_ext/live"


class Version(Struct):
    sgl_ext: str | None = None
    commit: str | None = None
    sglang: str | None = None


class Summary(Struct):
    """status: "ok", "draining" or "no engine is ready".

    saved_bytes: what clients did not send because requests named what is stored.
    """

    status: str
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


class Engine(Struct):
    """progress: how far it has loaded, 0 to 1. fault: why it gets no requests. note: what of it
    works less well than usual."""

    id: str
    url: str | None = None
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


class State(Struct):
    node: Summary
    version: Version = msgspec.field(default_factory=Version)
    engines: list[Engine] = []
    queue: Queue = msgspec.field(default_factory=Queue)
    recent: Figures = msgspec.field(default_factory=Figures)
    history: History = msgspec.field(default_factory=History)
    sessions: list[Session] = []
    pins: list[Pin] = []
    tenants: list[Tenant] = []
    counts: Counts = msgspec.field(default_factory=Counts)


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
