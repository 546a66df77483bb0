"""The Grafana dashboards show what a node exports, and are well-formed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import requests
from prometheus_client.parser import text_string_to_metric_families
from sgl_ext_cpu.node import Node

from tests.exported import declared, sglang_source
from tests.promql import Known, labels_of, names_in
from tests.test_alerts import rules
from tests.waiting import HANG_S

FOLDER = Path(__file__).parents[1] / "launch" / "grafana"
DASHBOARDS = {path.stem: json.loads(path.read_text()) for path in FOLDER.glob("*.json")}
TITLES = {
    "sgl-ext-node": "sgl-ext: node",
    "sgl-ext-tenants": "sgl-ext: tenants",
    "sgl-ext-cache": "sgl-ext: cache",
}
# Grafana's names of units; others begin with `suffix:`.
UNITS = {"short", "s", "bytes", "Bps", "percentunit", "reqps", "cps"}
KINDS = {"timeseries", "stat", "bargauge", "heatmap", "state-timeline"}


def panels(dashboard: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """All panels but the rows, also those inside closed rows."""
    for panel in dashboard["panels"]:
        yield from panel["panels"] if panel["type"] == "row" else (panel,)


def queries() -> Iterator[tuple[str, str, str]]:
    """Each query with the panel's title and the legend."""
    for name, dashboard in DASHBOARDS.items():
        for panel in panels(dashboard):
            for target in panel["targets"]:
                yield f"{name}: {panel['title']}", target["expr"], target["legendFormat"]


def sglang_names() -> set[str]:
    used = {name for _, expression, _ in queries() for name in names_in(expression)}
    return {name for name in used if name.startswith("sglang:")}


def known_metrics() -> Known:
    """An engine's own have its label; of SGLang's, `engine` is the only one that queries name."""
    return declared() | dict.fromkeys(sglang_names(), frozenset({"engine"}))


def test_every_query_names_metrics_and_labels_that_exist() -> None:
    known, found = known_metrics(), 0
    for where, expression, legend in queries():
        try:
            labels = labels_of(expression, known)
        except (AssertionError, ValueError) as error:
            pytest.fail(f"{where}: {error}\n{expression}")
        assert labels is not None, where
        shown = set(re.findall(r"\{\{(\w+)\}\}", legend))
        le = {"le"} if "_bucket" in expression else set()
        assert shown <= labels | le, where
        # Otherwise several series would have one name.
        assert labels <= shown | {"job", "instance"} | le, where
        found += 1
    assert found > 100


def test_every_variable_asks_for_a_label_that_exists() -> None:
    known = known_metrics()
    for dashboard in DASHBOARDS.values():
        source, *variables = dashboard["templating"]["list"]
        assert (source["name"], source["type"]) == ("datasource", "datasource")
        defined = {source["name"], *(each["name"] for each in variables)}
        for each in variables:
            match = re.fullmatch(r"label_values\((.*), (\w+)\)", each["definition"])
            assert match is not None
            labels = labels_of(match[1], known)
            assert labels is not None
            assert match[2] in labels
        used = set(re.findall(r"\$\{?(\w+)", json.dumps(dashboard["panels"])))
        assert {name for name in used if not name.startswith("__")} == defined


def test_every_dashboard_is_well_formed() -> None:
    assert {d["uid"]: d["title"] for d in DASHBOARDS.values()} == TITLES
    for dashboard in DASHBOARDS.values():
        others = {link["url"] for link in dashboard["links"]}
        assert others == {f"/d/{uid}" for uid in TITLES if uid != dashboard["uid"]}
        assert all(link["includeVars"] and link["keepTime"] for link in dashboard["links"])
        rows = [panel for panel in dashboard["panels"] if panel["type"] == "row"]
        every = [*rows, *panels(dashboard)]
        assert len({panel["id"] for panel in every}) == len(every)
        for panel in panels(dashboard):
            assert panel["type"] in KINDS
            assert panel["description"].endswith((".", ".md."))
            unit = panel["fieldConfig"]["defaults"].get("unit") or "short"
            assert unit in UNITS or unit.startswith("suffix:"), panel["title"]
            assert [t["refId"] for t in panel["targets"]] == sorted(
                {t["refId"] for t in panel["targets"]}
            )
            for step, after in pairwise(
                panel["fieldConfig"]["defaults"].get("thresholds", {}).get("steps", [])
            ):
                assert step["value"] is None or step["value"] < after["value"]
        for panels_of_one in (dashboard["panels"], *(row["panels"] for row in rows)):
            assert_no_overlap([panel["gridPos"] for panel in panels_of_one])


def assert_no_overlap(places: list[dict[str, int]]) -> None:
    taken: set[tuple[int, int]] = set()
    for place in places:
        assert place["x"] + place["w"] <= 24
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert (x, y) not in taken, place
                taken.add((x, y))


def test_sglang_names_these_metrics() -> None:
    source = sglang_source()
    assert sglang_names()
    for name in sglang_names():
        assert f'"{name}"' in source, name


def test_a_running_node_exports_what_queries_and_alerts_name(node: Node) -> None:
    marked = {"type": "text", "text": "Count. " * 200, "cache_control": {"type": "ephemeral"}}
    body = {
        "model": "m",
        "max_tokens": 4,
        "stream": True,
        "messages": [{"role": "user", "content": [marked]}],
    }
    assert node.post("/v1/messages", body).status_code == 200
    paths = ("/metrics", "/metrics/engines")
    pages = [requests.get(node.url + path, timeout=HANG_S).text for path in paths]
    shown: dict[str, set[str]] = {}
    families = set()
    for page in pages:
        for family in text_string_to_metric_families(page):
            families |= {family.name, f"{family.name}_total"}
            families |= {family.name + end for end in ("_bucket", "_sum", "_count")}
            for sample in family.samples:
                shown.setdefault(sample.name, set()).update(sample.labels)
    used = {name for _, expression, _ in queries() for name in names_in(expression)}
    used |= {name for rule in rules() for name in names_in(rule["expr"])}
    known = declared()
    for name in sorted(used):
        if name.startswith("sglang:"):
            assert "engine" in shown[name], name
        elif name in shown:
            # The declared labels, which the other tests rely on, are those of the page.
            assert shown[name] - known[name] == set(), name
        elif name in families:
            continue  # a balancer's series with labels that nothing was counted for yet
        else:
            # An engine shows a counter with labels when it first counts; and rules record series.
            labels = known.get(name, set()) - {"engine"}
            assert labels or ":" in name or name == "up", name
    assert pages[1].count("# TYPE sglang:token_usage gauge") == 1
    up = 'sgl_ext_engine_up{engine="'
    assert sum(line.startswith(up) and line.endswith(" 1") for line in pages[1].splitlines()) == 2
