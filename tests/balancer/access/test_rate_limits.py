"""Limits of requests and tokens: charges on arrival, and their correction by the real cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession, web

from sgl_ext import keys
from sgl_ext.balancer.access.authentication import KeyFileReloader
from sgl_ext.balancer.access.rate_limits import Charge, RateLimits
from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.protocols.errors import BalancerError
from tests.balancer.conftest import Engine, Serve, Start
from tests.balancer.wire import Raw, sse

MESSAGES, CHAT = "/v1/messages", "/v1/chat/completions"
USAGE = {
    "prompt_tokens": 1000,
    "completion_tokens": 5,
    "prompt_tokens_details": {"cached_tokens": 995},
}


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Setting:
    """The limits of a file, on a made-up clock."""

    def __init__(self, folder: Path, text: str, processes: int = 1) -> None:
        self.path = folder / "keys.toml"
        self.path.write_text(text)
        self.metrics, self.clock = Metrics(), Clock()
        self.key_file = KeyFileReloader(self.path, self.metrics)
        self.limits = RateLimits(self.key_file, self.metrics, processes, self.clock)

    def retry_after_s(self, tokens: int = 0, tenant: str = "a") -> int:
        """When it fits; 0: it was let in."""
        try:
            self.limits.admit(tenant, tokens)
        except BalancerError as error:
            return error.retry_after_s or -1
        return 0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def test_requests_over_the_limit_are_rejected_with_a_time_to_retry(folder: Path) -> None:
    setting = Setting(folder, "[tenants.a]\nrequests_per_minute = 2")
    assert [setting.retry_after_s() for _ in range(3)] == [0, 0, 30]
    setting.clock.now_s += 29.5
    assert setting.retry_after_s() == 1
    setting.clock.now_s += 0.5
    assert setting.retry_after_s() == 0
    assert [setting.retry_after_s(tenant="b") for _ in range(9)] == [0] * 9


def test_tokens_are_charged_on_arrival_and_corrected_at_the_end(folder: Path) -> None:
    setting = Setting(folder, "[tenants.a]\ntokens_per_minute = 600")
    charge = setting.limits.admit("a", 600)
    assert charge == Charge("a", 600)
    assert setting.retry_after_s(100) == 10
    setting.limits.settle(charge, 100)  # most of it was cached
    assert setting.retry_after_s(500) == 0
    assert setting.retry_after_s(1) == 1
    setting.clock.now_s += 60
    charge = setting.limits.admit("a", 10)
    setting.limits.settle(charge, 1210)  # a long answer is owed
    assert setting.retry_after_s(1) == 62
    setting.clock.now_s += 200
    setting.limits.settle(
        setting.limits.admit("a", 600), None
    )  # an unknown cost leaves the estimate
    assert setting.retry_after_s(10) == 1
    assert setting.retry_after_s(0) == 0  # what computes nothing costs none


def test_a_request_rejected_by_one_limit_is_not_charged_to_the_other(folder: Path) -> None:
    setting = Setting(folder, "[tenants.a]\nrequests_per_minute = 2\ntokens_per_minute = 60")
    assert setting.retry_after_s(60) == 0
    assert setting.retry_after_s(60) == 60
    setting.clock.now_s += 30
    assert [setting.retry_after_s(0) for _ in range(3)] == [0, 0, 30]


def test_processes_share_a_limit(folder: Path) -> None:
    setting = Setting(folder, "[tenants.a]\nrequests_per_minute = 4", processes=4)
    assert [setting.retry_after_s() for _ in range(2)] == [0, 60]


def test_a_changed_limit_applies_after_the_reload(folder: Path) -> None:
    setting = Setting(folder, "[tenants.a]\nrequests_per_minute = 1")
    assert [setting.retry_after_s() for _ in range(2)] == [0, 60]
    setting.path.write_text("[tenants.a]\nrequests_per_minute = 10")
    assert setting.key_file.reload_if_changed()
    assert [setting.retry_after_s() for _ in range(10)] == [0] * 9 + [6]


def test_only_tenants_in_the_key_file_are_counted(folder: Path) -> None:
    setting = Setting(folder, "[tenants.a]\nrequests_per_minute = 1")
    for tenant in ("a", "a", "", "whoever"):
        setting.retry_after_s(7, tenant)
    setting.limits.settle(Charge("a", 7), 3)
    page = setting.metrics.render().decode()
    assert 'sgl_ext_tenant_requests_total{tenant="a"} 1.0' in page
    assert 'sgl_ext_tenant_rate_limited_total{limit="requests",tenant="a"} 1.0' in page
    assert 'sgl_ext_tenant_tokens_total{tenant="a"} 3.0' in page
    assert "whoever" not in page
    assert RateLimits(None, Metrics()).admit("a", 7) is None


class Tenant:
    """A client that is a tenant with limits, in front of engines."""

    def __init__(self, folder: Path, limits: str) -> None:
        path = folder / "keys.toml"
        path.write_text(f"[tenants.a]\n{limits}\n")
        key, _ = keys.add_key(path, "a")
        self.config: dict[str, Any] = {"keys": str(path)}
        self.headers = {"authorization": f"Bearer {key}"}

    async def asks(
        self, client: ClientSession, path: str = CHAT, words: int = 1, **more: Any
    ) -> tuple[int, Any, Any]:
        body = {"messages": [{"role": "user", "content": "word " * words}], **more}
        async with client.post(path, json=body, headers=self.headers) as answer:
            return answer.status, await answer.read(), answer.headers


@pytest.mark.parametrize(
    ("path", "kind"), [(MESSAGES, "rate_limit_error"), (CHAT, "rate_limit_error")]
)
async def test_a_rate_limit_error_has_the_shape_of_its_protocol(
    start: Start, folder: Path, path: str, kind: str
) -> None:
    tenant, engine = Tenant(folder, "requests_per_minute = 1"), Engine("e")
    client = await start(engine, **tenant.config)
    assert (await tenant.asks(client, path))[0] == 200
    status, body, headers = await tenant.asks(client, path)
    assert status == 429
    assert kind.encode() in body
    assert 1 <= int(headers["retry-after"]) <= 60
    assert len(engine.seen) == 1


async def cheap(_: web.Request) -> web.StreamResponse:
    return web.json_response({"usage": USAGE})


async def refusing(_: web.Request) -> web.StreamResponse:
    return web.json_response({"error": {}}, status=400)


async def silent(_: web.Request) -> web.StreamResponse:
    return web.json_response({})


@pytest.mark.parametrize(
    ("answer", "most"),
    [(cheap, 50), (refusing, 50), (silent, 1)],
)
async def test_the_real_cost_of_an_answer_is_charged(
    start: Start, folder: Path, answer: Any, most: int
) -> None:
    tenant = Tenant(folder, "tokens_per_minute = 600")
    client = await start(Engine("e", answer), **tenant.config)
    # Some 500 tokens each by estimate: a second one would not fit.
    statuses = [(await tenant.asks(client, words=400))[0] for _ in range(10)]
    assert statuses.count(429) == (0 if most == 50 else 9)


async def test_requests_that_the_balancer_rejects_cost_nothing(start: Start, folder: Path) -> None:
    tenant = Tenant(folder, "tokens_per_minute = 600")
    client = await start(**tenant.config)
    assert {(await tenant.asks(client, words=400))[0] for _ in range(5)} == {503}


async def test_a_streams_cost_is_read_from_its_first_and_last_event(
    serve: Serve, folder: Path
) -> None:
    tenant = Tenant(folder, "tokens_per_minute = 600")
    start = (
        b'event: message_start\ndata: {"message":{"usage":{"input_tokens":4,'
        b'"cache_creation_input_tokens":6,"cache_read_input_tokens":900,"output_tokens":0}}}\n\n'
    )
    delta = b'event: message_delta\ndata: {"usage":{"output_tokens":7}}\n\n'
    stop = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
    balancer = await serve(Raw(sse(start, delta, stop), sse(start, delta, stop)), **tenant.config)
    async with ClientSession(f"http://127.0.0.1:{balancer.port}") as client:
        for _ in range(2):
            assert (await tenant.asks(client, MESSAGES, words=400))[0] == 200
    assert 'sgl_ext_tenant_tokens_total{tenant="a"} 34.0' in balancer._metrics.render().decode()
