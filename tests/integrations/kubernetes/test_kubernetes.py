"""The watch of EndpointSlices, against a stand-in for the API server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer

from sgl_ext.balancer.server import Balancer
from sgl_ext.integrations import kubernetes
from sgl_ext.integrations.kubernetes import KubernetesSlices
from sgl_ext.membership.member import Member, MembershipError
from sgl_ext.settings.schema import Alias, BalancerSettings
from tests.balancer.conftest import Engine
from tests.balancer.wire import AT_ONCE, until
from tests.integrations.kubernetes.kubernetes_api import (
    KubernetesApi,
    endpoint,
    endpoint_slice,
    write_kubeconfig,
)

NAME = "kubernetes:serving/engines"


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses that the source makes, which take no time."""
    made: list[float] = []

    async def sleep(seconds: float) -> None:
        made.append(seconds)
        await asyncio.sleep(0)

    monkeypatch.setattr(kubernetes, "sleep", sleep)
    return made


@pytest.fixture
async def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[KubernetesApi]:
    """A cluster, which the kubeconfig names."""
    made = KubernetesApi()
    async with TestServer(made.app(), shutdown_timeout=0) as server:
        write_kubeconfig(tmp_path / "config", str(server.make_url("")).rstrip("/"))
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
        yield made
        made.end_watches()


class Follower:
    """What a source yields, as a balancer follows it: after a failure it is asked again.

    lists: the state of each pod, in each list. faults: the messages of its failures.
    """

    def __init__(self, name: str) -> None:
        self.source = KubernetesSlices(name, name.removeprefix("kubernetes:"))
        self.lists: list[dict[str, str]] = []
        self.faults: list[str] = []
        self.members: tuple[Member, ...] = ()

    async def run(self) -> None:
        while True:
            try:
                async for members in self.source.lists():
                    self.members = members
                    self.lists.append({one.id.partition("@")[0]: one.state for one in members})
            except MembershipError as error:
                self.faults.append(str(error))
                await asyncio.sleep(0)

    async def reach(self, *pods: str, **states: str) -> None:
        """Waits until its last list is these ready pods and those with other states."""
        expected = {**dict.fromkeys(pods, "ready"), **states}
        await until(lambda: bool(self.lists) and self.lists[-1] == expected)


Follow = Callable[..., Follower]


@pytest.fixture
async def follow() -> AsyncIterator[Follow]:
    """Starts to follow a source: `follow("kubernetes:serving/engines")`."""
    tasks = []

    def begin(name: str = NAME) -> Follower:
        follower = Follower(name)
        tasks.append(asyncio.create_task(follower.run()))
        return follower

    yield begin
    for task in tasks:
        assert not task.done(), task.result()
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


A, B = endpoint("a", "10.0.0.1"), endpoint("b", "10.0.0.2")
B_LEAVES = endpoint("b", "10.0.0.2", ready=False, terminating=True)


@pytest.mark.parametrize("version", ["v1", "v1beta1"])
async def test_a_pod_joins_drains_and_leaves(
    api: KubernetesApi, follow: Follow, version: str
) -> None:
    api.versions = (version,)
    api.put(endpoint_slice(A))
    following = follow(f"{NAME}?api={version}")
    await following.reach("a")
    api.put(endpoint_slice(A, B))
    await following.reach("a", "b")
    api.put(endpoint_slice(A, B_LEAVES))
    await following.reach("a", b="draining")
    api.put(endpoint_slice(A))
    await following.reach("a")
    assert len(following.lists) == 4
    assert following.faults == []
    assert following.members[0].labels == {"pod": "a", "node": "node-a", "zone": "zone-a"}


