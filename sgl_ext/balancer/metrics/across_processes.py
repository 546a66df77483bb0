"""What all processes of one balancer tell as one: each leaves its own words in files."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

_PAGE = ".prom"
# A gauge that every process sees alike is not added up.
_OWN_GAUGES = ("sgl_ext_worker_in_flight", "sgl_ext_door_waiting")


class Gathered:
    """What all processes tell, as each left it last; `suffix` says what of it."""

    def __init__(self, folder: Path, number: int) -> None:
        self._folder = folder
        self._number = number

    def leave(self, told: bytes, suffix: str = _PAGE) -> None:
        """Leaves what this process tells for the others."""
        path = self._folder / f"{self._number}{suffix}"
        partial = path.with_suffix(".partial")
        partial.write_bytes(told)
        partial.rename(path)

    def others(self, suffix: str) -> list[bytes]:
        """What the other processes left."""
        told = []
        for path in sorted(self._folder.glob(f"*{suffix}")):
            if path.stem != str(self._number):
                with suppress(OSError):
                    told.append(path.read_bytes())
        return told

    def page(self, own: bytes) -> bytes:
        """This process's page of metrics and the others', added up."""
        return added_up(page.decode() for page in (own, *self.others(_PAGE))).encode()


def added_up(pages: Iterable[str]) -> str:
    """Pages of Prometheus' text format as one: counters and histograms are added up."""
    about: dict[str, Metric] = {}
    values: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
    for page in pages:
        for family in text_string_to_metric_families(page):
            about.setdefault(family.name, family)
            samples = values.setdefault(family.name, {})
            adds = family.type != "gauge" or family.name in _OWN_GAUGES
            for sample in family.samples:
                key = (sample.name, tuple(sorted(sample.labels.items())))
                before = samples.get(key)
                if before is None:
                    samples[key] = sample.value
                else:
                    samples[key] = before + sample.value if adds else max(before, sample.value)
    lines: list[str] = []
    for name, family in about.items():
        shown = f"{name}_total" if family.type == "counter" else name
        lines += [f"# HELP {shown} {family.documentation}", f"# TYPE {shown} {family.type}"]
        for (sample_name, labels), value in values[name].items():
            told = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels)
            lines.append(f"{sample_name}{{{told}}} {value}" if told else f"{sample_name} {value}")
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
