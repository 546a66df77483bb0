"""`sgl-ext context`: what is read of a repository, and what is said when it is built again."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from sgl_ext.cli.context_build import MAX_FILE_BYTES, files_of, read_repository
from sgl_ext.cli.node import UsageError
from tests.balancer.conftest import Engine, Start, start
from tests.cli.conftest import Run
from tests.cli.test_balancer import Verb

__all__ = ["start"]  # a fixture
TOOL = {"name": "read", "input_schema": {"type": "object"}}
RULES = "# Rules\nBe brief.\nTest it.\n"
SKILL = ".claude/skills/review/SKILL.md"


def write(root: Path, files: dict[str, str | bytes]) -> None:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A folder with rules, a skill, ignored and binary files, and links."""
    root = tmp_path / "project"
    write(
        root,
        {
            ".gitignore": "*.key\nbuild/\n",
            "AGENTS.md": RULES,
            "secret.key": "hidden",
            "build/AGENTS.md": "Made.",
            SKILL: "Review.",
            "src/AGENTS.md": "Of src.",
            "src/.gitignore": "*.tmp\n!kept.key\n",
            "src/x.tmp": "",
            "src/kept.key": "",
            "src/b.py": "",
            "README.md": "# Project",
            "logo.md": b"\x89PNG\0",
        },
    )
    (root / "CLAUDE.md").symlink_to("AGENTS.md")
    return root


def git(root: Path, *arguments: str) -> None:
    # Not the settings of whoever runs the tests.
    env = {"PATH": os.environ["PATH"], "HOME": str(root)}
    subprocess.run(["git", "-C", str(root), *arguments], check=True, capture_output=True, env=env)


LISTED = [
    SKILL,
    ".gitignore",
    "AGENTS.md",
    "CLAUDE.md",
    "README.md",
    "logo.md",
    "src/.gitignore",
    "src/AGENTS.md",
    "src/b.py",
    "src/kept.key",
]


def test_ignored_files_are_neither_listed_nor_read_with_and_without_git(repository: Path) -> None:
    wanted = sorted(LISTED)
    assert files_of(repository) == wanted
    before = read_repository(repository, [])
    git(repository, "init", "-q")
    assert files_of(repository) == wanted
    assert read_repository(repository, []) == before
    git(repository, "add", "AGENTS.md", "src")
    (repository / "src/b.py").unlink()
    assert files_of(repository) == [each for each in wanted if each != "src/b.py"]
    assert files_of(repository / "src") == [".gitignore", "AGENTS.md", "kept.key"]


def test_blocks_are_in_the_order_of_layers_and_framed_by_their_paths(repository: Path) -> None:
    sources, skipped = read_repository(repository, ["README.md"])
    assert [(each.id, each.layer) for each in sources] == [
        ("AGENTS.md", "stable"),
        (SKILL, "stable"),
        ("src/AGENTS.md", "project"),
        ("README.md", "project"),
        ("files", "project"),
    ], "CLAUDE.md has the text of AGENTS.md"
    assert sources[0].content == f'<file path="AGENTS.md">\n{RULES}\n</file>'
    assert sources[-1].content.splitlines()[1:] == sorted(LISTED)
    assert skipped == []


def test_links_out_and_files_that_are_no_text_are_skipped_with_the_reason(
    repository: Path, tmp_path: Path
) -> None:
    (tmp_path / "AGENTS.md").write_text("Outside.")
    (repository / "CLAUDE.md").unlink()
    (repository / "CLAUDE.md").symlink_to("../AGENTS.md")
    (repository / "AGENTS.md").unlink()
    (repository / "AGENTS.md").symlink_to("secret.key")
    large = b"x" * (MAX_FILE_BYTES + 1)
    write(repository, {"a/CLAUDE.md": large, "b/CLAUDE.md": b"\xff", SKILL: b"\0"})
    (repository / "c").mkdir()
    (repository / "c/CLAUDE.md").symlink_to("nowhere")
    sources, skipped = read_repository(repository, [])
    assert skipped == [
        "AGENTS.md: a link to a file that git ignores",
        "CLAUDE.md: a link to a file outside",
        f"{SKILL}: not a text",
        "a/CLAUDE.md: larger than 256 KiB",
        "b/CLAUDE.md: not a text in UTF-8",
        "c/CLAUDE.md: No such file or directory",
    ]
    assert [each.id for each in sources] == ["src/AGENTS.md", "files"]
    for wrong in ("secret.key", "../AGENTS.md", "nowhere"):
        with pytest.raises(UsageError, match="git ignores it"):
            read_repository(repository, [wrong])


