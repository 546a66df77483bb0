"""Snapshots that the processes of one balancer share through files.

prometheus_client has a multiprocess mode, but only for its own counters, which are too slow for
every request (see `registry`).
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable
from contextlib import suppress
from pathlib import Path

from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

SUMMED_GAUGES = (
    "sgl_ext_worker_in_flight",
    "sgl_ext_queued_requests",
    "sgl_ext_held_bytes",
    "sgl_ext_connections",
    "sgl_ext_live_streams",
)
"""Gauges of which each process has a part. The others have the same value in every process, or
that of the fullest process counts, or each process has a series of its own."""
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


class _Merged(Collector):
    """The metrics of pages in Prometheus' text format, each by the rule above."""

    def __init__(self, pages: Iterable[bytes]) -> None:
        self._pages = pages

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        samples: defaultdict[str, dict[Hashable, Sample]] = defaultdict(dict)
        for page in self._pages:
            for family in text_string_to_metric_families(page.decode()):
                families.setdefault(family.name, family)
                known = samples[family.name]
                join = sum if _is_summed(family) else max
                for sample in family.samples:
                    key = (sample.name, *sorted(sample.labels.items()))
                    if key in known:
                        sample = sample._replace(value=join((known[key].value, sample.value)))
                    known[key] = sample
        for name, family in families.items():
            family.samples = list(samples[name].values())
            yield family


def _is_summed(family: Metric) -> bool:
    names = SUMMED_GAUGES if family.type == "gauge" else COMMON_COUNTERS
    return (family.name in names) is (family.type == "gauge")


def merge_pages(pages: Iterable[bytes]) -> bytes:
    """One page of metrics for several processes' pages."""
    return generate_latest(_Merged(pages))
