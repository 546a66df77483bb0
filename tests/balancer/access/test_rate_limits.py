"""Limits of requests and tokens: charges on arrival, and their correction by the real cost."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import ClientSession, web

from sgl_ext import keys
from sgl_ext.balancer.access.authentication import KeyFileReloader
from sgl_ext.balancer.access.rate_limits import Charge, RateLimits
from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.balancer.server import Balancer
from sgl_ext.protocols.errors import BalancerError
from tests.balancer.conftest import Engine, Serve, Start
from tests.balancer.wire import Raw, sse, until

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


OF_MODELS = """
[tenants.a]
requests-per-minute = 4
[tenants.a.models.large]
requests-per-minute = 1
tokens-per-minute = 600
"""


def test_a_model_has_limits_of_its_own_beside_those_of_the_tenant(folder: Path) -> None:
    setting = Setting(folder, OF_MODELS)
    admit = setting.limits.admit
    charge = admit("a", 600, model="large")
    with pytest.raises(BalancerError) as error:
        admit("a", 1, model="large")
    said = "This tenant's limit of 1 requests per minute for the model large is reached."
    assert (error.value.retry_after_s, str(error.value)) == (60, said)
    for model in ("small", "", "small"):
        admit("a", 600, model=model)
    assert setting.retry_after_s() == 15  # of all models
    setting.clock.now_s += 60
    setting.limits.settle(charge, 1200)  # it is owed to the model
    with pytest.raises(BalancerError, match="600 tokens per minute for the model large"):
        admit("a", 1, model="large")
    page = setting.metrics.render().decode()
    assert 'sgl_ext_tenant_rate_limited_total{limit="requests of large",tenant="a"} 1.0' in page
    assert 'sgl_ext_tenant_limit{limit="tokens of large",tenant="a"} 600.0' in page


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


def charged(balancer: Balancer) -> float:
    page = balancer._metrics.render().decode()
    (line,) = [li for li in page.splitlines() if li.startswith("sgl_ext_tenant_tokens_total{")]
    return float(line.split()[-1])


CHUNK = b'data: {"id":"1","choices":[{"index":0,"delta":{"content":"a"}}],"usage":null}\n\n'
TOTAL = b'data: {"id":"1","choices":[],"model":"m","usage":%b}\n\n' % orjson.dumps(USAGE)
DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
@pytest.mark.parametrize(
    ("options", "expected", "sees_usage"),
    [
        ({}, {"include_usage": True}, False),
        ({"stream_options": None}, {"include_usage": True}, False),
        ({"stream_options": {}}, {"include_usage": True}, False),
        (
            {"stream_options": {"include_usage": False, "continuous_usage_stats": True}},
            {"include_usage": True, "continuous_usage_stats": True},
            False,
        ),
        ({"stream_options": {"include_usage": True}}, {"include_usage": True}, True),
    ],
)
async def test_a_stream_is_charged_for_its_usage_which_is_shown_only_if_asked_for(
    start: Start,
    folder: Path,
    options: dict[str, Any],
    expected: dict[str, Any],
    path: str,
    *,
    sees_usage: bool,
    together: bool,
) -> None:
    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        events = [CHUNK, CHUNK, TOTAL, DONE]
        for data in [b"".join(events)] if together else events:
            await response.write(data)
        return response

    limits = "tokens_per_minute = 60000\nadmin = true"
    tenant, engine = Tenant(folder, limits), Engine("e", stream)
    client = await start(engine, **tenant.config)
    _, body, _ = await tenant.asks(client, path, words=400, stream=True, **options)
    assert body == CHUNK + CHUNK + (TOTAL if sees_usage else b"") + DONE
    sent = orjson.loads(engine.seen[-1][1])
    assert sent["stream_options"] == expected
    assert sent["messages"][0]["content"] == "word " * 400
    page = await (await client.get("/metrics", headers=tenant.headers)).text()
    assert 'sgl_ext_tenant_tokens_total{tenant="a"} 10.0' in page


@pytest.mark.parametrize("body", [{"stream": False}, {}])
async def test_a_body_that_is_no_stream_reaches_the_engine_as_it_is(
    start: Start, folder: Path, body: dict[str, Any]
) -> None:
    tenant, engine = Tenant(folder, "tokens_per_minute = 60000"), Engine("e")
    client = await start(engine, **tenant.config)
    await tenant.asks(client, **body)
    assert "stream_options" not in orjson.loads(engine.seen[-1][1])


async def test_a_client_that_leaves_early_is_charged_for_its_prompt_and_what_was_streamed(
    serve: Serve, folder: Path
) -> None:
    tenant = Tenant(folder, "tokens_per_minute = 60000")
    balancer = await serve(Raw(sse(*[CHUNK] * 50, end=b"")), **tenant.config)
    async with ClientSession(f"http://127.0.0.1:{balancer.port}") as client:
        body = {"messages": [{"role": "user", "content": "word " * 400}], "stream": True}
        async with client.post(CHAT, json=body, headers=tenant.headers) as answer:
            await answer.content.readexactly(len(CHUNK) * 50)
            answer.close()
        await until(lambda: not balancer._connections)
    prompt_tokens = charged(balancer) - 50
    assert 400 <= prompt_tokens <= 1000


@pytest.mark.parametrize("total", [b"null", orjson.dumps(USAGE)])
async def test_a_request_that_is_sent_again_is_charged_once(
    serve: Serve, folder: Path, total: bytes
) -> None:
    tenant = Tenant(folder, "tokens_per_minute = 60000")
    worker = Raw(sse(CHUNK, end=b""))
    balancer = await serve(worker, resend_s=300.0, **tenant.config)
    limits = balancer.services.rate_limits
    limits.clock = lambda: 1e9
    async with ClientSession(f"http://127.0.0.1:{balancer.port}") as client:
        body = {"messages": [{"role": "user", "content": "word " * 400}], "stream": True}
        async with client.post(CHAT, json=body, headers=tenant.headers) as answer:
            await answer.content.readexactly(len(CHUNK))
            answer.close()
        await until(lambda: len(balancer.services.resends))
        paid_tokens = charged(balancer)
        async with client.post(CHAT, json=body, headers=tenant.headers) as answer:
            await answer.content.readexactly(len(CHUNK))
            assert charged(balancer) == paid_tokens
            last = b'data: {"id":"1","choices":[],"model":"m","usage":%b}\n\n' % total
            worker.go_on(b"".join(sse(CHUNK, last)[1:]))
            await answer.read()
    assert charged(balancer) == paid_tokens + (2 if total == b"null" else 0)
    # If it really cost less, the tenant may use the rest.
    cost = charged(balancer) if total == b"null" else 10
    assert limits._buckets["a", "tokens"].level(1e9) == 60_000 - cost


async def test_a_stream_of_several_prompts_is_charged_for_all(serve: Serve, folder: Path) -> None:
    def event(index: int, generated: int) -> bytes:
        counts = {"prompt_tokens": 1000, "completion_tokens": generated, "cached_tokens": 100}
        return b"data: %b\n\n" % orjson.dumps({"text": "", "meta_info": counts, "index": index})

    tenant = Tenant(folder, "tokens_per_minute = 60000")
    events = [event(0, 1), event(1, 1), event(0, 9) + event(1, 2), event(1, 3), DONE]
    balancer = await serve(Raw(sse(*events)), **tenant.config)
    async with ClientSession(f"http://127.0.0.1:{balancer.port}") as client:
        await tenant.asks(client, "/generate", text=["a", "b"], stream=True)
    assert charged(balancer) == 1800 + 12


async def test_a_list_of_prompts_is_charged_for_all(start: Start, folder: Path) -> None:
    async def items(_: web.Request) -> web.StreamResponse:
        counts = {"prompt_tokens": 1, "completion_tokens": 1, "cached_tokens": 0}
        return web.json_response([{"meta_info": counts | {"prompt_tokens": 990_000}}] * 2)

    tenant = Tenant(folder, "tokens_per_minute = 600")
    client = await start(Engine("e", items), **tenant.config)
    statuses = [(await tenant.asks(client, "/generate", text=["a", "b"]))[0] for _ in range(2)]
    assert statuses == [200, 429]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/contexts"),
        ("GET", "/v1/contexts/x"),
        ("GET", "/v1/responses/x"),
        ("GET", "/v1/pins"),
        ("DELETE", "/v1/pins"),
        ("GET", "/v1/models"),
        ("POST", "/v1/prefill"),
        ("POST", "/v1/messages/count_tokens"),
        ("POST", "/v1/tokenize"),
    ],
)
async def test_every_request_of_a_tenant_counts_as_one(
    start: Start, folder: Path, method: str, path: str
) -> None:
    tenant, engine = Tenant(folder, "requests_per_minute = 2"), Engine("e")
    client = await start(engine, **tenant.config)
    body = {"messages": [], "blocks": [], "prompt": ""} if method == "POST" else None
    statuses = []
    for _ in range(4):
        async with client.request(method, path, json=body, headers=tenant.headers) as answer:
            statuses.append(answer.status)
    assert [status == 429 for status in statuses] == [False, False, True, True]
    assert "retry-after" in answer.headers
    assert (await client.get("/health")).status == 200


async def test_what_a_request_claims_is_charged_until_its_cost_is_known(
    start: Start, folder: Path
) -> None:
    gate = asyncio.Event()

    async def slow(_: web.Request) -> web.StreamResponse:
        await gate.wait()
        return await cheap(_)

    tenant, engine = Tenant(folder, "tokens_per_minute = 60000"), Engine("e", slow)
    client = await start(engine, **tenant.config)
    claim = {"nvext": {"agent_hints": {"osl": 59_000}}}
    first = asyncio.create_task(tenant.asks(client, **claim))
    await until(lambda: engine.seen)
    assert (await tenant.asks(client, words=4000))[0] == 429
    gate.set()
    assert (await first)[0] == 200
    assert (await tenant.asks(client, **claim))[0] == 200
