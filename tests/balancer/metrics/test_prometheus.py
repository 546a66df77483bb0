"""A real Prometheus with the configuration and the rules of launch/, and a node in an outage."""

from __future__ import annotations

import asyncio
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import requests
import yaml
from sgl_ext_cpu.node import ROOT, free_port, running_process

from tests.balancer.conftest import Engine, Start
from tests.debian import require_debian
from tests.waiting import HANG_S, until

pytestmark = pytest.mark.long

OFTEN = "200ms"


def configured(folder: Path, target: str) -> Path:
    """The configuration with this target. It reads often, and its alerts wait for nothing."""
    config: Any = yaml.safe_load((ROOT / "launch/prometheus.yml").read_text())
    config["global"] = {"scrape_interval": OFTEN, "evaluation_interval": OFTEN}
    for job in config["scrape_configs"]:
        job.pop("scrape_timeout", None)
        job["static_configs"] = [{"targets": [target]}]
    rules: Any = yaml.safe_load((ROOT / "launch/alerts.yml").read_text())
    for group in rules["groups"]:
        group.pop("interval", None)
        for rule in group["rules"]:
            rule.pop("for", None)
    (folder / "alerts.yml").write_text(yaml.safe_dump(rules))
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    return folder / "prometheus.yml"


def firing(url: str) -> dict[str, set[str]]:
    """The alerts that fire, with the engines that they name."""
    found: dict[str, set[str]] = {}
    for alert in requests.get(f"{url}/api/v1/alerts", timeout=HANG_S).json()["data"]["alerts"]:
        labels = alert["labels"]
        found.setdefault(labels["alertname"], set()).add(labels.get("worker", ""))
    return found


def value(url: str, query: str) -> float | None:
    answer = requests.get(f"{url}/api/v1/query", params={"query": query}, timeout=HANG_S).json()
    rows = answer["data"]["result"]
    return float(rows[0]["value"][1]) if rows else None


def is_live(url: str) -> bool:
    try:
        return requests.get(f"{url}/-/ready", timeout=HANG_S).ok
    except requests.ConnectionError:
        return False


async def test_a_node_that_loses_its_engines_fires_the_alerts(start: Start, tmp_path: Path) -> None:
    require_debian(lambda: shutil.which("prometheus") is not None, "prometheus")
    engines = Engine("a"), Engine("b")
    client = await start(*engines)
    node = str(client._base_url).removeprefix("http://").rstrip("/")
    url = f"http://127.0.0.1:{free_port()}"
    command = ["prometheus", "--config.file", str(configured(tmp_path, node))]
    command += ["--storage.tsdb.path", str(tmp_path / "data")]
    command += ["--web.listen-address", url.removeprefix("http://")]

    holds = partial(asyncio.to_thread, until)
    with running_process(command, tmp_path / "log", lambda: True):
        await holds(partial(is_live, url))
        await holds(lambda: value(url, "sgl_ext_engines_ready") == 2)
        outage = {"SglExtEngineDown", "SglExtDegraded", "SglExtNoEngineReady"}
        assert outage.isdisjoint(firing(url))
        lost = [engine.url for engine in engines]
        for number, engine in enumerate(engines):
            assert engine.server is not None
            await engine.server.close()
            down = {*lost[: number + 1]}
            await holds(lambda down=down: firing(url).get("SglExtEngineDown") == down)
            await holds(lambda: "SglExtDegraded" in firing(url))
            assert ("SglExtNoEngineReady" in firing(url)) <= bool(number)
        await holds(lambda: "SglExtNoEngineReady" in firing(url))
