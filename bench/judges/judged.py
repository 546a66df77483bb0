"""What every judge reports about one run, in one shape, and what a load is."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from bench.lib.script import Size

_LIMIT_S = 300.0


@dataclass(frozen=True)
class Judged:
    """Figures of one run, all from the judge's own output file.

    stream_tokens_per_s_p50: of one request, after its first token.
    cached_share: prompt tokens read from the cache over all; None if the judge reports none.
    """

    requests: int
    errors: int
    ttft_ms_p50: float
    ttft_ms_p99: float
    stream_tokens_per_s_p50: float | None
    tokens_per_s: float
    requests_per_s: float
    cached_share: float | None

    def figures(self) -> dict[str, float]:
        """The figures that the judge reports, without the two counts."""
        names = [field.name for field in fields(self)][2:]
        return {name: value for name in names if (value := getattr(self, name)) is not None}


@dataclass(frozen=True)
class Setting:
    """What loads are made for. served: the name that requests give the model.

    capacity_per_s: requests that stock SGLang answers, measured.
    """

    model: Path
    served: str
    size: Size
    capacity_per_s: float
    scratch: Path


@dataclass(frozen=True)
class Load:
    """One command of a judge. requests: what a whole run answers. run: of an address and a folder
    for the judge's files."""

    endpoint: str
    requests: int
    run: Callable[[str, Path], Judged]


def run_command(
    command: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None
) -> None:
    """Runs a judge in a folder, its output in `log` there. Raises RuntimeError with its end."""
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "log"
    with log.open("wb") as output:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env={**os.environ, **(environment or {})},
            timeout=_LIMIT_S,
            check=False,
        )
    if done.returncode:
        end = log.read_text(errors="replace")[-3000:]
        raise RuntimeError(f"{' '.join(command)} ended with status {done.returncode}:\n{end}")