async def answer(request: web.Request) -> web.StreamResponse:
    if request.path == "/v1/models":
        return web.json_response({"data": [{"id": "tiny"}]})
    return web.json_response({"input_tokens": len(await request.read()) // 4})


@pytest.fixture
async def context(start: Start, run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Verb:
    """Runs a verb of `sgl-ext context` with a real balancer."""
    monkeypatch.delenv("SGL_EXT_API_KEY", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    url = str((await start(Engine("a", answer)))._base_url).rstrip("/")
    return lambda *argv: asyncio.to_thread(run, "context", *argv, "--url", url)


async def test_a_second_build_names_the_block_that_changed(
    context: Verb, repository: Path, tmp_path: Path
) -> None:
    tools = tmp_path / "tools.json"
    tools.write_text(json.dumps({"tools": [TOOL, {**TOOL, "name": "write"}]}))
    build = ("build", str(repository), "--tools", str(tools), "--runtime", "now")
    code, first, err = await context(*build)
    assert (code, err) == (0, "")
    id, heads, *rows = first.splitlines()
    assert heads.split() == ["block", "layer", "bytes", "pinned"]
    assert [row.split()[0] for row in rows[:-1]] == [
        "tools", "AGENTS.md", SKILL, "src/AGENTS.md", "files", "now",
    ]  # fmt: skip
    assert rows[-1].endswith(" tokens")
    code, again, _ = await context(*build)
    assert (code, again) == (0, f"{first}nothing changed since the last build\n")
    write(repository, {"AGENTS.md": RULES.replace("Test", "Check"), "z.py": ""})
    tools.write_text(json.dumps([TOOL, {**TOOL, "name": "edit"}]))
    _, changed, _ = await context(*build)
    assert changed.splitlines()[0] != id
    assert changed.splitlines()[-3:] == [
        f"block tools of layer stable changed: {tools}, tool 2",
        "block AGENTS.md of layer stable changed: AGENTS.md, line 3",
        "block files of layer project changed: the list of files, line 11",
    ]
    (repository / SKILL).unlink()
    _, out, _ = await context(*build, "--json")
    document = json.loads(out)
    assert [each["text"] for each in document["changes"]] == [
        "block files of layer project changed: the list of files, line 1",
        f"block {SKILL} of layer stable is gone",
    ]
    (state,) = (tmp_path / "state/sgl-ext/contexts").iterdir()
    assert b"Be brief" not in state.read_bytes()
    state.write_text("{")
    code, _, err = await context(*build)
    assert code == 0
    assert "nothing is compared" in err


async def test_a_captured_request_becomes_a_context_of_what_its_marks_cover(
    context: Verb, tmp_path: Path
) -> None:
    body: dict[str, Any] = {
        "model": "m",
        "tools": [TOOL],
        "system": [{"type": "text", "text": "Rules"}],
        "messages": [{"role": "user", "content": "Hi"}],
    }
    file = tmp_path / "body.json"
    file.write_text(json.dumps(body))
    code, out, _ = await context("build", "--request", str(file), "--json")
    assert code == 0
    document = json.loads(out)
    assert document["covers"] == {"tools": 1, "system": 1}
    assert [each["id"] for each in document["blocks"]] == ["stable.tools", "stable.system.0"]
    body["messages"][0]["content"] = [
        {"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}
    ]
    file.write_text(json.dumps(body))
    _, out, _ = await context("build", "--request", str(file))
    assert "of the request: tools=1, system=1, messages=1" in out
    chat = {"messages": [{"role": "system", "content": "Rules"}, {"role": "user", "content": "x"}]}
    file.write_text(json.dumps(chat))
    _, out, _ = await context("build", "--request", str(file), "--json")
    assert json.loads(out)["covers"] == {"messages": 1}


async def test_contexts_are_listed_shown_and_deleted(context: Verb, repository: Path) -> None:
    assert (await context("list"))[1] == "There are no contexts.\n"
    _, out, _ = await context("build", str(repository), "--json")
    id = json.loads(out)["context_id"]
    heads, row = (await context("list"))[1].splitlines()
    assert heads.split()[:2] == ["context", "name"]
    assert row.split()[:2] == [id, "project"]
    _, out, _ = await context("show", id)
    assert out.startswith("project: ")
    assert "AGENTS.md" in out
    _, out, _ = await context("show", id, "--content")
    assert "Be brief." in json.loads(out)["blocks"][0]["content"]
    code, out, _ = await context("delete", id, "ctx_none")
    assert (code, out) == (1, f"{id}: deleted\nctx_none: no such context\n")
    code, _, err = await context("show", id)
    assert code == 1
    assert "unknown or has expired" in err


async def test_wrong_command_lines_say_what_is_wrong(
    context: Verb, repository: Path, tmp_path: Path
) -> None:
    for argv, message in (
        (["build", str(tmp_path / "none")], "is not a folder"),
        (["build", str(repository), "--tools", str(tmp_path / "none")], "No such file"),
        (["build", str(repository), "--tools", str(repository / "AGENTS.md")], "is not JSON"),
        (["build", str(repository), "--request", "x"], "--request: cannot be combined"),
        (["build", "--request", str(repository / "AGENTS.md")], "is not JSON"),
    ):
        code, _, err = await context(*argv)
        assert code == 2
        assert message in err
    empty = tmp_path / "empty"
    empty.mkdir()
    code, _, err = await context("build", str(empty))
    assert code == 2
    assert "has nothing for a context" in err
