"""The version names the commit, in a checkout and in what is built from it."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from sgl_ext import version

ROOT = Path(__file__).parents[1]


def git(folder: Path, *words: str) -> str:
    who = ("-c", "user.name=x", "-c", "user.email=x@example.org")
    return subprocess.check_output(["git", "-C", str(folder), *who, *words], text=True).strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    git(tmp_path, "init", "--quiet")
    (tmp_path / "file").write_text("text")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "--quiet", "-m", "one")
    return tmp_path


def test_a_commit_is_that_of_head_and_marked_if_files_differ(repository: Path) -> None:
    head = git(repository, "rev-parse", "HEAD")[:12]
    assert version.commit_of(repository) == head
    (repository / "file").write_text("other")
    assert version.commit_of(repository) == f"{head}-dirty"


def test_no_commit_is_made_up(tmp_path: Path) -> None:
    assert version.commit_of(tmp_path / "none") is None


def test_versions_are_found_without_importing_sglang() -> None:
    program = (
        "import sys; from sgl_ext.version import versions; found = versions()\n"
        "assert not {'sglang', 'torch'} & set(sys.modules)\n"
        "print(found.sgl_ext, found.sglang)"
    )
    said = subprocess.check_output([sys.executable, "-c", program], text=True, cwd=ROOT).split()
    assert said[0] == metadata.version("sgl-ext")


def test_a_wheel_s_commit_is_read_from_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(version, "_PACKAGE", tmp_path / "sgl_ext")
    (tmp_path / "sgl_ext").mkdir()
    (tmp_path / "sgl_ext" / version.COMMIT_FILE).write_text("0123456789ab\n")
    version.versions.cache_clear()
    assert version.versions().commit == "0123456789ab"
    version.versions.cache_clear()
