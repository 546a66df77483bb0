"""The sizes of a node's tables, from its metrics and its administration, and their bounds."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from bench.faults.target import POOL_TOKENS, Target
from sgl_ext.settings.schema import BalancerSettings, EngineSettings

_PREFIX = "sgl_ext_"
_TIMEOUT = aiohttp.ClientTimeout(total=30)
_WAL_BYTES = 64 << 20


def bounds(balancer: BalancerSettings, engine: EngineSettings, processes: int) -> dict[str, float]:
    """The bounds that the settings state, by the beginning of a table's name."""
    return {
        "sgl_ext_queued_requests": processes * balancer.queue_limit,
        "sgl_ext_worker_in_flight": processes * balancer.max_in_flight,
        "sgl_ext_worker_pinned_tokens": engine.pin_budget * POOL_TOKENS,
        "sgl_ext_connections": processes * balancer.max_connections,
        "sgl_ext_held_bytes": processes * balancer.account_bytes,
        "store_bytes": balancer.store_limit_bytes + _WAL_BYTES,
        "request_log_bytes": balancer.request_log_limit_bytes,
    }


async def sizes(target: Target, http: aiohttp.ClientSession) -> dict[str, float]:
    """The size of each table: every gauge of ours, on the balancer's and the engines' pages, the
    pins, the store, and the entries of the temporary directory."""
    found: dict[str, float] = {}
    for name, url in (("", target.url), *enumerate(target.node.engines)):
        async with http.get(f"{url}/metrics", timeout=_TIMEOUT) as answer:
            page = await answer.text()
        found |= {f"{gauge}{_on(name)}": value for gauge, value in _gauges(page)}
    async with http.get(f"{target.url}/v1/pins", timeout=_TIMEOUT) as answer:
        found["pins"] = len((await answer.json())["pins"])
    found["store_bytes"] = _bytes(target.store)
    found["request_log_bytes"] = _bytes(target.log)
    found["temporary_files"] = await asyncio.to_thread(_entries, target.tmp_disk.path)
    named = {url: f"engine {number}" for number, url in enumerate(target.node.engines)}
    return {_renamed(name, named): size for name, size in found.items()}


def _renamed(name: str, urls: dict[str, str]) -> str:
    return " ".join(urls.get(word, word) for word in name.split(" "))


def _on(engine: object) -> str:
    return "" if engine == "" else f" engine {engine}"


def _gauges(page: str) -> Iterator[tuple[str, float]]:
    for family in text_string_to_metric_families(page):
        if family.type != "gauge" or not family.name.startswith(_PREFIX):
            continue
        for sample in family.samples:
            labels = [v for k, v in sorted(sample.labels.items()) if k not in ("pid", "model_name")]
            yield " ".join([sample.name, *labels]), sample.value


def _bytes(file: Path) -> int:
    """With the files whose names begin with its name."""
    return sum(path.stat().st_size for path in file.parent.glob(f"{file.name}*"))


def _entries(folder: Path) -> int:
    return sum(1 for _ in folder.rglob("*"))


def over_bound(found: dict[str, float], limits: dict[str, float]) -> Iterator[str]:
    """The tables that are larger than their bound."""
    for name, size in found.items():
        for start, limit in limits.items():
            if name.startswith(start) and size > limit:
                yield f"{name}: {size:g} of {limit:g}"
