"""What `sgl-ext context build` makes a context of: a repository, or a captured request.

The blocks of a repository, in the order of a prompt, from what changes least to what most:

    stable    tools of a file; AGENTS.md and CLAUDE.md at the top; skills
    project   AGENTS.md and CLAUDE.md further down; named documents; the list of files

Only files that git does not ignore are listed or read, so no key in an ignored file gets into a
prompt. A link is read only if it ends at such a file. The same files give the same bytes on every
machine: nothing depends on the folder's name, a date, or the order of a directory. The blocks of a
captured request are what its cache marks cover, else its tools and instructions.

The last build leaves a small file for each source, so that the next build names the block that
changed. It has hashes of blocks and of their lines and no text: $XDG_STATE_HOME/sgl-ext/contexts,
or ~/.local/state/sgl-ext/contexts.
"""

import hashlib
import json
import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple
from zlib import crc32

import msgspec

from sgl_ext.balancer.conversations.contexts import Block, Made, make_context, unpacked_blocks
from sgl_ext.cli.node import UsageError
from sgl_ext.cli.show import warn
from sgl_ext.protocols.registry import of_path
from sgl_ext.reading.protocol import INSTRUCTION_ROLES, Protocol
from sgl_ext.reading.strip import HeaderStrip


class Source(NamedTuple):
    """A block to register.

    where: what a person looks at when it changed: a path, or words.
    lines: its content in the units that a person counts.
    unit: what these are: "line", "tool" or "message".
    """

    id: str
    kind: str
    layer: str
    content: Any
    where: str
    lines: list[str]
    unit: str = "line"


def text_source(id: str, kind: str, layer: str, text: str, *, path: str | None = None) -> Source:
    """A text; if it is a file's, a frame names its path."""
    content = text if path is None else f'<file path="{path}">\n{text}\n</file>'
    return Source(id, kind, layer, content, path or id, text.splitlines())


def tools_source(id: str, layer: str, tools: list[Any], where: str) -> Source:
    """A list of tools."""
    return Source(id, "tools", layer, tools, where, [json.dumps(tool) for tool in tools], "tool")


MAX_FILE_BYTES = 256 << 10
MAX_LISTED = 10_000
_MAX_WALKED = 200_000
_GIT_S = 30.0
_RULES = ("AGENTS.md", "CLAUDE.md")
_SKILL = re.compile(r"(?:\.claude/|\.agents/|\.codex/|\.opencode/)?skills/([^/]+)/SKILL\.md\Z")


class _Skipped(Exception):
    """A file that is not to be read; the text says why."""


class _Reader:
    """Reads files below a folder. skipped: which were not read, and why."""

    def __init__(self, root: Path, files: Sequence[str]) -> None:
        self._root = root
        self._files = frozenset(files)
        self.skipped: list[str] = []
        self._seen: set[str] = set()

    def text(self, path: str) -> str | None:
        """The text of a file; None if it is not to be read, blank, or the same as an earlier one:
        CLAUDE.md is often a link to AGENTS.md."""
        try:
            text = self._load(path)
        except _Skipped as why:
            self.skipped.append(f"{path}: {why}")
            return None
        if not text.strip() or text in self._seen:
            return None
        self._seen.add(text)
        return text

    def _load(self, path: str) -> str:
        try:
            real = (self._root / path).resolve(strict=True)
            if not real.is_relative_to(self._root):
                raise _Skipped("a link to a file outside")
            if real.relative_to(self._root).as_posix() not in self._files:
                raise _Skipped("a link to a file that git ignores")
            with real.open("rb") as file:
                content = file.read(MAX_FILE_BYTES + 1)
        except OSError as error:
            raise _Skipped(error.strerror or "unreadable") from None
        if len(content) > MAX_FILE_BYTES:
            raise _Skipped(f"larger than {MAX_FILE_BYTES >> 10} KiB")
        if b"\0" in content:
            raise _Skipped("not a text")
        try:
            return content.decode("utf-8-sig")
        except UnicodeDecodeError:
            raise _Skipped("not a text in UTF-8") from None


def read_repository(root: Path, documents: Sequence[str]) -> tuple[list[Source], list[str]]:
    """The blocks of a folder, and which files were not read, with the reason.

    documents: paths below the folder. Raises UsageError.
    """
    root = root.resolve()
    if not root.is_dir():
        raise UsageError(f"{root}: is not a folder")
    files = files_of(root)
    documents = [os.path.normpath(path) for path in documents]
    for path in documents:
        if path not in files:
            raise UsageError(f"--document {path}: is not in {root}, or git ignores it")
    reader = _Reader(root, files)
    sources = []
    for path in (*_RULES, *filter(_SKILL.match, files)):
        if path in files and (text := reader.text(path)) is not None:
            sources.append(text_source(path, "document", "stable", text, path=path))
    nested = [path for path in files if PurePosixPath(path).name in _RULES and "/" in path]
    for path in dict.fromkeys([*nested, *documents]):
        if (text := reader.text(path)) is not None:
            sources.append(text_source(path, "document", "project", text, path=path))
    if files:
        lines = _listing(files)
        content = "\n".join(["Files of this repository:", *lines])
        listing = Source("files", "document", "project", content, "the list of files", lines)
        sources.append(listing)
    return sources, reader.skipped


