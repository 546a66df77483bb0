"""The Helm chart makes what the manifests make, and what else its values ask for."""

from __future__ import annotations

import json
import shutil
import subprocess
import tomllib
from collections.abc import Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from sgl_ext_cpu.node import ROOT

from sgl_ext.settings.sources import balancer_settings
from tests.exported import declared
from tests.helm import rendered, require_helm
from tests.promql import labels_of, names_in
from tests.test_manifests import MODELS, VERSIONS, built

pytestmark = [
    pytest.mark.installs,
    pytest.mark.xdist_group("helm"),
    pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed"),
]
CHART = ROOT / "launch/kubernetes/chart"
TWO_MODELS = (
    "--set-json",
    'models=[{"name":"large","path":"Qwen/Qwen3-32B","fallback":"small","gpus":2,"args":["--tp=2"]},'
    '{"name":"small","path":"Qwen/Qwen3-8B"}]',
    "--set-json",
    'aliases=[{"name":"claude-haiku-*","model":"small"},{"name":"*","model":"large"}]',
)
# The values that make an overlay.
OVERLAYS: dict[str, Sequence[str]] = {
    "base": (),
    "overlays/gpu": ("--set", "engine.replicas=4", "--set", "weights.size=100Gi"),
    MODELS: TWO_MODELS,
}
TLS = ("--set", "balancer.tlsSecretName=node-tls")
MONITORED = ("--set", "monitoring.enabled=true", "--set", "monitoring.labels.release=kps")
SCALED = ("--set", "autoscaling.enabled=true")
# What is used of the operators' objects.
ENDPOINT = {
    "type": "object",
    "additionalProperties": False,
    "required": ["port", "path"],
    "properties": {
        "port": {"type": "string"},
        "path": {"type": "string"},
        "scheme": {"enum": ["http", "https"]},
        "scrapeTimeout": {"type": "string"},
        "tlsConfig": {"required": ["insecureSkipVerify"]},
        "authorization": {"required": ["credentials"]},
        "relabelings": {"type": "array", "items": {"type": "object"}},
    },
}
SPECS: dict[str, Any] = {
    "ServiceMonitor": {
        "type": "object",
        "additionalProperties": False,
        "required": ["selector", "endpoints"],
        "properties": {
            "selector": {"required": ["matchLabels"]},
            "endpoints": {"type": "array", "items": ENDPOINT},
        },
    },
    "PrometheusRule": {
        "type": "object",
        "additionalProperties": False,
        "properties": {"groups": {"type": "array", "minItems": 1}},
    },
    "ScaledObject": {
        "type": "object",
        "additionalProperties": False,
        "required": ["scaleTargetRef", "triggers"],
        "properties": {
            "scaleTargetRef": {"required": ["name"]},
            "minReplicaCount": {"type": "integer"},
            "maxReplicaCount": {"type": "integer"},
            "cooldownPeriod": {"type": "integer"},
            "advanced": {"required": ["horizontalPodAutoscalerConfig"]},
            "triggers": {"type": "array", "items": {"required": ["type", "metadata"]}},
        },
    },
}


def by_name(objects: Sequence[Any]) -> dict[tuple[str, str], Any]:
    found = {(each["kind"], each["metadata"]["name"]): each for each in objects}
    assert len(found) == len(objects)
    return found


def find(objects: Sequence[Any], kind: str, name: str) -> Any:
    return by_name(objects)[kind, name]


def parsed(objects: dict[tuple[str, str], Any]) -> dict[tuple[str, str], Any]:
    """With the files in ConfigMaps as what they say, in whose text blanks mean nothing, and volumes
    in the order of their names: kustomize puts first what a patch names. Without annotations, by
    which the chart starts balancers again."""
    for each in objects.values():
        if each["kind"] == "Deployment":
            each["spec"]["template"]["metadata"].pop("annotations", None)
            pod = each["spec"]["template"]["spec"]
            (container,) = pod["containers"]
            for rows in (pod["volumes"], container["volumeMounts"]):
                rows.sort(key=itemgetter("name"))
        elif each["kind"] == "ConfigMap":
            for name, read in READ.items():
                if name in each["data"]:
                    each["data"][name] = read(each["data"][name])
    return objects


def read_toml(text: str) -> Any:
    """The tables with the order of their keys, which decides between patterns."""
    return [(k, [*v.items()] if isinstance(v, dict) else v) for k, v in tomllib.loads(text).items()]


READ = {"SGLEXT_SETTINGS": json.loads, "models.toml": read_toml}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_chart_makes_the_objects_of_the_manifests(overlay: str) -> None:
    made = parsed(by_name(rendered(CHART, *OVERLAYS[overlay])))
    wanted = parsed(by_name(json.loads(json.dumps(built(overlay)))))
    assert made.keys() == wanted.keys()
    for name, one in wanted.items():
        assert made[name] == one, name


def options() -> Iterator[Sequence[str]]:
    for tls in ((), TLS):
        for more in ((), (*MONITORED, *SCALED)):
            for models in ((), TWO_MODELS):
                yield (*tls, *more, *models)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("flags", options(), ids=" ".join)
def test_every_object_is_what_kubernetes_takes(flags: Sequence[str], version: str) -> None:
    for made in rendered(CHART, *flags):
        if made["kind"] in SPECS:
            jsonschema.validate(made["spec"], SPECS[made["kind"]])
        else:
            kubernetes_validate.validate(made, version, strict=True)


