"""What all processes of a balancer report together: metrics, findings, and the state.

Each process writes its part to a file once a second, and any of them adds up all.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson

from sgl_ext.balancer.metrics.across_processes import SharedSnapshots, merge_pages
from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.balancer.reporting.diagnosis import DivergenceDetector
from sgl_ext.prompts.findings import merged

_METRICS, _FINDINGS, _STATE = ".prom", ".found", ".state"


class WholeBalancer:
    """This process's reports, with those of the others.

    detector: None if prompts are not compared.
    """

    def __init__(
        self,
        metrics: Metrics,
        detector: DivergenceDetector | None,
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

    def divergences(self) -> dict[str, Any] | None:
        """The findings; None if prompts are not compared."""
        if self._detector is None:
            return None
        others = map(orjson.loads, self._others(_FINDINGS))
        return merged([self._detector.findings.as_json(), *others])

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
        if self._detector is not None:
            findings = orjson.dumps(self._detector.findings.as_json())
            await asyncio.to_thread(write, findings, _FINDINGS)

    def _others(self, kind: str) -> list[bytes]:
        return [] if self._snapshots is None else self._snapshots.read_others(kind)