async def test_a_service_of_several_slices_is_read_page_by_page(
    api: KubernetesApi, follow: Follow
) -> None:
    api.page = 1
    for name, pod in (("s1", A), ("s2", B)):
        api.put(endpoint_slice(pod, name=name))
    api.put(endpoint_slice(endpoint("other", "10.0.0.9"), name="s3", service="other"))
    following = follow()
    await following.reach("a", "b")
    assert [query.get("continue") for query in api.lists] == [None, "1"]
    # The control plane moves a pod: for a moment it is in both slices.
    api.put(endpoint_slice(A, B, name="s1"))
    api.delete("s2")
    api.put(endpoint_slice(A, B, endpoint("c", "10.0.0.3"), name="s1"))
    await following.reach("a", "b", "c")
    api.delete("s1")
    await following.reach()
    assert following.lists == [{"a": "ready", "b": "ready"}, following.lists[1], {}]


async def test_a_watch_goes_on_where_the_last_one_ended(
    api: KubernetesApi, follow: Follow, pauses: list[float]
) -> None:
    api.put(endpoint_slice(A))
    following = follow()
    await until(lambda: len(api.watches) == 1)
    api.end_watches()
    api.put(endpoint_slice(A, B))  # between two watches
    await following.reach("a", "b")
    api.end_watches()
    await until(lambda: len(api.watches) > 2)
    assert api.watches[-1]["resourceVersion"] == str(api.version)
    assert api.watches[-1]["timeoutSeconds"] == "30"
    assert len(api.lists) == 1
    assert following.faults == []
    assert len(following.lists) == 2
    # A server that ends every watch at once is not asked more than once a second.
    assert all(0.5 < pause <= 1 for pause in pauses)


async def test_a_bookmark_saves_a_quiet_watch_from_being_too_old(
    api: KubernetesApi, follow: Follow
) -> None:
    api.put(endpoint_slice(A))
    following = follow()
    await until(lambda: len(api.watches) == 1)
    api.bookmark()
    api.put(endpoint_slice(A, B))
    await following.reach("a", "b")
    api.bookmark()
    api.oldest = bookmarked = api.version
    api.end_watches()
    await until(lambda: len(api.watches) == 2)
    assert api.watches[-1]["resourceVersion"] == str(bookmarked)
    assert len(api.lists) == 1


@pytest.mark.parametrize("in_stream", [True, False])
async def test_after_410_gone_all_is_listed_again(
    api: KubernetesApi, follow: Follow, in_stream: bool
) -> None:
    api.gone_in_stream = in_stream
    api.put(endpoint_slice(A, name="s1"))
    api.put(endpoint_slice(B, name="s2"))
    following = follow()
    await until(lambda: len(api.watches) == 1)
    api.end_watches()
    api.delete("s2")
    api.compact()
    await following.reach("a")
    await until(lambda: len(api.watches) >= 3)
    assert len(api.lists) == 2
    assert following.faults == []
    assert len(following.lists) == 2


async def test_a_list_whose_next_page_is_gone_begins_again(
    api: KubernetesApi, follow: Follow
) -> None:
    api.page = 1
    for name, pod in (("s1", A), ("s2", B)):
        api.put(endpoint_slice(pod, name=name))
    api.page_is_gone = True
    following = follow()
    await following.reach("a", "b")
    assert [query.get("continue") for query in api.lists] == [None, "1", None, "1"]


async def test_a_connection_that_breaks_within_an_event_is_resumed(
    api: KubernetesApi, follow: Follow
) -> None:
    api.put(endpoint_slice(A))
    following = follow()
    await until(lambda: len(api.watches) == 1)
    api.cut_watches()
    api.put(endpoint_slice(A, B))
    await following.reach("a", "b")
    assert len(api.lists) == 1
    assert len(following.faults) == 1
    assert {} not in following.lists


async def test_an_api_server_that_is_away_costs_no_worker(
    api: KubernetesApi, follow: Follow, pauses: list[float]
) -> None:
    api.put(endpoint_slice(A))
    following = follow()
    await until(lambda: len(api.watches) == 1)
    api.refusals = [(503, "etcd has no leader")] * 8
    pauses.clear()
    api.end_watches()
    await until(lambda: len(following.faults) == 8)
    assert following.faults[0] == "the API server answers 503, 'etcd has no leader'"
    assert following.lists == [{"a": "ready"}]
    backoff = pauses[1:]
    assert len(backoff) == 6
    limits = [2, 4, 8, 16, 30, 30]
    assert all(limit / 2 <= pause <= limit for pause, limit in zip(backoff, limits, strict=True))
    api.put(endpoint_slice(A, B))
    await following.reach("a", "b")
    assert len(api.lists) == 1


