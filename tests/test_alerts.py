"""The Prometheus rules name only metrics and labels that exist, and fire when they should."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.debian import require_promtool
from tests.exported import declared
from tests.promql import Known, labels_of, names_in

LAUNCH = Path(__file__).parent.parent / "launch"
PATH = LAUNCH / "alerts.yml"


def rules() -> Iterator[dict[str, Any]]:
    for group in yaml.safe_load(PATH.read_text())["groups"]:
        yield from group["rules"]


def test_every_rule_reads_what_a_node_exports() -> None:
    known: Known = declared()
    assert len({name for rule in rules() for name in names_in(rule["expr"])}) > 30
    for rule in rules():
        found = labels_of(rule["expr"], known)
        assert found is not None
        if "record" in rule:
            known = {**known, rule["record"]: found}
            continue
        written = " ".join(rule["annotations"].values())
        assert set(re.findall(r"\$labels\.(\w+)", written)) <= found, rule["alert"]


def test_every_rule_is_well_formed() -> None:
    seen = set()
    for rule in rules():
        assert set(rule) <= {"record", "alert", "expr", "for", "labels", "annotations"}
        name = rule.get("record") or rule["alert"]
        assert name not in seen
        seen.add(name)
        assert re.fullmatch(r"[a-zA-Z_:][a-zA-Z0-9_:]*", name)
        if "alert" in rule:
            assert rule["labels"]["severity"] in ("info", "warning", "critical")
            assert rule["annotations"]["summary"]


def test_prometheus_scrapes_both_pages_and_loads_the_rules() -> None:
    config = yaml.safe_load((LAUNCH / "prometheus.yml").read_text())
    assert config["rule_files"] == [PATH.name]
    scraped = {
        job["job_name"]: job.get("metrics_path", "/metrics") for job in config["scrape_configs"]
    }
    assert scraped == {"sgl-ext": "/metrics", "sgl-ext-engines": "/metrics/engines"}
    named = {job for rule in rules() for job in re.findall(r'job="([^"]*)"', rule["expr"])}
    assert named <= scraped.keys()


def test_promtool_accepts_the_configuration_and_its_rules() -> None:
    require_promtool()
    run_promtool("check", "config", str(LAUNCH / "prometheus.yml"))


# A counter that begins with its first failure; an engine that hangs, and one that starts; events
# of a ready engine; and a store whose first failures come after it was well.
CASES: list[tuple[str, dict[str, str], str, dict[str, str] | None]] = [
    ("SglExtBackgroundFailures", {'f{task="probe"}': "_ _ 1x8"}, "4m", {"task": "probe"}),
    ("SglExtBackgroundFailures", {'f{task="probe"}': "1x30"}, "20m", None),
    ("SglExtEngineDown", {'state{worker="e",state="hung"}': "1x10"}, "6m", {"worker": "e"}),
    ("SglExtEngineDown", {'state{worker="e",state="starting"}': "1x10"}, "6m", None),
    ("SglExtEngineStalled", {'state{worker="e",state="stalled"}': "1x9"}, "3m", {"worker": "e"}),
    ("SglExtEngineStalled", {'state{worker="e",state="ready"}': "1x9"}, "3m", None),
    (
        "SglExtEventStreamLost",
        {'subscribed{worker="e"}': "0x9", 'ready{worker="e"}': "1x9"},
        "5m",
        {"worker": "e"},
    ),
    (
        "SglExtEventStreamLost",
        {'subscribed{worker="e"}': "0x9", 'ready{worker="e"}': "0x9"},
        "5m",
        None,
    ),
    ("SglExtNoEngineReady", {'ready{worker="a"}': "0x9", 'ready{worker="b"}': "0x9"}, "2m", {}),
    ("SglExtNoEngineReady", {'ready{worker="a"}': "0x9", 'ready{worker="b"}': "1x9"}, "2m", None),
    ("SglExtStoreFails", {'store{event="failed"}': "0 0 0+1x20"}, "10m", {"event": "failed"}),
    ("SglExtEngineMetricsUnread", {'up{engine="e"}': "0x20"}, "15m", {"engine": "e"}),
    ("SglExtRunFolderFull", {'free{r="1"}': "4x20", 'disk{r="1"}': "100x20"}, "10m", {"r": "1"}),
    ("SglExtRunFolderFull", {'free{r="1"}': "6x20", 'disk{r="1"}': "100x20"}, "10m", None),
    ("SglExtEngineCrashed", {'crashes{child="engine-1"}': "0 0 1x20"}, "4m", {"child": "engine-1"}),
    ("SglExtEngineCrashed", {'crashes{child="engine-1"}': "3x40"}, "30m", None),
    ("SglExtDegraded", {'some{r="1"}': "1x20", 'all{r="1"}': "2x20"}, "10m", {"r": "1"}),
    ("SglExtDegraded", {'some{r="1"}': "2x20", 'all{r="1"}': "2x20"}, "10m", None),
    (
        "SglExtEngineDrained",
        {'state{worker="e",state="drained"}': "1x30"},
        "20m",
        {"worker": "e", "state": "drained"},
    ),
    ("SglExtEngineDrained", {'state{worker="e",state="draining"}': "1x30"}, "20m", None),
    (
        "SglExtErrors",
        {'asked{status="200"}': "0+99x20", 'asked{status="502"}': "0+5x20"},
        "15m",
        {},
    ),
    (
        "SglExtErrors",
        {'asked{status="200"}': "0+999x20", 'asked{status="502"}': "0+5x20"},
        "15m",
        None,
    ),
]
METRICS = {
    "f": "sgl_ext_background_failures_total",
    "state": "sgl_ext_worker_state",
    "subscribed": "sgl_ext_worker_subscribed",
    "ready": "sgl_ext_worker_ready",
    "store": "sgl_ext_store_events_total",
    "up": "sgl_ext_engine_up",
    "free": "sgl_ext_run_folder_free_bytes",
    "disk": "sgl_ext_run_folder_bytes",
    "crashes": "sgl_ext_child_crashes_total",
    "some": "sgl_ext_engines_ready",
    "all": "sgl_ext_engines_wanted",
    "asked": "sgl_ext_requests_total",
}


def test_alerts_fire_when_they_should(tmp_path: Path) -> None:
    require_promtool()
    alerts = {rule["alert"]: rule for rule in rules() if "alert" in rule}
    cases = []
    for alert, series, at, expected in CASES:
        named = {
            f'{METRICS[name]}{{job="sgl-ext",instance="n",{rest}': values
            for (name, _, rest), values in (
                (key.partition("{"), value) for key, value in series.items()
            )
        }
        keys = labels_of(alerts[alert]["expr"], {**declared(), **{r: set() for r in recorded()}})
        assert keys is not None
        fires = []
        if expected is not None:
            always = {"job": "sgl-ext", "instance": "n"}
            full = {k: v for k, v in always.items() if k in keys} | expected
            if alert == "SglExtEngineDown":
                full["state"] = "hung"
            if alert == "SglExtEngineStalled":
                full["state"] = "stalled"
            fires = [{"exp_labels": full | alerts[alert]["labels"]}]
        cases.append(
            {
                "interval": "1m",
                "input_series": [{"series": k, "values": v} for k, v in named.items()],
                "alert_rule_test": [{"eval_time": at, "alertname": alert, "exp_alerts": fires}],
            }
        )
    without_texts = yaml.safe_load(PATH.read_text())
    for group in without_texts["groups"]:
        for rule in group["rules"]:
            rule.pop("annotations", None)
    (tmp_path / "rules.yml").write_text(yaml.safe_dump(without_texts))
    test = {"rule_files": ["rules.yml"], "evaluation_interval": "1m", "tests": cases}
    (tmp_path / "test.yml").write_text(yaml.safe_dump(test))
    run_promtool("test", "rules", str(tmp_path / "test.yml"))


def recorded() -> set[str]:
    return {rule["record"] for rule in rules() if "record" in rule}


def run_promtool(*arguments: str) -> None:
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
