"""A balancer that reads its settings again: what they change in it, and in its engines."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer
from sgl_ext_cpu.node import free_port

from sgl_ext.balancer.server import Balancer
from sgl_ext.settings.fields import fields_of
from sgl_ext.settings.reloading import LiveSettings
from sgl_ext.settings.schema import BalancerSettings, EngineSettings, Tenant
from sgl_ext.settings.sources import balancer_settings
from sgl_ext.wire.headers import DEFAULTS_HEADER
from sgl_ext.wire.orders import SETTINGS_PATH, Version
from sgl_ext.wire.probes import SETTINGS_HEADER
from tests.balancer.conftest import Engine
from tests.balancer.test_routing import until

BODY = {"model": "bench", "messages": [{"role": "user", "content": "Hello"}]}


class Reloading(Engine):
    """An engine that takes settings, unless it is told not to."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.number = 0
        self.values: dict[str, Any] = {}
        self.refusal: web.Response | None = None
        self.why = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/ready":
            return web.Response(headers={SETTINGS_HEADER: str(self.number)})
        if request.path != SETTINGS_PATH:
            return await super().handle(request)
        if self.refusal is not None:
            return self.refusal
        assert request.content_type == "application/json"
        document = orjson.loads(await request.read())
        self.number, self.values = document["number"], document["values"]
        return web.json_response({"applied": not self.why, "why": self.why})


class Node:
    """A balancer of a file, in this process."""

    def __init__(self, balancer: Balancer, client: ClientSession, path: Path) -> None:
        self.balancer = balancer
        self.client = client
        self.path = path

    async def reload(self, text: str) -> tuple[int, Any]:
        self.path.write_text(text)
        answer = await self.client.post("/sgl_ext/reload")
        return answer.status, await answer.json()

    async def metrics(self) -> str:
        return await (await self.client.get("/metrics")).text()


@pytest.fixture
async def begin(tmp_path: Path) -> AsyncIterator[Callable[..., Any]]:
    async with AsyncExitStack() as stack:

        async def begin(
            *engines: Engine, text: str = "", folder: Path | None = None, flags: str = ""
        ) -> Node:
            argv = ["--drain-s", "0", "--port", str(free_port()), *flags.split()]
            for engine in engines:
                if engine.server is None:
                    app = web.Application(client_max_size=1 << 30)
                    app.router.add_route("*", "/{path:.*}", engine.handle)
                    engine.server = await stack.enter_async_context(TestServer(app))
                argv += ["--worker", engine.url]
            path = tmp_path / "balancer.toml"
            path.write_text(text)
            argv += ["--config", str(path)]
            read = partial(balancer_settings, argv)
            balancer = Balancer(read(), None, folder, interval_s=0.02, read=read)
            await balancer.start()
            stack.push_async_callback(balancer.stop)
            url = f"http://127.0.0.1:{balancer.port}"
            client = await stack.enter_async_context(ClientSession(url))
            return Node(balancer, client, path)

        yield begin


# Of each setting that changes: another value, and where a balancer uses it.
_USED: dict[str, tuple[Any, Callable[[Balancer], Any]]] = {
    "max_priority": (7, lambda b: b._services.router.tenants.of("x").max_priority),
    "aging_s": (3.0, lambda b: b._services.models.default.queue._queue.aging_s),
    "preemption_threshold": (4, lambda b: b._services.router.preemption_threshold),
    "max_connections": (5, lambda b: b._config.max_connections),
    "max_in_flight": (6, lambda b: b._services.router.worker_limit),
    "learn_speeds": (False, lambda b: b._services.router.attempts.speeds.learns),
    "queue_limit": (2, lambda b: b._services.models.default.queue.limit),
    "resend_s": (2.0, lambda b: b._services.resends.resend_s),
    "first_byte_s": (3.0, lambda b: b._services.heartbeats.first_s),
    "agent_hold_s": (4.0, lambda b: b._services.models.default.queue._gate.hold_s),
    "queue_timeout_s": (9.0, lambda b: b._services.models.default.queue.timeout_s),
    "drain_s": (1.0, lambda b: b._config.drain_s),
    "drain_min_s": (0.5, lambda b: b._config.drain_min_s),
    "request_log_age_s": (60.0, lambda b: b._parts._request_log._lines._age_s),  # type: ignore[union-attr]
    "request_log_limit_bytes": (2 << 20, lambda b: b._parts._request_log._lines._file_bytes * 2),  # type: ignore[union-attr]
    "response_ttl_s": (60.0, lambda b: b._services.bodies.conversations.response_ttl_s),
}