def test_helm_finds_no_fault() -> None:
    command = [require_helm(), "lint", "--strict", str(CHART)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("flag", ["balancer.replica=3", "engine.gpus=0", "modell=x"])
def test_an_unknown_or_wrong_value_is_refused(flag: str) -> None:
    with pytest.raises(subprocess.CalledProcessError) as failed:
        rendered(CHART, "--set", flag)
    assert "don't meet the specifications of the schema" in failed.value.stderr


def test_with_a_certificate_the_port_and_its_probes_speak_https(tmp_path: Path) -> None:
    balancer = find(rendered(CHART, *TLS), "Deployment", "balancer")["spec"]["template"]["spec"]
    (container,) = balancer["containers"]
    for probe in ("readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["scheme"] == "HTTPS"
    (mount,) = (one for one in container["volumeMounts"] if one["name"] == "tls")
    args = [word for word in container["args"] if word.startswith("--tls")]
    assert args == [
        f"--tls-cert={mount['mountPath']}/tls.crt",
        f"--tls-key={mount['mountPath']}/tls.key",
    ]
    (volume,) = (one for one in balancer["volumes"] if one["name"] == "tls")
    assert volume["secret"]["secretName"] == "node-tls"


def test_more_flags_are_the_balancers() -> None:
    made = rendered(CHART, "--set-json", 'balancer.args=["--queue-timeout-s=60"]')
    (container,) = find(made, "Deployment", "balancer")["spec"]["template"]["spec"]["containers"]
    argv = [word for word in container["args"] if "/etc/" not in word]
    assert balancer_settings([*argv, "--insecure"]).queue_timeout_s == 60


def test_the_rules_are_those_of_the_file() -> None:
    rule = find(rendered(CHART, *MONITORED), "PrometheusRule", "sgl-ext")
    assert rule["spec"] == yaml.safe_load((ROOT / "launch/alerts.yml").read_text())
    assert rule["metadata"]["labels"]["release"] == "kps"


@pytest.mark.parametrize("tls", [(), TLS])
def test_prometheus_scrapes_both_pages_of_the_balancers_service(tls: Sequence[str]) -> None:
    made = rendered(CHART, *MONITORED, *tls)
    monitor = find(made, "ServiceMonitor", "sgl-ext")["spec"]
    services = [each for each in made if each["kind"] == "Service"]
    wanted = monitor["selector"]["matchLabels"].items()
    (service,) = (one for one in services if wanted <= one["metadata"]["labels"].items())
    (port,) = service["spec"]["ports"]
    jobs = {}
    for endpoint in monitor["endpoints"]:
        assert endpoint["port"] == port["name"]
        assert endpoint["scheme"] == ("https" if tls else "http")
        (job,) = (rule for rule in endpoint["relabelings"] if rule.get("targetLabel") == "job")
        jobs[endpoint["path"]] = job["replacement"]
    # Those of prometheus.yml, which the rules name.
    assert jobs == {"/metrics": "sgl-ext", "/metrics/engines": "sgl-ext-engines"}
    (address,) = (
        rule["replacement"]
        for endpoint in monitor["endpoints"]
        for rule in endpoint["relabelings"]
        if rule.get("targetLabel") == "__address__"
    )
    assert address == f"balancer.sgl-ext.svc:{port['port']}"


@pytest.mark.parametrize(("values", "model"), [((), ""), (TWO_MODELS, "small")])
def test_engines_are_scaled_by_the_agents_of_their_model_that_fit(
    values: Sequence[str], model: str
) -> None:
    made = rendered(CHART, *SCALED, *values)
    name = f"engine-{model}" if model else "engine"
    scaled = find(made, "ScaledObject", name)["spec"]
    assert scaled["scaleTargetRef"]["name"] == name
    engine = find(made, scaled["scaleTargetRef"].get("kind", "Deployment"), name)
    assert "replicas" not in engine["spec"], "Helm would set it back"
    (trigger,) = scaled["triggers"]
    assert (trigger["type"], trigger["metricType"]) == ("prometheus", "Value")
    query = trigger["metadata"]["query"]
    assert set(names_in(query)) == {"sgl_ext_model_agents"}
    assert query.count(f'model="{model}"') == (2 if model else 0)
    known = {
        **declared(),
        "sgl_ext_model_agents": {*declared()["sgl_ext_model_agents"], "namespace"},
    }
    assert labels_of(query, known) is not None
    assert float(trigger["metadata"]["threshold"]) == 0.8


def test_another_alias_starts_balancers_again_and_no_engine() -> None:
    alias = "--set", "aliases[0].name=*,aliases[0].model=small"
    before = parsed_pods(rendered(CHART, *TWO_MODELS))
    after = parsed_pods(rendered(CHART, *TWO_MODELS, *alias))
    assert [name for name in before if before[name] != after[name]] == ["balancer"]


def parsed_pods(objects: Sequence[Any]) -> dict[str, Any]:
    return {o["metadata"]["name"]: o["spec"] for o in objects if o["kind"] == "Deployment"}


def test_a_model_may_have_no_engine_for_now() -> None:
    one = 'models=[{"name":"a","path":"b","replicas":0}]'
    made = rendered(CHART, "--set-json", one)
    assert find(made, "Deployment", "engine-a")["spec"]["replicas"] == 0
