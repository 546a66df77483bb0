"""The Prometheus rules name only existing metrics, in well-formed expressions."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import requests
import yaml
from prometheus_client.parser import text_string_to_metric_families
from sgl_ext_cpu.node import Node

from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.balancer.routing.worker_sources import WorkerSources
from sgl_ext.engine.core.counters import COUNTERS
from sgl_ext.membership.static import StaticList
from tests.balancer.workers import workers_at

PATH = Path(__file__).parent.parent / "launch" / "alerts.yml"
_STRINGS = re.compile(r'"(?:[^"\\]|\\.)*"')
_LABELS = re.compile(r"\b(?:by|without|on|ignoring)\s*\([^)]*\)")
_WORDS = {"and", "or", "unless", "offset", "bool"}


def rules() -> Iterator[dict[str, Any]]:
    for group in yaml.safe_load(PATH.read_text())["groups"]:
        yield from group["rules"]


def names_in(expression: str) -> set[str]:
    """The metrics that an expression reads."""
    bare = _LABELS.sub(" ", _STRINGS.sub('""', expression))
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]|offset\s+\w+", " ", bare)
    words = re.findall(r"(?<![\w:])[a-zA-Z_:][\w:]*(?![\w:]*\s*\()", bare)
    return {word for word in words if word not in _WORDS}


def used() -> set[str]:
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    return {name for rule in rules() for name in names_in(rule["expr"])} - recorded


def series_of(page: str) -> set[str]:
    """Every series that a page may have, whether it was counted yet or not."""
    names = set()
    for family in text_string_to_metric_families(page):
        names |= {family.name, f"{family.name}_total"} | {sample.name for sample in family.samples}
        if family.type == "histogram":
            names |= {f"{family.name}{end}" for end in ("_bucket", "_sum", "_count")}
    return names


def of_the_balancer() -> set[str]:
    metrics = Metrics()
    workers = workers_at(("http://127.0.0.1:1",), metrics)
    WorkerSources([StaticList(())], workers, metrics)
    return series_of(metrics.render().decode())


# Each is made when it first counts, so that a page has few of them.
OF_THE_PLUGIN = {f"sgl_ext_{name}_total" for name in COUNTERS}


def test_every_metric_exists() -> None:
    ours = {name for name in used() if name.startswith("sgl_ext")}
    assert len(ours) > 15
    assert ours <= of_the_balancer() | OF_THE_PLUGIN
    spec = find_spec("sglang")
    assert spec is not None
    assert spec.submodule_search_locations
    folder = Path(spec.submodule_search_locations[0]) / "srt" / "observability"
    source = "".join(path.read_text() for path in folder.glob("*.py"))
    for name in used() - ours:
        assert f'"{name}"' in source, name


def test_the_metrics_pages_of_a_node_have_every_metric(node: Node) -> None:
    body = {"model": "m", "max_tokens": 2, "messages": [{"role": "user", "content": "Count."}]}
    assert node.post("/v1/chat/completions", body).status_code == 200
    urls = (node.url, node.engines[0])
    pages = [requests.get(f"{url}/metrics", timeout=30).text for url in urls]
    balancer, engine = map(series_of, pages)
    assert {"sgl_ext_prompt_tokens_total", "sgl_ext_worker_ready"} <= balancer
    assert {name for name in used() if name.startswith("sgl_ext")} <= balancer | OF_THE_PLUGIN
    assert {name for name in used() if name.startswith("sglang:")} <= engine


def test_every_rule_is_well_formed() -> None:
    seen = set()
    for rule in rules():
        assert set(rule) <= {"record", "alert", "expr", "for", "labels", "annotations"}
        name = rule.get("record") or rule["alert"]
        assert name not in seen
        seen.add(name)
        assert re.fullmatch(r"[a-zA-Z_:][a-zA-Z0-9_:]*", name)
        assert is_balanced(rule["expr"]), name
        assert names_in(rule["expr"]), name
        if "alert" in rule:
            assert rule["labels"]["severity"] in ("info", "warning", "critical")
            assert rule["annotations"]["summary"]


def is_balanced(expression: str) -> bool:
    opened = []
    for sign in re.sub(r"[^][(){}\"]", "", _STRINGS.sub("", expression)):
        if sign in "([{":
            opened.append(sign)
        elif sign == '"' or not opened or opened.pop() + sign not in ("()", "[]", "{}"):
            return False
    return not opened


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not on PATH")
def test_promtool_accepts_the_rules() -> None:
    done = subprocess.run(
        ["promtool", "check", "rules", str(PATH)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
