"""The watch of EndpointSlices, against a real kube-apiserver."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest
import yaml
from sgl_ext_cpu.node import ROOT

from sgl_ext.integrations import kubernetes
from sgl_ext.integrations.kubernetes import KubernetesSlices
from sgl_ext.membership.member import Member, MembershipError
from tests.balancer.wire import until
from tests.integrations.kubernetes.kube_apiserver import (
    ADMIN,
    BALANCER,
    USER,
    Cluster,
    assets,
    running_cluster,
)
from tests.integrations.kubernetes.kubernetes_api import (
    Object,
    endpoint,
    endpoint_slice,
    in_version,
    write_kubeconfig,
)
from tests.test_chart import CHART, rendered
from tests.test_chart import OVERLAYS as CHARTS
from tests.test_manifests import OVERLAYS, built

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        assets() is None, reason="KUBEBUILDER_ASSETS: no folder with kube-apiserver and etcd"
    ),
]
RBAC = "/apis/rbac.authorization.k8s.io/v1/namespaces/serving"
A, B = endpoint("a", "10.0.0.1"), endpoint("b", "10.0.0.2")
B_LEAVES = endpoint("b", "10.0.0.2", ready=False, terminating=True)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster with the namespace `serving`, in which nobody may read EndpointSlices."""
    with running_cluster(tmp_path_factory.mktemp("cluster")) as started:
        namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "serving"}}
        started.request("POST", "/api/v1/namespaces", namespace)
        yield started


class Slices:
    """The slices of the cluster, in a version that it serves."""

    def __init__(self, cluster: Cluster) -> None:
        group = cluster.request("GET", "/apis/discovery.k8s.io")
        self.version = group["preferredVersion"]["version"]
        self._names: set[str] = set()
        self._cluster = cluster
        self._path = f"/apis/discovery.k8s.io/{self.version}/namespaces/serving/endpointslices"

    def put(self, made: Object) -> None:
        made = in_version(made, self.version)
        del made["metadata"]["managedFields"]
        name = made["metadata"]["name"]
        if name in self._names:
            self._cluster.request("PUT", f"{self._path}/{name}", made)
        else:
            self._cluster.request("POST", self._path, made)
        self._names.add(name)

    def delete(self, name: str) -> None:
        self._names.remove(name)
        self._cluster.request("DELETE", f"{self._path}/{name}")

    def clear(self) -> None:
        for name in tuple(self._names):
            self.delete(name)


@pytest.fixture
def slices(cluster: Cluster) -> Iterator[Slices]:
    made = Slices(cluster)
    yield made
    made.clear()


@pytest.fixture
def kubeconfig(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The balancer's kubeconfig: its token is that of a service account."""
    path = tmp_path / "config"
    write_kubeconfig(path, cluster.url, USER, cluster.certificate)
    monkeypatch.setenv("KUBECONFIG", str(path))
    monkeypatch.setattr(kubernetes, "WATCH_S", 1)
    return path


def states(members: tuple[Member, ...]) -> dict[str, str]:
    return {member.id.partition("@")[0]: member.state for member in members}


def allow(cluster: Cluster) -> None:
    """Gives the balancer's service account the role that the manifests do."""
    text = (ROOT / "launch/kubernetes/base/balancer/rbac.yaml").read_text()
    for made in yaml.safe_load_all(text):
        made["metadata"]["namespace"] = "serving"
        for subject in made.get("subjects", ()):
            subject["namespace"] = "serving"
        if made["kind"] != "ServiceAccount":
            with suppress(HTTPError):  # it is there
                cluster.request("POST", f"{RBAC}/{made['kind'].lower()}s", made)


@pytest.fixture
async def lists(slices: Slices, kubeconfig: Path) -> AsyncIterator[list[dict[str, str]]]:
    """What the source yields, from now on. A fault is an entry, too."""
    found: list[dict[str, str]] = []
    source = KubernetesSlices("kubernetes:engines", f"engines?api={slices.version}")

    async def follow() -> None:
        while True:
            try:
                async for members in source.lists():
                    found.append(states(members))
            except MembershipError as error:
                found.append({"fault": str(error)})

    task = asyncio.create_task(follow())
    yield found
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_service_account_needs_the_role_of_the_manifest(
    cluster: Cluster, slices: Slices, lists: list[dict[str, str]]
) -> None:
    slices.put(endpoint_slice(A))
    await until(lambda: bool(lists))
    said = lists[0]["fault"]
    assert f'User "{BALANCER}" cannot list resource "endpointslices"' in said
    assert "a Role in the namespace serving must allow apiGroups: [discovery.k8s.io]" in said
    allow(cluster)
    await until(lambda: lists[-1] == {"a": "ready"})


async def test_pods_join_drain_and_leave_through_many_watches(
    cluster: Cluster, slices: Slices, lists: list[dict[str, str]]
) -> None:
    allow(cluster)
    for number in range(22):  # more than a page
        slices.put(endpoint_slice(name=f"engines-{number}"))
    slices.put(endpoint_slice(A))
    await until(lambda: lists[-1:] == [{"a": "ready"}])
    slices.put(endpoint_slice(B, name="engines-b2"))
    await until(lambda: lists[-1] == {"a": "ready", "b": "ready"})
    await asyncio.sleep(2)  # the server ends a watch after one second
    slices.put(endpoint_slice(B_LEAVES, name="engines-b2"))
    await until(lambda: lists[-1] == {"a": "ready", "b": "draining"})
    slices.delete("engines-b2")
    await until(lambda: lists[-1] == {"a": "ready"})
    assert [entry for entry in lists if "fault" in entry] == []


async def test_a_version_that_the_server_has_compacted_is_listed_again(
    cluster: Cluster, slices: Slices, kubeconfig: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allow(cluster)
    slices.put(endpoint_slice(A))
    source = KubernetesSlices("kubernetes:engines", f"engines?api={slices.version}")
    lists = source.lists()
    await anext(lists)
    await lists.aclose()  # type: ignore[attr-defined]
    slices.put(endpoint_slice(A, B))
    slices.put(endpoint_slice(A, B_LEAVES))
    cluster.compact()
    listed = []
    original = source._list

    async def spy(client: Any) -> None:
        listed.append(client)
        await original(client)

    monkeypatch.setattr(source, "_list", spy)
    async for members in source.lists():
        if states(members) == {"a": "ready", "b": "draining"}:
            break
    assert len(listed) == 1


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_the_server_takes_the_manifests(cluster: Cluster, tmp_path: Path) -> None:
    write_kubeconfig(tmp_path / "config", cluster.url, ADMIN, cluster.certificate)
    kubectl = ["kubectl", "--kubeconfig", str(tmp_path / "config")]
    subprocess.run([*kubectl, "create", "namespace", "sgl-ext"], check=True)
    groups = cluster.request("GET", "/apis")["groups"]
    served = {each["groupVersion"] for group in groups for each in group["versions"]} | {"v1"}
    makers = {overlay: partial(built, overlay) for overlay in OVERLAYS}
    makers |= {
        f"chart {name}": partial(rendered, CHART, *values) for name, values in CHARTS.items()
    }
    for name, make in makers.items():
        # It may be older than a version that the manifests use, and knows no operator's objects.
        known = [each for each in make() if each["apiVersion"] in served]
        assert len(known) >= 8, name
        text = yaml.safe_dump_all(known)
        subprocess.run([*kubectl, "apply", "--filename", "-"], input=text, text=True, check=True)
