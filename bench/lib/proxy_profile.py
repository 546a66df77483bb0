"""Where the balancer's CPU time goes for one request, without sockets.

A balancer runs in this process, between a client's and a worker's transport that only pass bytes.
A timer looks a thousand times a CPU second at what runs, and counts it for the innermost module
that the table below knows: what others do for it counts as its own.
"""

from __future__ import annotations

import asyncio
import gc
import signal
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle, islice
from types import FrameType

import uvloop
from sgl_ext_cpu.node import free_port

from bench.lib.responder import WHOLE, Responder
from sgl_ext.balancer.http.downstream import DownstreamConnection
from sgl_ext.balancer.http.upstream import UpstreamConnection
from sgl_ext.balancer.server import Balancer
from sgl_ext.settings.schema import BalancerSettings

Data = bytes | bytearray | memoryview
OTHER = "other"
_SAMPLE_S = 0.001
_STEPS = {
    "receive the request": (
        "http/downstream",
        "http/request_reader",
        "http/request_head",
        "server",
    ),
    "parse the body and check its fields": (
        *("relay/reading", "reading/field_types", "limits/bounds", "conversations/expansion"),
        *("conversations/contexts", "protocols/cache_diagnostics"),
    ),
    "strip session headers": ("reading/strip", "reading/rewriting"),
    "cut it into segments and hash them": ("reading/segments",),
    "session, priority, tenant, client": (
        *("reading/client", "reading/hints", "routing/routing_request"),
        *("relay/preparation", "sgl_ext/tenants"),
    ),
    "look the prefix up, and choose a worker": (
        *(
            "routing/router",
            "routing/prefixes",
            "scheduler/placement",
            "radix/index",
            "radix/index_memory",
        ),
        *("scheduler/capacity", "routing/worker"),
    ),
    "account for it at its worker": (
        *("routing/attempts", "scheduler/sessions", "radix/in_flight_prefixes"),
        *("scheduler/averages", "scheduler/breaker"),
    ),
    "admission queue and limits": (
        *("routing/admission", "access/rate_limits", "scheduler/token_bucket"),
    ),
    "send it to the worker": (
        "routing/standby_prefill",
        "protocols/request_ids",
    ),
    "relay the answer": ("http/upstream", "relay/exchange", "relay/resends", "relay/heartbeats"),
    "usage, metrics and request log": (
        *("reading/usage", "reporting/activity", "metrics/registry"),
        "reporting/request_log",
    ),
}
_STEP_OF = {f"{module}.py": step for step, modules in _STEPS.items() for module in modules}


def profile(requests: Sequence[bytes], count: int) -> dict[str, float]:
    """CPU microseconds of each step for one request, the mean of `count` of these in turn."""
    return uvloop.run(_profile(requests, count))


async def _profile(requests: Sequence[bytes], count: int) -> dict[str, float]:
    loop, port = asyncio.get_running_loop(), free_port()
    worker = await loop.create_server(Responder, "127.0.0.1", port)
    url = f"http://127.0.0.1:{port}"
    balancer = Balancer(BalancerSettings(port=0, workers=(url,)), interval_s=3600.0)
    await balancer.start()
    pair = _Pair(balancer)
    for request in islice(cycle(requests), count // 10):
        await pair.answer(request)
    gc.collect()
    gc.freeze()
    samples: Counter[str] = Counter()
    with _sampling(samples):
        began_ns = time.process_time_ns()
        for request in islice(cycle(requests), count):
            await pair.answer(request)
        total_us = (time.process_time_ns() - began_ns) / 1e3 / count
    pair.close()
    balancer.hurry()
    await balancer.stop()
    worker.close()
    known = sum(samples[step] for step in _STEPS)
    return {step: total_us * samples[step] / known for step in _STEPS}


@contextmanager
def _sampling(samples: Counter[str]) -> Iterator[None]:
    def take(number: int, frame: FrameType | None) -> None:
        samples[_step(frame)] += 1

    before = signal.signal(signal.SIGPROF, take)
    signal.setitimer(signal.ITIMER_PROF, _SAMPLE_S, _SAMPLE_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _step(frame: FrameType | None) -> str:
    while frame is not None:
        name = "/".join(frame.f_code.co_filename.rsplit("/", 2)[1:])
        if (step := _STEP_OF.get(name) or _STEP_OF.get(name.rpartition("/")[2])) is not None:
            return step
        frame = frame.f_back
    return OTHER


class _Pair:
    """One client and one worker of a balancer: a request goes in, its answer comes out."""

    def __init__(self, balancer: Balancer) -> None:
        self._client, self._worker = _Transport(), _Transport()
        services = balancer._services
        self._pool = services.connections.to(services.workers.all[0])
        self._pool.close_idle()
        self._upstream = UpstreamConnection(self._pool)
        self._upstream.connection_made(self._worker)
        self._pool.release(self._upstream)
        self._downstream = DownstreamConnection(balancer)
        self._downstream.connection_made(self._client)

    async def answer(self, request: bytes) -> None:
        rest = memoryview(request)
        while rest:
            buffer = self._downstream.get_buffer(len(rest))
            size = min(len(buffer), len(rest))
            buffer[:size] = rest[:size]
            del buffer
            self._downstream.buffer_updated(size)
            rest = rest[size:]
        self._upstream.data_received(WHOLE)
        assert self._client.written, "it is answered at once"
        self._client.written = 0
        self._upstream.sweeps = 0

    def close(self) -> None:
        self._downstream.connection_lost(None)
        self._pool.forget(self._upstream)


class _Transport(asyncio.Transport):
    """Takes all that is written."""

    written = 0

    def write(self, data: Data) -> None:
        self.written += len(data)

    def writelines(self, list_of_data: Iterable[Data]) -> None:
        for data in list_of_data:
            self.write(data)

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def abort(self) -> None: ...
    def close(self) -> None: ...
