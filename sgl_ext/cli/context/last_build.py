"""What the last build of a context was made of, so that the next one names the block that changed.

A small file for each source, with hashes of blocks and of their lines and no text:
$XDG_STATE_HOME/sgl-ext/contexts, or ~/.local/state/sgl-ext/contexts.
"""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import msgspec

from sgl_ext.cli.context.source import Source

MAX_LINES = 20_000
"""The lines of a block that are compared; after them, only whether it changed is known."""


class Built(msgspec.Struct):
    """A block of a build. lines: their CRC-32, in 8 hexadecimal digits each."""

    id: str
    layer: str
    lines: str


class Build(msgspec.Struct):
    """A build, in the order of the prompt."""

    context_id: str
    blocks: list[Built]


class Change(NamedTuple):
    """A block that changed since the last build.

    what: "changed", "is new", "is gone" or "moved".
    line: the first that differs, from 1; None if the whole block does.
    """

    block: str
    layer: str
    what: str
    where: str = ""
    unit: str = ""
    line: int | None = None

    def __str__(self) -> str:
        text = f"block {self.block} of layer {self.layer} {self.what}"
        return text if self.line is None else f"{text}: {self.where}, {self.unit} {self.line:,}"


def build_of(context_id: str, sources: Sequence[Source]) -> Build:
    """A build of these blocks."""
    blocks = [Built(each.id, each.layer, "".join(map(_crc, _compared(each)))) for each in sources]
    return Build(context_id, blocks)


def changes(old: Build, sources: Sequence[Source]) -> list[Change]:
    """What changed since a build, in the order of the prompt; what is gone comes last."""
    before = {block.id: block for block in old.blocks}
    now = {each.id for each in sources}
    kept = [block.id for block in old.blocks if block.id in now]
    known = iter(kept)
    found: list[Change] = []
    for each in sources:
        block = before.get(each.id)
        if block is None:
            found.append(Change(each.id, each.layer, "is new"))
            continue
        is_moved = next(known) != each.id or block.layer != each.layer
        line = _first_difference(block.lines, _compared(each))
        if line is not None:
            found.append(Change(each.id, each.layer, "changed", each.where, each.unit, line))
        elif is_moved:
            found.append(Change(each.id, each.layer, "moved"))
    gone = [block for block in old.blocks if block.id not in now]
    return found + [Change(block.id, block.layer, "is gone") for block in gone]


def _compared(source: Source) -> list[str]:
    """The lines of a block; those beyond the limit are one."""
    lines = source.lines
    return [*lines[:MAX_LINES], "\n".join(lines[MAX_LINES:])] if len(lines) > MAX_LINES else lines


def _first_difference(old: str, lines: Sequence[str]) -> int | None:
    for number, line in enumerate(lines):
        if old[8 * number : 8 * number + 8] != _crc(line):
            return number + 1
    return len(lines) + 1 if len(old) > 8 * len(lines) else None


def _crc(line: str) -> str:
    return f"{crc32(line.encode('utf-8', 'surrogatepass')):08x}"


def state_path(source: Path, environ: dict[str, str]) -> Path:
    """Where the last build of a source is remembered."""
    home = environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    name = hashlib.sha256(os.fsencode(source.resolve())).hexdigest()[:32]
    return Path(home, "sgl-ext", "contexts", f"{name}.json")


def read_build(path: Path) -> Build | None:
    """The last build; None without one. Raises ValueError or OSError if it cannot be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Build)
    except FileNotFoundError:
        return None


def write_build(path: Path, build: Build) -> None:
    """Remembers a build. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.write_bytes(msgspec.json.encode(build) + b"\n")
    draft.replace(path)
