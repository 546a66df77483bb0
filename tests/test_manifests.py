"""The manifests for Kubernetes: valid, and in agreement with the programs that they start."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from sgl_ext_cpu.node import ROOT

from sgl_ext.integrations.kubernetes import SliceSelector
from sgl_ext.settings.schema import VARIABLE, EngineSettings
from sgl_ext.settings.sources import balancer_settings, picker_settings

pytestmark = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")

HOME = ROOT / "launch/kubernetes"
POOL, MODELS = "overlays/inference-pool", "overlays/several-models"
OVERLAYS = ("base", "overlays/gpu", "overlays/leader-worker-set", POOL, MODELS)
VERSIONS = (kubernetes_validate.utils.all_versions()[0], kubernetes_validate.latest_version())
COMPONENT = "app.kubernetes.io/component"
# What is used of a LeaderWorkerSet; its pods are validated by themselves.
POD = {"type": "object", "required": ["spec"]}
LEADER_WORKER_SET = {
    "type": "object",
    "additionalProperties": False,
    "required": ["replicas", "leaderWorkerTemplate"],
    "properties": {
        "replicas": {"type": "integer"},
        "leaderWorkerTemplate": {
            "type": "object",
            "additionalProperties": False,
            "required": ["size", "workerTemplate"],
            "properties": {
                "size": {"type": "integer", "minimum": 1},
                "restartPolicy": {
                    "enum": ["RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"]
                },
                "leaderTemplate": POD,
                "workerTemplate": POD,
            },
        },
    },
}

# What is used of the Gateway API and its inference extension.
PORT = {
    "type": "object",
    "additionalProperties": False,
    "required": ["number"],
    "properties": {"number": {"type": "integer", "minimum": 1, "maximum": 65535}},
}
NAMED = {"type": "object", "required": ["name"]}
INFERENCE_POOL = {
    "type": "object",
    "additionalProperties": False,
    "required": ["selector", "targetPorts", "endpointPickerRef"],
    "properties": {
        "selector": {
            "type": "object",
            "additionalProperties": False,
            "required": ["matchLabels"],
            "properties": {"matchLabels": {"additionalProperties": {"type": "string"}}},
        },
        "targetPorts": {"type": "array", "minItems": 1, "maxItems": 8, "items": PORT},
        "endpointPickerRef": {
            "type": "object",
            "additionalProperties": False,
            "required": ["name", "port"],
            "properties": {
                "name": {"type": "string"},
                "port": PORT,
                "failureMode": {"enum": ["FailOpen", "FailClose"]},
            },
        },
    },
}
HTTP_ROUTE = {
    "type": "object",
    "additionalProperties": False,
    "required": ["parentRefs", "rules"],
    "properties": {
        "parentRefs": {"type": "array", "items": NAMED},
        "rules": {
            "type": "array",
            "items": {
                "type": "object",
                "additionalProperties": False,
                "properties": {
                    "backendRefs": {"type": "array", "items": NAMED},
                    "timeouts": {"properties": {"request": {"pattern": "^[0-9]+(ms|s|m|h)$"}}},
                },
            },
        },
    },
}
SPECS = {
    "LeaderWorkerSet": LEADER_WORKER_SET,
    "InferencePool": INFERENCE_POOL,
    "HTTPRoute": HTTP_ROUTE,
}


@cache
def built(overlay: str) -> tuple[dict[str, Any], ...]:
    """The objects of an overlay, as `kubectl apply -k` sends them."""
    command = ["kubectl", "kustomize", str(HOME / overlay)]
    made = subprocess.run(command, capture_output=True, text=True, check=True)
    return tuple(yaml.safe_load_all(made.stdout))


def find(overlay: str, kind: str, name: str) -> Any:
    (found,) = (each for each in all_of(overlay, kind) if each["metadata"]["name"] == name)
    return found


def all_of(overlay: str, kind: str) -> list[Any]:
    return [each for each in built(overlay) if each["kind"] == kind]


def templates(overlay: str) -> Iterator[Any]:
    """The pods of an overlay."""
    for made in built(overlay):
        if made["kind"] == "Deployment":
            yield made["spec"]["template"]
        elif made["kind"] == "LeaderWorkerSet":
            group = made["spec"]["leaderWorkerTemplate"]
            yield from (group["leaderTemplate"], group["workerTemplate"])


def component(template: Any) -> str:
    name: str = template["metadata"]["labels"][COMPONENT]
    return name


def container(template: Any) -> Any:
    (one,) = template["spec"]["containers"]
    return one


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_object_is_what_kubernetes_takes(overlay: str, version: str) -> None:
    pods = [{"apiVersion": "v1", "kind": "Pod", **template} for template in templates(overlay)]
    assert len(pods) >= 2
    for made in (*built(overlay), *pods):
        if made["kind"] in SPECS:
            jsonschema.validate(made["spec"], SPECS[made["kind"]])
        else:
            kubernetes_validate.validate(made, version, strict=True)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_balancer_starts_with_its_arguments_and_finds_the_engines_service(
    overlay: str, tmp_path: Path
) -> None:
    (balancer,) = (one for one in templates(overlay) if component(one) == "balancer")
    (tmp_path / "secret").write_text("0123456789abcdef-secret")
    argv = [
        word.replace("/etc/sgl-ext/engine-secret", str(tmp_path / "secret"))
        for word in container(balancer)["args"]
    ]
    argv = [word.replace("/etc/sgl-ext/api-key", str(tmp_path / "secret")) for word in argv]
    if overlay == MODELS:
        (tmp_path / "models.toml").write_text(
            find(overlay, "ConfigMap", "models")["data"]["models.toml"]
        )
        argv = [word.replace("/etc/sgl-ext-models", str(tmp_path)) for word in argv]
    settings = picker_settings(argv) if overlay == POOL else balancer_settings(argv)
    found = []
    for source in settings.workers_from:
        selector = SliceSelector.parse(source.removeprefix("kubernetes:"))
        found.append(service := find(overlay, "Service", selector.labels.partition("=")[2]))
        assert [port["name"] for port in service["spec"]["ports"]] == [selector.port]
        assert service["spec"]["clusterIP"] == "None"
    headless = [s for s in all_of(overlay, "Service") if s["spec"].get("clusterIP") == "None"]
    assert found == headless
    # It serves while load balancers read that it leaves, drains, and is not killed before its end.
    sleep = int(container(balancer)["lifecycle"]["preStop"]["exec"]["command"][1])
    assert balancer["spec"]["terminationGracePeriodSeconds"] > sleep + settings.drain_s
    assert settings.port == container(balancer)["ports"][0]["containerPort"]
    probes = {name: container(balancer)[name]["httpGet"]["path"] for name in PROBES}
    assert probes == {"readinessProbe": "/ready", "livenessProbe": "/live"}


PROBES = ("readinessProbe", "livenessProbe")


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_engines_know_the_secret_and_drain(overlay: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engines = [one for one in templates(overlay) if component(one) == "engine"]
    assert engines
    for engine in engines:
        (source,) = container(engine)["envFrom"]
        data = find(overlay, "ConfigMap", source["configMapRef"]["name"])["data"]
        monkeypatch.setenv(VARIABLE, data[VARIABLE])
        settings = EngineSettings.from_environment()
        mounts = {mount["name"]: mount["mountPath"] for mount in container(engine)["volumeMounts"]}
        assert settings.engine_secret == f"file:{mounts['secrets']}/engine-secret"
        assert "--host=0.0.0.0" in container(engine)["args"]
        assert "preStop" in container(engine)["lifecycle"]
        assert engine["spec"]["terminationGracePeriodSeconds"] >= 600
        assert not engine["spec"]["automountServiceAccountToken"]
        volumes = {volume["name"]: volume for volume in engine["spec"]["volumes"]}
        # An engine does not get the clients' key.
        assert [one["key"] for one in volumes["secrets"]["secret"]["items"]] == ["engine-secret"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_balancer_may_watch_endpointslices_and_nothing_else(overlay: str) -> None:
    rules = [
        rule
        for made in built(overlay)
        if made["kind"] in ("Role", "ClusterRole")
        for rule in made["rules"]
    ]
    assert rules == [
        {
            "apiGroups": ["discovery.k8s.io"],
            "resources": ["endpointslices"],
            "verbs": ["list", "watch"],
        }
    ]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_only_balancers_reach_engines(overlay: str) -> None:
    policy = find(overlay, "NetworkPolicy", "engine")["spec"]
    assert policy["podSelector"]["matchLabels"] == {COMPONENT: "engine"}
    sources = [
        source["podSelector"]["matchLabels"]
        for rule in policy["ingress"]
        for source in rule["from"]
    ]
    if overlay == POOL:
        assert sources.pop() == {"gateway.networking.k8s.io/gateway-name": "sgl-ext"}
    # The pods of an engine that is wider than a node reach each other.
    within = [{COMPONENT: "engine"}] if overlay.endswith("leader-worker-set") else []
    assert sources == [{COMPONENT: "balancer"}, *within]


def test_each_model_has_engines_that_state_it_and_a_service_of_them_alone(tmp_path: Path) -> None:
    (tmp_path / "f").write_text(find(MODELS, "ConfigMap", "models")["data"]["models.toml"])
    settings = balancer_settings(["--config", str(tmp_path / "f"), "--worker", "http://a"])
    assert [model.name for model in settings.served] == ["large", "small"]
    assert [alias.name for alias in settings.aliases] == ["claude-haiku-*", "*"]
    for model in settings.served:
        deployment = find(MODELS, "Deployment", f"engine-{model.name}")["spec"]
        pod = deployment["template"]
        assert f"--served-model-name={model.name}" in container(pod)["args"]
        service = find(MODELS, "Service", f"engines-{model.name}")["spec"]["selector"]
        assert service == deployment["selector"]["matchLabels"] == pod["metadata"]["labels"]
        others = [one for one in templates(MODELS) if one != pod]
        assert not [one for one in others if service.items() <= one["metadata"]["labels"].items()]


def test_a_gateway_finds_the_engines_and_their_picker() -> None:
    pool = find(POOL, "InferencePool", "engines")["spec"]
    (engine,) = (one for one in templates(POOL) if component(one) == "engine")
    assert pool["selector"]["matchLabels"].items() <= engine["metadata"]["labels"].items()
    (port,) = pool["targetPorts"]
    assert port["number"] == container(engine)["ports"][0]["containerPort"]
    reference = pool["endpointPickerRef"]
    service = find(POOL, "Service", reference["name"])["spec"]
    (grpc,) = (each for each in service["ports"] if each["port"] == reference["port"]["number"])
    (picker,) = (one for one in templates(POOL) if component(one) == "balancer")
    ports = {each["name"]: each["containerPort"] for each in container(picker)["ports"]}
    argv = [word for word in container(picker)["args"] if "/etc/" not in word]
    settings = picker_settings([*argv, "--insecure"])  # its key is in a file that is not here
    assert ports[grpc["targetPort"]] == settings.picker_port
    assert settings.picker_host == "0.0.0.0"
    assert container(picker)["command"][-2:] == ["-m", "sgl_ext.epp"]
    (rule,) = find(POOL, "HTTPRoute", "engines")["spec"]["rules"]
    (backend,) = rule["backendRefs"]
    assert (backend["kind"], backend["name"]) == ("InferencePool", "engines")


def test_only_leaders_of_groups_are_engines_to_balancers() -> None:
    selector = find("overlays/leader-worker-set", "Service", "engines")["spec"]["selector"]
    assert selector["leaderworkerset.sigs.k8s.io/worker-index"] == "0"
    leader, worker = (
        one for one in templates("overlays/leader-worker-set") if component(one) == "engine"
    )
    assert container(leader)["args"] == container(worker)["args"]


def test_a_worker_of_a_group_stays_until_its_leader_has_gone() -> None:
    *_, worker = templates("overlays/leader-worker-set")
    command = container(worker)["lifecycle"]["preStop"]["exec"]["command"]
    environment = {**os.environ, "LWS_LEADER_ADDRESS": "127.0.0.1"}
    # Nothing listens on that port of this address, so it ends at once.
    command = [word.replace("/30000", "/1") for word in command]
    assert subprocess.run(command, env=environment, timeout=60, check=False).returncode == 0


def test_the_images_are_those_that_the_dockerfile_builds() -> None:
    text = (ROOT / "launch/Dockerfile").read_text()
    for template in templates("base"):
        image = container(template)["image"].partition(":")[0]
        target = image.removeprefix("sgl-ext-")
        assert f"--target {target} --tag {image}:" in text
        assert f" AS {target}\n" in text


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_no_pod_runs_as_root(overlay: str) -> None:
    for template in templates(overlay):
        context = template["spec"]["securityContext"]
        assert (context["runAsNonRoot"], context["runAsUser"]) == (True, 10001)
