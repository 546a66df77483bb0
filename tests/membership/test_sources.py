"""The sources that an operator names."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sgl_ext.membership import sources
from sgl_ext.membership.member import Member, MembershipError
from sgl_ext.membership.sources import WatchedFile, open_sources, write_members
from sgl_ext.settings.schema import SettingsError
from sgl_ext.settings.sources import balancer_settings
from tests.waiting import HANG_S


def test_sources_count_in_the_order_in_which_they_are_named(tmp_path: Path) -> None:
    for name in "ba":
        write_members(tmp_path / name, ())
    named = [f"file:{tmp_path / name}" for name in "ba"]
    argv = ["--workers-from", named[0], "--worker", "http://a:1", "--workers-from", named[1]]
    sources = open_sources(balancer_settings(argv))
    assert [source.name for source in sources] == ["workers", *named]
    assert open_sources(balancer_settings([])) == []


@pytest.mark.parametrize("text", ["consul:x", "file", "file:", "/etc/engines.json"])
def test_an_unknown_source_is_rejected_with_those_there_are(text: str) -> None:
    with pytest.raises(SettingsError, match=rf"^workers_from='{text}': must be file:PATH"):
        open_sources(balancer_settings(["--workers-from", text]))


def run(code: str) -> str:
    """What an interpreter of its own prints for this code."""
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_an_extra_that_is_missing_is_named() -> None:
    said = run(
        "import sys; sys.modules['lightkube'] = None\n"
        "from sgl_ext.membership.sources import open_source\n"
        "try: open_source('kubernetes:engines')\n"
        "except Exception as error: print(error)"
    )
    assert said.endswith("is not installed: pip install 'sgl-ext[kubernetes]'")


def test_a_start_without_extras_in_its_settings_imports_none() -> None:
    extras = {"lightkube", "httpx2", "httpx", "kubernetes_asyncio", "ray"}
    extras |= {"redis", "psycopg", "psycopg_pool"}
    found = run(
        "import sys, sgl_ext.balancer.serve, sgl_ext.launch\n"
        "from sgl_ext.membership.sources import open_sources\n"
        "from sgl_ext.settings.schema import BalancerSettings\n"
        "open_sources(BalancerSettings(workers=('http://a:1',)))\n"
        f"print(*({extras!r} & {{name.partition('.')[0] for name in sys.modules}}))"
    )
    assert found == ""


ONE = Member(id="1", url="http://a:1", model="m", labels={"rack": "4"})
TWO = Member(id="2", url="http://b:1", state="draining")


@pytest.fixture(autouse=True)
def _poll_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "POLL_S", 0.0)


def watched(path: Path) -> WatchedFile:
    return WatchedFile(f"file:{path}", str(path))


async def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "engines.json"
    write_members(path, (ONE, TWO))
    assert path.stat().st_mode & 0o777 == 0o600
    lists = watched(path).lists()
    async with asyncio.timeout(HANG_S):
        assert await anext(lists) == (ONE, TWO)
        write_members(path, (TWO,))
        assert await anext(lists) == (TWO,)
        write_members(path, ())
        assert await anext(lists) == ()
    assert os.listdir(tmp_path) == ["engines.json"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "truncated"),
        ("[]", r"Expected `object`, got `array`"),
        ("\xff", "invalid|malformed|utf-8"),
        ("{}", "missing required field `workers`"),
        ('{"workers": [], "x": 1}', "unknown field `x`"),
        ('{"workers": [{"id": "1"}]}', r"missing required field `url`.*workers\[0\]"),
        ('{"workers": [{"id": "1", "url": "http://a:1", "lables": {}}]}', "`lables`"),
        ('{"workers": [{"id": "1", "url": "a"}]}', r"workers\[0\].url: must be .* not 'a'"),
        ('{"workers": [{"id": "", "url": "http://a:1"}]}', r"workers\[0\].id: is empty"),
        ('{"workers": [{"id": "1", "url": "http://a:1", "state": "up"}]}', r"workers\[0\].state"),
        (
            '{"workers": [{"id": "1", "url": "http://a:1"}, {"id": "1", "url": "http://b:1"}]}',
            "id '1' stands there more than once",
        ),
        (
            '{"workers": [{"id": "1", "url": "http://a:1"}, {"id": "2", "url": "http://a:1"}]}',
            "url 'http://a:1' stands there more than once",
        ),
    ],
)
async def test_an_error_names_file_entry_and_field(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "engines.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(MembershipError, match=f"(?s)^{path}: .*({problem})"):
        watched(path)
    write_members(path, (ONE,))
    lists = watched(path).lists()
    assert await anext(lists) == (ONE,)
    path.write_bytes(text.encode("latin-1") + b" ")
    with pytest.raises(MembershipError, match=f"{path}: "):
        await anext(lists)


async def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(MembershipError, match="none: cannot be read: No such file"):
        watched(tmp_path / "none")
    with pytest.raises(MembershipError, match="cannot be read: Is a directory"):
        watched(tmp_path)
