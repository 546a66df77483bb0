"""How far a child has started, as its log says.

The log is read from where the start began, and each part of it once, so a look is cheap however
long the log is.
"""

import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sgl_ext.node.child import Child

FLEET = "fleet"
"""The name of the child that keeps engines on Ray."""
FLEET_SERVES = "all engines serve"
"""What it logs once they do."""
READY = "ready"

# Text that SGLang logs when a stage begins, the first stage first.
_STAGES = (
    ("", "importing"),
    ("server_args=", "starting the scheduler"),
    ("Load weight begin", "loading weights"),
    ("Load weight end", "loaded weights"),
    ("KV Cache is allocated", "allocated the KV cache"),
    ("CUDA graph begin", "capturing CUDA graphs"),
    ("Uvicorn running", "warming up"),
    ("The server is fired up", READY),
)
_FLEET_COUNT = re.compile(r"(\d+) of (\d+) engines serve")
# tqdm's bars: the shards of the weights, and the batch sizes of the CUDA graphs.
_PERCENT = re.compile(r"(?:shards|Capturing)[^\r\n%]*?(\d{1,3})%")
_WITH_PERCENT = ("loading weights", "capturing CUDA graphs")
# What the extension says at a start for the operator, in a line of the log.
_NOTE = re.compile(r"^(?:\[[^\]\n]*\] )?sgl-ext: ([^\n]+)\n", re.MULTILINE)
_MOST_NOTES = 32
_MOST_BYTES = 1 << 20
_OVERLAP = 1000  # a line that is half written is read again


def stage_of(child: "Child") -> tuple[str, float | None]:
    """The stage of a child's start, and how much of that stage is done, from 0 to 1, if known."""
    return child.start_log.stage()


class StartLog:
    """What a log says since one start of its process."""

    def __init__(self, path: Path, begin: int = 0, *, keeps_fleet: bool = False) -> None:
        """begin: the size of the log before the start."""
        self._path = path
        self._begin = self._read = begin
        self._rest = ""
        self._keeps_fleet = keeps_fleet
        self._stage = 0
        self._progress: float | None = None
        self._fleet = "connecting to Ray"
        self.notes: dict[str, None] = {}
        """What the extension said, in order, each once."""

    def stage(self) -> tuple[str, float | None]:
        """Reads new lines, and gives the stage and how much of it is done."""
        while new := self._new_text():
            text = self._rest + new
            self._rest = text[-_OVERLAP:]
            if self._keeps_fleet:
                self._note_fleet(text)
            else:
                self._note_stage(text)
        return (self._fleet if self._keeps_fleet else _STAGES[self._stage][1]), self._progress

    def last_text(self) -> str:
        """The end of what was logged since the start, at most a MiB."""
        try:
            with self._path.open("rb") as file:
                size = file.seek(0, 2)
                begin = self._begin if self._begin <= size else 0
                file.seek(max(begin, size - _MOST_BYTES))
                return file.read().decode(errors="replace")
        except OSError:
            return ""

    def _note_stage(self, text: str) -> None:
        for said in _NOTE.findall(text)[: _MOST_NOTES - len(self.notes)]:
            self.notes[said] = None
        for number in range(len(_STAGES) - 1, self._stage, -1):
            if _STAGES[number][0] in text:
                self._stage, self._progress = number, None
                break
        if _STAGES[self._stage][1] in _WITH_PERCENT and (found := _PERCENT.findall(text)):
            self._progress = min(int(found[-1]), 100) / 100

    def _note_fleet(self, text: str) -> None:
        if found := _FLEET_COUNT.findall(text):
            serving, wanted = map(int, found[-1])
            self._fleet = f"{serving} of {wanted} engines serve"
            self._progress = serving / wanted if wanted else None
        if FLEET_SERVES in text:
            self._fleet, self._progress = READY, None

    def _new_text(self) -> str:
        try:
            with self._path.open("rb") as file:
                size = file.seek(0, 2)
                if size < self._read:  # it was rotated
                    self._read = 0
                file.seek(self._read)
                data = file.read(_MOST_BYTES)
        except OSError:
            return ""
        self._read += len(data)
        return data.decode(errors="replace")
