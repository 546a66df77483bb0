"""The blocks of a repository, in the order of a prompt, from what changes least to what most:

    stable    tools of a file; AGENTS.md and CLAUDE.md at the top; skills
    project   AGENTS.md and CLAUDE.md further down; named documents; the list of files

Only files that git does not ignore are listed or read, so no key in an ignored file gets into a
prompt. A link is read only if it ends at such a file. The same files give the same bytes on every
machine: nothing depends on the folder's name, a date, or the order of a directory.
"""

import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

from sgl_ext.cli.context.source import Source, text_source
from sgl_ext.cli.node import UsageError

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
