"""The source that is a file."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from sgl_ext.membership import file
from sgl_ext.membership.file import WatchedFile, write_members
from sgl_ext.membership.member import Member, MembershipError
from tests.waiting import HANG_S

ONE = Member(id="1", url="http://a:1", model="m", labels={"rack": "4"})
TWO = Member(id="2", url="http://b:1", state="draining")


@pytest.fixture(autouse=True)
def _poll_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file, "POLL_S", 0.0)


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