def files_of(root: Path) -> list[str]:
    """The paths of the files below a folder that git does not ignore, in the order of their bytes.

    Without a repository or without git, those that no .gitignore names. Raises UsageError.
    """
    found = _git_files(root)
    if found is None:
        found = list(_walked(root))
    names = {name.encode("utf-8", "surrogateescape") for name in found}
    return [name.decode("utf-8", "replace") for name in sorted(names)]


def _git_files(root: Path) -> list[str] | None:
    """What git lists; None without a repository or without git."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")} | {"LC_ALL": "C"}
    # A repository's own settings must not start a program.
    git = ["git", "-C", str(root), "-c", "core.fsmonitor=false"]

    def run(*arguments: str) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            [*git, *arguments], capture_output=True, env=clean, timeout=_GIT_S, check=False
        )

    try:
        inside = run("rev-parse", "--is-inside-work-tree")
        if inside.returncode and b"not a git repository" in inside.stderr:
            return None
        listed = run("ls-files", "-z", "--cached", "--others", "--exclude-standard")
    except FileNotFoundError:
        return None
    except subprocess.TimeoutExpired:
        raise UsageError(f"{root}: git took longer than {_GIT_S:g} s") from None
    if listed.returncode:
        reason = " ".join(listed.stderr.decode(errors="replace").split())
        raise UsageError(f"{root}: git cannot list its files: {reason}")
    names = [os.fsdecode(name) for name in listed.stdout.split(b"\0") if name]
    return [name for name in names if os.path.lexists(root / name)]


def _walked(root: Path) -> Iterator[str]:
    """The files below a folder that no .gitignore in it names. Links to folders are not
    followed."""
    from pathspec import GitIgnoreSpec

    count, specs = 0, dict[str, list[tuple[str, GitIgnoreSpec]]]()
    for folder, folders, names in os.walk(root):
        at = os.path.relpath(folder, root).replace(os.sep, "/")
        at = "" if at == "." else f"{at}/"
        parent = at.rstrip("/").rpartition("/")[0]
        rules = list(specs.get(f"{parent}/" if parent else "", ())) if at else []
        if ".gitignore" in names:
            try:
                text = Path(folder, ".gitignore").read_text(errors="replace")
            except OSError as error:
                raise UsageError(f"{at}.gitignore: {error.strerror}") from None
            rules.append((at, GitIgnoreSpec.from_lines(text.splitlines())))
        specs[at] = rules

        def is_ignored(path: str, rules: list[tuple[str, GitIgnoreSpec]] = rules) -> bool:
            for base, spec in reversed(rules):
                if (found := spec.check_file(path.removeprefix(base)).include) is not None:
                    return found
            return False

        folders[:] = [n for n in folders if n != ".git" and not is_ignored(f"{at}{n}/")]
        for name in names:
            if (count := count + 1) > _MAX_WALKED:
                raise UsageError(f"{root}: has more than {_MAX_WALKED:,} files")
            if not is_ignored(f"{at}{name}"):
                yield f"{at}{name}"


def _listing(files: Sequence[str]) -> list[str]:
    listed = [path if path.isprintable() else ascii(path) for path in files[:MAX_LISTED]]
    if len(files) > MAX_LISTED:
        listed.append(f"... and {len(files) - MAX_LISTED} more files")
    return listed


_WHOLE = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}


def read_captured(path: str, body: bytes, name: str) -> tuple[list[Source], dict[str, int]]:
    """The blocks of a request to this path, and how much of each field they cover.

    name: of its file. Raises UsageError.
    """
    protocol, document = of_path(path), json.loads(body)
    if protocol.add_texts is None:
        raise UsageError(f"{name}: a request to {path} cannot name a context")
    made = make_context(protocol, document, HeaderStrip())
    if made == "no_marks":
        made = make_context(protocol, _head(protocol, document), HeaderStrip())
    if not isinstance(made, Made):
        raise UsageError(f"{name}: makes no context: {made}")
    blocks = unpacked_blocks(made.registration.items)
    return [_source(block) for block in blocks], made.covers


def _head(protocol: Protocol, document: Any) -> Any:
    """A request's tools and instructions, marked as a whole."""
    field = protocol.turns_field
    turns = document.get(field) if isinstance(document, dict) else None
    if not isinstance(turns, list) or field is None:
        turns = []
    count = 0
    while count < len(turns) and _instructs(turns[count]):
        count += 1
    return {**document, field: turns[:count], "nvext": _WHOLE}


def _instructs(turn: Any) -> bool:
    return isinstance(turn, dict) and turn.get("role") in INSTRUCTION_ROLES


def _source(block: Block) -> Source:
    if block.kind == "tools":
        return tools_source(block.id, block.layer, block.content, block.id)
    if block.kind != "messages":
        return text_source(block.id, block.kind, block.layer, block.content)
    lines = [json.dumps(message) for message in block.content["messages"]]
    return Source(block.id, block.kind, block.layer, block.content, block.id, lines, "message")


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


def read_last_build(path: Path | None) -> Build | None:
    """The last build; None if there is none, or none that can be read."""
    try:
        return None if path is None else msgspec.json.decode(path.read_bytes(), type=Build)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        warn(f"{path}: {error}; nothing is compared")
        return None


def write_build(path: Path, build: Build) -> None:
    """Remembers a build. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.write_bytes(msgspec.json.encode(build) + b"\n")
    draft.replace(path)
