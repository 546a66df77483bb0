"""Hooks by group: what an SGLang lacks turns a group off or ends the start, and a class is replaced
by a subclass."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from sgl_ext.engine import hooks, sglang_check
from sgl_ext.engine.hooks import Group, Seam, after, around, before

NEEDED = Group("a promise")
OPTIONAL = Group("a fault", "answers are as SGLang writes them")
TESTED = {"an_sglang.Server.answer": "(self, text, *, loudly=)", "an_sglang.start": "(args)"}


class Server:
    def answer(self, text: str, *, loudly: bool = False) -> str:
        return text.upper() if loudly else text

    def stop(self) -> str:
        return "stopped"


@pytest.fixture
def an_sglang() -> Iterator[Any]:
    """A module that stands for SGLang."""
    module: Any = ModuleType("an_sglang")
    module.Server, module.start = Server, lambda args: args
    sys.modules["an_sglang"] = module
    yield module
    del sys.modules["an_sglang"]


def seams(group: Group) -> dict[str, Seam]:
    def ours(original: Any, *args: Any, **kw: Any) -> Any:
        return f"{original(*args, **kw)}!"

    return {
        "an_sglang.Server": Seam("REPLACE", methods={"answer": (around(group, ours),)}),
        "an_sglang.start": Seam("AROUND", (around(NEEDED, ours),)),
    }


def test_an_sglang_as_it_was_tested_lacks_nothing(an_sglang: Any) -> None:
    assert hooks.changed(seams(NEEDED), TESTED) == {}


def test_a_renamed_symbol_turns_the_group_off_that_can_be_off(an_sglang: Any) -> None:
    class Renamed:
        def reply(self, text: str) -> str:
            return text

    an_sglang.Server = Renamed
    lacking = hooks.changed(seams(OPTIONAL), TESTED)
    assert lacking == {OPTIONAL: ["an_sglang.Server.answer is missing"]}
    left = {name: seam.without(lacking) for name, seam in seams(OPTIONAL).items()}
    assert left["an_sglang.Server"] is None
    assert left["an_sglang.start"] is not None


def test_a_renamed_symbol_of_a_needed_group_ends_the_start_by_name(an_sglang: Any) -> None:
    del an_sglang.start
    with pytest.raises(RuntimeError, match=r"a promise: an_sglang\.start is missing"):
        hooks.changed(seams(OPTIONAL), TESTED)


def test_another_signature_counts_as_another_function(an_sglang: Any) -> None:
    class Other:
        def answer(self, text: str, language: str) -> str:
            return text

    an_sglang.Server = Other
    (problem,) = hooks.changed(seams(OPTIONAL), TESTED)[OPTIONAL]
    assert problem == (
        "an_sglang.Server.answer takes (self, text, language), not (self, text, *, loudly=)"
    )


def test_an_engine_says_which_groups_are_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLEXT_HOOKS_OFF", raising=False)
    assert sglang_check.groups_off() == {}
    monkeypatch.setenv("SGLEXT_HOOKS_OFF", "")
    sglang_check.note_off({"a fault": "it is missing"})
    assert sglang_check.groups_off() == {"a fault": "it is missing"}


def test_a_subclass_runs_our_functions_in_order_and_leaves_the_rest() -> None:
    log: list[str] = []

    def first(_: Any, text: str, **__: Any) -> None:
        log.append(f"before {text}")

    def twice(original: Any, server: Any, text: str, **kw: Any) -> str:
        return str(original(server, text, **kw) + original(server, text, **kw))

    def last(made: str, _: Any, __: str, **___: Any) -> str:
        log.append(f"after {made}")
        return f"<{made}>"

    parts = (after(NEEDED, last), before(NEEDED, first), around(NEEDED, twice))
    made = hooks._subclass(Server, {"answer": parts})
    assert made().answer("a", loudly=True) == "<AA>"
    assert log == ["before a", "after AA"]
    assert made().stop() == "stopped"
    assert (made.__name__, made.__module__) == (Server.__name__, Server.__module__)
    assert Server().answer("a") == "a"


def test_every_hooked_function_of_the_installed_sglang_was_tested() -> None:
    with warnings.catch_warnings(action="ignore"):
        for name in ("entrypoints.http_server", "managers.scheduler", "parser.harmony_parser"):
            import_module(f"sglang.srt.{name}")
        paths = sorted({path for _, path, *_ in hooks.rows() if path.startswith("sglang.")})
        assert sglang_check.signatures_of(paths) == sglang_check.tested_signatures()
        assert hooks.changed(dict(hooks._all_seams())) == {}


def test_every_hook_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    hooks.main([])
    text = capsys.readouterr().out
    line = next(one for one in text.splitlines() if ".OpenAIServingChat._process_messages" in one)
    assert line.split()[0] == "main"
    assert "tool_choice.hold_choice" in line
    assert "pins: needed" in text
    assert "tool calls: may be off: " in text


def test_a_page_says_what_clients_get_without_each_group() -> None:
    page = (Path(__file__).parents[2] / "docs/how/engine.md").read_text()
    for group in hooks.groups():
        row = f"| {group.name} | {group.without} |" if group.without else group.name
        assert row in page, group.name
