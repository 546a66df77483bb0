"""Tenants in the balancer: a ceiling for each, and turns by weight while requests wait."""

from __future__ import annotations

import asyncio
from collections import Counter

from aiohttp import web

from sgl_ext.balancer.routing.admission import AdmissionQueue
from sgl_ext.balancer.routing.routing_request import RoutingRequest
from sgl_ext.balancer.routing.worker import Attempt, Worker
from sgl_ext.protocols.errors import BalancerError
from sgl_ext.settings.schema import Tenant
from sgl_ext.tenants import Tenants
from tests.balancer.conftest import Engine, Start
from tests.balancer.routing.test_router import Setting
from tests.balancer.test_routing import body, served_by, until_count, until_queued

TENANTS = Tenants((Tenant("people", 200, 3.0), Tenant("batch", -5)), max_priority=50)


class QueuedRequest:
    """A request that records its attempt in a common log."""

    def __init__(self, routing: RoutingRequest, log: list[Attempt]) -> None:
        self.routing = routing
        self.tried: set[Worker] = set()
        self._log = log

    def placed(self, attempt: Attempt) -> None:
        self._log.append(attempt)

    def rejected(self, error: BalancerError) -> None:
        raise AssertionError(error)


def routing(
    setting: Setting, tenant: str, priority: str = "0", text: str = "Hello"
) -> RoutingRequest:
    return setting.read(text, **{"x-tenant-id": tenant, "x-sgl-ext-priority": priority})


def turns(setting: Setting, *tenants: str) -> list[str]:
    """The tenants of requests that wait in this order, in the order in which they are placed."""
    log: list[Attempt] = []
    admission_queue = AdmissionQueue(
        setting.router, setting.metrics, 100, 60.0, clock=setting.clock
    )
    for worker in setting.workers.all:
        assert admission_queue.place(QueuedRequest(setting.read(worker.url), log))
    running = log.copy()
    log.clear()
    for number, tenant in enumerate(tenants):
        assert not admission_queue.place(
            QueuedRequest(routing(setting, tenant, text=f"Task {number:02}"), log)
        )
    while len(log) < len(tenants):
        setting.router.attempts.succeed(running.pop())
        running.append(log[-1])
    return [attempt.routing.tenant for attempt in log]


def test_the_ceiling_is_that_of_the_tenant() -> None:
    setting = Setting(tenants=TENANTS)
    found = {
        (tenant, said): routing(setting, tenant, said).priority
        for tenant in ("people", "batch", "another")
        for said in ("60", "201", "-6")
    }
    assert found == {
        **{("people", "60"): 60, ("people", "201"): 200, ("people", "-6"): -6},
        **{("batch", "60"): -5, ("batch", "201"): -5, ("batch", "-6"): -6},
        **{("another", "60"): 50, ("another", "201"): 50, ("another", "-6"): -6},
    }
    assert setting.read("Hello").priority == 0
    assert setting.read("Hello", **{"x-tenant-id": "batch"}).priority == -5


def test_a_tenant_of_weight_three_has_three_of_four_turns() -> None:
    setting = Setting(tenants=TENANTS, worker_limit=1)
    found = turns(setting, *["another"] * 12, *["people"] * 12)
    for begin in range(0, 16, 4):
        assert Counter(found[begin : begin + 4]) == {"people": 3, "another": 1}


def test_tenants_without_a_weight_have_equal_turns() -> None:
    setting = Setting(worker_limit=1)
    found = turns(setting, *["another"] * 12, *["people"] * 12)
    assert Counter(found[:8]) == {"people": 4, "another": 4}


async def test_the_configuration_applies_over_http(start: Start) -> None:
    gate, order = asyncio.Event(), []

    async def slow(request: web.Request) -> web.StreamResponse:
        order.append((await request.json())["messages"][1]["content"])
        await gate.wait()
        return web.json_response({"engine": "a"})

    tenants = (Tenant("people", 200), Tenant("batch", -5))
    client = await start(Engine("a", slow), max_in_flight=1, max_priority=50, tenants=tenants)
    waiting = [asyncio.create_task(served_by(client, body("first")))]
    await until_count(order, 1)
    for number, tenant in enumerate(("batch", "another", "people")):
        headers = {"x-tenant-id": tenant, "x-sgl-ext-priority": "60"}
        waiting.append(asyncio.create_task(served_by(client, body(tenant), headers=headers)))
        await until_queued(client, number + 1)
    gate.set()
    await asyncio.gather(*waiting)
    assert order == ["first", "people", "another", "batch"]
