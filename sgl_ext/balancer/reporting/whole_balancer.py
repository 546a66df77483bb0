"""What all processes of a balancer report together: metrics, findings, and the state.

Each process writes its part to a file once a second, and any of them adds up all.

prometheus_client has a multiprocess mode, but only for its own counters, which are too slow for
every request (see `metrics/registry.py`).
"""

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import orjson

from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.balancer.reporting.diagnosis import Detector
from sgl_ext.prompts.findings import merged

SUMMED_GAUGES = (
    "sgl_ext_worker_in_flight",
    "sgl_ext_queued_requests",
    "sgl_ext_queued_by_priority",
    "sgl_ext_held_requests",
    "sgl_ext_model_queued_requests",
    "sgl_ext_held_bytes",
    "sgl_ext_connections",
    "sgl_ext_live_streams",
)
"""Gauges that are added up, as each process has a part. The others have the same value in every
process, or that of the fullest process counts, or each process has a series of its own."""
COMMON_COUNTERS = (
    "sgl_ext_workers_joined",
    "sgl_ext_workers_left",
    "sgl_ext_worker_outages",
)
"""Counters of what every process sees by itself. The others are summed."""


class SharedSnapshots:
    """The latest snapshot that each process wrote to `folder`; a suffix names its kind."""

    def __init__(self, folder: Path, process_number: int) -> None:
        self._folder = folder
        self._number = process_number

    def write(self, snapshot: bytes, suffix: str) -> None:
        """Replaces this process's snapshot in one step."""
        path = self._folder / f"{self._number}{suffix}"
        partial = path.with_suffix(".partial")
        partial.write_bytes(snapshot)
        partial.rename(path)

    def read_others(self, suffix: str) -> list[bytes]:
        """The snapshots of the other processes."""
        snapshots = []
        for path in sorted(self._folder.glob(f"*{suffix}")):
            if path.stem != str(self._number):
                with suppress(OSError):
                    snapshots.append(path.read_bytes())
        return snapshots


def merge_pages(pages: Iterable[bytes]) -> bytes:
    """One page of metrics for several processes' pages, each metric by the rules above.

    It takes lines as they are: parsing eight pages of 64 engines would take a second.
    """
    families: dict[bytes, _Family] = {}
    for page in pages:
        family = _Family([], sum)
        for line in page.splitlines():
            if line.startswith(b"# "):
                _, kind, name, rest = line.split(b" ", 3)
                family = families.setdefault(name, _Family([], sum))
                if line not in family.about:
                    family.about.append(line)
                if kind == b"TYPE":
                    family.join = _join(name.decode(), rest.decode())
            else:
                family.add(*line.rsplit(b" ", 1))
    return b"".join(b"%b\n" % line for each in families.values() for line in each.lines())


@dataclass(slots=True)
class _Family:
    """about: its lines HELP and TYPE. join: how the values of one series become one."""

    about: list[bytes]
    join: Callable[[tuple[float, float]], float]
    samples: dict[bytes, bytes] = field(default_factory=dict)

    def add(self, series: bytes, value: bytes) -> None:
        known = self.samples.get(series)
        if known is not None and (known != value or self.join is sum):
            value = repr(self.join((float(known), float(value)))).encode()
        self.samples[series] = value

    def lines(self) -> Iterable[bytes]:
        return chain(self.about, (b"%b %b" % sample for sample in self.samples.items()))


def _join(name: str, kind: str) -> Callable[[tuple[float, float]], float]:
    if kind == "gauge":
        return sum if name in SUMMED_GAUGES else max
    return max if name.removesuffix("_total") in COMMON_COUNTERS else sum


_METRICS, _FINDINGS, _STATE = ".prom", ".found", ".state"


class WholeBalancer:
    """This process's reports, with those of the others."""

    def __init__(
        self,
        metrics: Metrics,
        detector: Detector,
        folder: Path | None,
        number: int,
    ) -> None:
        """folder: of all processes; None: there is only this one. number: of this process."""
        self._metrics = metrics
        self._detector = detector
        self._snapshots = None if folder is None else SharedSnapshots(folder, number)

    def metrics_page(self) -> bytes:
        """The metrics in Prometheus' text format. Call it in a thread."""
        page, others = self._metrics.render(), self._others(_METRICS)
        return merge_pages([page, *others]) if others else page

    def divergences(self) -> dict[str, Any]:
        """The findings."""
        others = map(orjson.loads, self._others(_FINDINGS))
        return merged([self._detector.as_json(), *others])

    def other_states(self) -> list[bytes]:
        """The parts of the state that the other processes wrote."""
        return self._others(_STATE)

    async def write(self, state: Callable[[], bytes]) -> None:
        """Writes what the other processes read, in a thread. state: makes this process's part."""
        if self._snapshots is None:
            return
        write = self._snapshots.write
        # With many engines a page takes tens of milliseconds.
        await asyncio.to_thread(lambda: write(self._metrics.render(), _METRICS))
        await asyncio.to_thread(write, state(), _STATE)
        findings = orjson.dumps(self._detector.as_json())
        await asyncio.to_thread(write, findings, _FINDINGS)

    def _others(self, kind: str) -> list[bytes]:
        return [] if self._snapshots is None else self._snapshots.read_others(kind)