def test_each_setting_of_a_balancer_that_changes_is_tested() -> None:
    fields = fields_of(BalancerSettings)
    assert _USED.keys() == {name for name, field in fields.items() if field.reload.applies}


async def test_every_part_uses_what_was_changed(begin: Callable[..., Any], tmp_path: Path) -> None:
    node = await begin(flags=f"--request-log {tmp_path / 'requests'}")
    shown = {name: str(value).lower() for name, (value, _) in _USED.items() if name != "drain_s"}
    lines = [f"{name} = {value}" for name, value in shown.items()]
    node.path.write_text("\n".join(["[balancer]", *lines]))
    status, document = await node.reload(node.path.read_text())
    assert status == 200, document
    for name, (value, used) in _USED.items():
        assert name == "drain_s" or used(node.balancer) == value, name
    assert "sgl_ext_settings_reloads_total 1.0" in await node.metrics()


async def test_a_flag_still_wins_over_the_file(begin: Callable[..., Any]) -> None:
    node = await begin(flags="--queue-limit 3")
    assert (await node.reload("[balancer]\nqueue-limit = 5"))[1]["changed"] == []
    assert node.balancer._services.models.default.queue.limit == 3


async def test_what_stays_is_named_with_the_reason(begin: Callable[..., Any]) -> None:
    node = await begin()
    status, document = await node.reload("[balancer]\nsort-tools = true\nmax-in-flight = 9")
    assert status == 200
    assert document["changed"] == ["max-in-flight"]
    ((key, why),) = [tuple(row.values()) for row in document["unchanged_until_restart"]]
    assert key == "sort-tools"
    assert "prefixes are cached" in why


async def test_a_wrong_file_is_400_and_changes_nothing(begin: Callable[..., Any]) -> None:
    node = await begin()
    status, document = await node.reload("[balancer]\nmax-in-flight = 9\nqueue-limit = -1")
    assert status == 400
    message = document["error"]["message"]
    assert str(node.path) in message
    assert "[balancer] queue-limit=-1: must be an integer of at least 0" in message
    assert node.balancer._services.router.worker_limit == 1024
    assert "sgl_ext_settings_reload_failures_total 1.0" in await node.metrics()


async def test_without_a_file_it_is_409(start: Callable[..., Any]) -> None:
    client = await start()
    answer = await client.post("/sgl_ext/reload")
    assert answer.status == 409
    assert "--config" in (await answer.json())["error"]["message"]


async def test_a_reload_is_a_post(start: Callable[..., Any]) -> None:
    assert (await (await start()).get("/sgl_ext/reload")).status == 405


async def test_a_changed_tenant_has_its_new_ceiling_at_once(begin: Callable[..., Any]) -> None:
    engine = Reloading("a")
    node = await begin(engine, text="[tenants.people]\nmax-priority = 5")

    async def priority() -> int:
        answer = await node.client.post(
            "/sgl_ext/explain/v1/chat/completions",
            json=BODY,
            headers={"x-tenant-id": "people", "x-sgl-ext-priority": "50"},
        )
        return int((await answer.json())["priority"])

    assert await priority() == 5
    status, document = await node.reload("[tenants.people]\nmax-priority = 20\nweight = 3")
    assert (status, document["changed"]) == (200, ["tenants.people"])
    assert document["engines"] == [{"id": engine.url, "applied": True, "why": ""}]
    assert await priority() == 20
    assert engine.values == {"tenants": [_row("people", 20, weight=3.0)]}
    assert node.balancer._services.router.tenants.weights == {"people": 3.0}


def _row(name: str, max_priority: int, **more: Any) -> dict[str, Any]:
    tenant = Tenant(name, max_priority, **more)
    return {field: getattr(tenant, field) for field in tenant.__struct_fields__}


async def test_an_engine_that_starts_again_gets_the_settings_again(
    begin: Callable[..., Any],
) -> None:
    engine = Reloading("a")
    node = await begin(engine)
    await node.reload("[balancer]\naging-s = 2")
    assert engine.values == {"aging_s": 2.0}
    number, engine.number, engine.values = engine.number, 0, {}

    async def has_it() -> bool:
        return engine.number == number

    await until(has_it)
    assert engine.values == {"aging_s": 2.0}