async def test_a_silent_watch_is_noticed(
    api: KubernetesApi, follow: Follow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes, "WATCH_S", 0)
    monkeypatch.setattr(kubernetes, "_SILENCE_S", 0.05)
    api.put(endpoint_slice(A))
    following = follow()
    await until(lambda: bool(following.faults))
    assert "ReadTimeout" in following.faults[0]
    assert len(api.lists) == 1


async def test_an_event_can_be_long_and_come_in_parts(api: KubernetesApi, follow: Follow) -> None:
    api.put(endpoint_slice(A))
    following = follow()
    await until(lambda: len(api.watches) == 1)
    pods = [
        endpoint(f"pod-{number}", f"10.0.{number // 250}.{number % 250}") for number in range(1000)
    ]
    api.put(endpoint_slice(*pods))
    await until(lambda: len(following.members) == 1000)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"not JSON\n", "an event of the watch is malformed"),
        (
            b'{"type": "MODIFIED", "object": {"metadata": 5}}\n',
            "an event of the watch is malformed",
        ),
        (b"x" * (9 << 20), "an event of the watch is over 8388608 bytes"),
        (
            b'{"type": "ERROR", "object": {"code": 500, "message": "etcd"}}\n',
            "the API server answers 500, 'etcd'",
        ),
    ],
)
async def test_after_a_watch_that_makes_no_sense_the_list_stays(
    api: KubernetesApi, follow: Follow, line: bytes, problem: str
) -> None:
    api.put(endpoint_slice(A))
    following = follow()
    await until(lambda: len(api.watches) == 1)
    api.raw(line)
    await until(lambda: bool(following.faults))
    assert following.faults[0].startswith(problem)
    api.put(endpoint_slice(A, B))
    await following.reach("a", "b")
    assert {} not in following.lists


async def test_more_slices_than_are_kept_are_refused(
    api: KubernetesApi, follow: Follow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes, "_LIMIT_SLICES", 1)
    api.put(endpoint_slice(A, name="s1"))
    following = follow()
    await following.reach("a")
    api.put(endpoint_slice(B, name="s2"))
    await until(lambda: bool(following.faults))
    assert following.faults[0] == "over 1 EndpointSlices have the labels: select fewer"


@pytest.mark.parametrize(
    ("code", "said", "problem"),
    [
        (401, "Unauthorized", "the API server answers 401, 'Unauthorized'"),
        (
            403,
            "User cannot list resource",
            "the API server answers 403, 'User cannot list resource': a Role in the namespace "
            "serving must allow apiGroups: [discovery.k8s.io], resources: [endpointslices], "
            "verbs: [list, watch]",
        ),
        (500, "x" * 9999, f"the API server answers 500, {'x' * 500!r}"),
    ],
)
async def test_a_refusal_is_passed_on_and_says_what_helps(
    api: KubernetesApi, follow: Follow, code: int, said: str, problem: str
) -> None:
    api.refusals = [(code, said)]
    following = follow()
    await until(lambda: bool(following.faults))
    assert following.faults[0] == problem


