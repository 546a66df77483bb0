"""The list of a node's engines, which its balancer watches."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest

from sgl_ext.node.child import Child
from sgl_ext.node.children import EngineList


def listed(path: Path) -> list[tuple[str, str]]:
    rows = msgspec.json.decode(path.read_bytes())["workers"]
    assert [row["name"] for row in rows] == [f"engine-{n}@box:30000" for n in range(len(rows))]
    return [(row["id"], row["url"]) for row in rows if row.get("state") != "ended"]


async def test_an_engine_that_ended_is_listed_so_and_comes_back_with_a_new_id(
    tmp_path: Path,
) -> None:
    path = tmp_path / "engines.json"
    engines = [
        Child(
            f"engine-{number}",
            [sys.executable, "-c", "input()"],
            {},
            tmp_path / f"{number}.log",
            f"http://127.0.0.1:{number}",
        )
        for number in range(2)
    ]
    engine_list = EngineList(path, engines, "box:30000")
    both = [
        ("engine-0@box:30000", "http://127.0.0.1:0"),
        ("engine-1@box:30000", "http://127.0.0.1:1"),
    ]
    engine_list.update()
    assert listed(path) == both
    try:
        for engine in engines:
            await engine.start()
        engine_list.update()
        assert listed(path) == both
        await engines[0].stop(20)
        engine_list.update()
        assert listed(path) == both[1:]
        await engines[0].start()
        engine_list.update()
        assert listed(path) == [("engine-0.2@box:30000", "http://127.0.0.1:0"), both[1]]
    finally:
        for engine in engines:
            await engine.stop(20)


def test_a_list_that_could_not_be_written_is_written_later(tmp_path: Path) -> None:
    engine = Child("engine-0", ["true"], {}, tmp_path / "log", "http://127.0.0.1:1")
    path = tmp_path / "later" / "engines.json"
    engine_list = EngineList(path, [engine], "box:30000")
    with pytest.raises(OSError, match="No such file"):
        engine_list.update()
    path.parent.mkdir()
    engine_list.update()
    assert listed(path) == [("engine-0@box:30000", "http://127.0.0.1:1")]