async def test_an_engine_that_refuses_is_named_and_asked_again(begin: Callable[..., Any]) -> None:
    engine = Reloading("a")
    engine.refusal = web.json_response({"error": "no"}, status=500)
    node = await begin(engine)
    _, document = await node.reload("[balancer]\naging-s = 2")
    (row,) = document["engines"]
    assert not row["applied"]
    assert row["why"].startswith("500: ")
    assert "sgl_ext_engine_settings_failures_total" in await node.metrics()
    engine.refusal = None

    async def has_it() -> bool:
        return engine.values == {"aging_s": 2.0}

    await until(has_it)


async def test_what_an_engine_cannot_apply_is_told(begin: Callable[..., Any]) -> None:
    engine = Reloading("a")
    engine.why = "its schedulers are replicas"
    node = await begin(engine)
    _, document = await node.reload("[balancer]\naging-s = 2")
    assert document["engines"] == [{"id": engine.url, "applied": False, "why": engine.why}]


async def test_a_server_without_the_extension_is_told_and_not_asked(
    begin: Callable[..., Any],
) -> None:
    plain = Engine("plain")
    node = await begin(plain)
    _, document = await node.reload("[balancer]\naging-s = 2")
    assert "no sgl-ext" in document["engines"][0]["why"]
    assert plain.seen == []


async def test_an_engine_is_sent_nothing_that_is_for_the_balancer_alone(
    begin: Callable[..., Any],
) -> None:
    engine = Reloading("a")
    node = await begin(engine)
    _, document = await node.reload("[balancer]\nqueue-limit = 2")
    assert document["engines"][0]["applied"]
    assert engine.number == 0


async def test_another_process_applies_what_one_has_read(
    begin: Callable[..., Any], tmp_path: Path
) -> None:
    one = await begin(folder=tmp_path)
    other = await begin(folder=tmp_path)
    await one.reload("[balancer]\nqueue-limit = 2")

    async def has_it() -> bool:
        return bool(other.balancer._services.models.default.queue.limit == 2)

    await until(has_it)
    assert (await begin(folder=tmp_path)).balancer._services.models.default.queue.limit == 2


async def test_default_hints_reach_the_engine_until_they_are_taken_away(
    begin: Callable[..., Any],
) -> None:
    engine = Reloading("a")
    node = await begin(engine)

    async def sent(**body: Any) -> str | None:
        answer = await node.client.post(
            "/v1/chat/completions",
            data=BytesIO(orjson.dumps(BODY | body)),
            headers={
                "content-type": "application/json",
                "x-tenant-id": "people",
                DEFAULTS_HEADER: '{"priority":99}',
            },
        )
        assert answer.status == 200
        _, _, headers = engine.seen[-1]
        value: str | None = headers.get(DEFAULTS_HEADER)
        return value

    assert await sent() is None
    hints = "[hints.model.bench]\nosl = 9\npriority = 3\n[hints.tenant.people]\npriority = -2"
    assert (await node.reload(hints))[0] == 200
    assert orjson.loads(await sent() or "") == {"priority": -2, "osl": 9}
    assert orjson.loads(await sent(model="other") or "") == {"priority": -2}
    large = {"messages": [{"role": "user", "content": "x" * (3 << 20)}]}
    assert orjson.loads(await sent(**large) or "") == {"priority": -2, "osl": 9}
    await node.reload("")
    assert await sent() is None


async def test_a_request_counts_with_its_defaults_and_explain_says_so(
    begin: Callable[..., Any],
) -> None:
    node = await begin(Reloading("a"), text="[hints.harness.codex]\nosl = 700\nprefill = true")

    async def explained(**body: Any) -> Any:
        answer = await node.client.post(
            "/sgl_ext/explain/v1/chat/completions",
            json=BODY | body,
            headers={"user-agent": "codex_exec/0.1"},
        )
        return await answer.json()

    found = await explained()
    source = "harness codex"
    assert found["default_hints"] == {
        "osl": {"value": 700, "from": source},
        "prefill": {"value": True, "from": source},
    }
    assert found["client"] == {"harness": "codex", "program": "codex_exec", "version": "0.1"}
    assert found["output_tokens"] == 700
    assert (await explained(max_tokens=20))["output_tokens"] == 20
    assert (await explained(nvext={"agent_hints": {"osl": 5}}))["output_tokens"] == 5


def test_what_changes_in_engines_is_what_they_read() -> None:
    live = LiveSettings(EngineSettings())
    live.version = Version(1, {"pin_budget": 0.25, "queue_limit": 3})
    assert live.current.pin_budget == 0.25