async def test_a_version_that_the_cluster_does_not_serve_is_named(
    api: KubernetesApi, follow: Follow
) -> None:
    api.versions = ("v1",)
    following = follow(f"{NAME}?api=v1beta1")
    await until(lambda: bool(following.faults))
    expected = "the API server answers 404, 'Not Found': it may not serve discovery.k8s.io/v1beta1"
    assert following.faults[0] == expected


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        (
            "kubernetes:serving/none",
            "no EndpointSlice in the namespace serving has the labels "
            "kubernetes.io/service-name=none",
        ),
        (
            "kubernetes:none/engines",
            "no EndpointSlice in the namespace none has the labels "
            "kubernetes.io/service-name=engines",
        ),
        (
            "kubernetes:serving/?selector=app=none",
            "no EndpointSlice in the namespace serving has the labels app=none",
        ),
        ("kubernetes:serving/engines", "1 endpoints, none ready"),
        ("kubernetes:engines:grpc", "EndpointSlice engines-a1 has no port grpc among http=30000"),
    ],
)
async def test_a_source_that_has_no_workers_says_why_once(
    api: KubernetesApi,
    follow: Follow,
    caplog: pytest.LogCaptureFixture,
    name: str,
    problem: str,
) -> None:
    api.put(endpoint_slice(endpoint("a", ready=False, serving=False)))
    following = follow(name)
    await following.reach()
    await until(lambda: len(api.watches) == 1)
    api.end_watches()
    await until(lambda: len(api.watches) == 2)
    assert caplog.messages == [f"{name}: {problem}"]


async def test_labels_select_the_slices_of_several_services(
    api: KubernetesApi, follow: Follow
) -> None:
    labels = {"tier": "agents"}
    api.put(endpoint_slice(A, name="s1", service="small", labels=labels))
    api.put(endpoint_slice(A, B, name="s2", service="all", labels=labels))
    api.put(endpoint_slice(endpoint("c", "10.0.0.3"), name="s3", service="others"))
    following = follow("kubernetes:?selector=tier=agents")
    await following.reach("a", "b")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "ConfigError: Configuration file"),
        ("clusters: 5", "TypeError"),
        ("{", "ParserError"),
        ("clusters: []\ncontexts: []\n", "No current context set"),
    ],
)
def test_without_a_cluster_nothing_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, reason: str
) -> None:
    path = tmp_path / "config"
    monkeypatch.setenv("KUBECONFIG", str(path))
    if text is not None:
        path.write_text(text)
    with pytest.raises(MembershipError) as failed:
        KubernetesSlices(NAME, "serving/engines")
    said = str(failed.value)
    assert said.startswith("no cluster: this is no pod with a service account, and no kubeconfig")
    assert reason in said


async def test_a_cluster_that_does_not_answer_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, follow: Follow
) -> None:
    write_kubeconfig(tmp_path / "config", "http://127.0.0.1:1")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    following = follow()
    await until(lambda: bool(following.faults))
    assert following.faults[0].startswith("http://127.0.0.1:1: ")
    assert following.lists == []


async def test_each_model_is_a_service_of_its_own(api: KubernetesApi) -> None:
    engines = Engine("a", model="large"), Engine("b", model="small")
    async with AsyncExitStack() as stack:
        for engine, service in zip(engines, ("large", "small"), strict=True):
            app = web.Application()
            app.router.add_route("*", "/{path:.*}", engine.handle)
            engine.server = await stack.enter_async_context(TestServer(app, shutdown_timeout=0))
            ports = [{"name": "http", "port": engine.server.port, "protocol": "TCP"}]
            pod = endpoint(service, "127.0.0.1")
            api.put(endpoint_slice(pod, name=service, service=service, ports=ports))
        settings = BalancerSettings(
            workers_from=("kubernetes:serving/large", "kubernetes:serving/small"),
            aliases=(Alias("claude-haiku-*", "small"), Alias("*", "large")),
            **{"port": 0, **AT_ONCE},
        )
        balancer = Balancer(settings, interval_s=0.02)
        await balancer.start()
        stack.push_async_callback(balancer.stop)
        models = balancer.services.models
        await until(lambda: [pool["ready"] for pool in models.rows()] == [1, 1])
        client = await stack.enter_async_context(ClientSession(f"http://127.0.0.1:{balancer.port}"))
        for model, engine in (("claude-haiku-4-5", "b"), ("gpt-5", "a"), ("large", "a")):
            body = {"model": model, "messages": [{"role": "user", "content": "Hello"}]}
            async with client.post("/v1/chat/completions", json=body) as answer:
                assert (await answer.json())["engine"] == engine
