"""A child process of the node, and the reason in its log."""

from __future__ import annotations

from pathlib import Path

from sgl_ext.node.child import Child


def test_lines_about_leaks_do_not_hide_the_reason(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    leaks = "nanobind: leaked 513 functions!\n" + ' - leaked function "f"\n' * 20
    leaks += " - ... skipped remainder\nnanobind: this is likely caused by a bug.\n"
    log.write_text(f"before\n\nthe reason\n{leaks}See https://nanobind.readthedocs.io/refleaks\n")
    child = Child("engine-0", (), {}, log, "http://127.0.0.1:1")
    assert child.last_lines(1) == ["the reason"]
    assert child.last_lines(5) == ["before", "the reason"]
