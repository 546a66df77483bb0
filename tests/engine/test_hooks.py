"""Hooks by group: what an SGLang lacks turns a group off or ends the start, and a class is replaced
by a subclass."""

from __future__ import annotations

import inspect
import json
import linecache
import sys
import textwrap
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from pkgutil import resolve_name
from types import ModuleType
from typing import Any

import pytest

from sgl_ext.engine import hooks, sglang_check
from sgl_ext.engine.hooks import Group, Seam, after, around, before
from sgl_ext.engine.sglang_versions import OFF, TESTED, put_stand_ins

NEEDED = Group("a promise")
OPTIONAL = Group("a fault", "answers are as SGLang writes them")
SIGNATURES = {"an_sglang.Server.answer": "(self, text, *, loudly=)", "an_sglang.start": "(args)"}
SOURCES = {"an_sglang.Server.stop": (OPTIONAL, NEEDED)}


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


def changed(group: Group, sources: Mapping[str, Collection[str]] = {}) -> dict[Group, list[str]]:
    return hooks.changed(seams(group), SOURCES, sglang_check.Tested(SIGNATURES, sources))


def test_an_sglang_as_it_was_tested_lacks_nothing(an_sglang: Any) -> None:
    assert changed(NEEDED) == {}
    stop = sglang_check.fingerprint_of(Server.stop)
    assert changed(NEEDED, {"an_sglang.Server.stop": {"another version's", stop}}) == {}


def test_another_body_turns_off_what_relies_on_it(an_sglang: Any) -> None:
    problem = ["an_sglang.Server.stop has another body"]
    assert changed(NEEDED, {"an_sglang.Server.stop": {"0"}}) == {OPTIONAL: problem, NEEDED: problem}


def test_a_fingerprint_is_of_the_code_and_not_of_comments() -> None:
    def first(text: str) -> str:
        # upper case

        return text.upper()

    def second(text: str) -> str:
        return text.upper()

    def third(text: str) -> str:
        return text.lower()

    def named(function: Callable[..., str]) -> str:
        source = inspect.getsource(function).replace(function.__name__, "same")
        name = f"<{function.__name__}>"
        linecache.cache[name] = (1, None, source.splitlines(True), name)
        made: dict[str, Any] = {}
        exec(compile(textwrap.dedent(source), name, "exec"), made)
        return sglang_check.fingerprint_of(made["same"])

    assert named(first) == named(second) != named(third)
    assert sglang_check.fingerprint_of(len) == ""


def test_a_renamed_symbol_turns_the_group_off_that_can_be_off(an_sglang: Any) -> None:
    class Renamed:
        def reply(self, text: str) -> str:
            return text

    an_sglang.Server = Renamed
    lacking = changed(OPTIONAL)
    assert lacking == {OPTIONAL: ["an_sglang.Server.answer is missing"]}
    left = {name: seam.without(lacking) for name, seam in seams(OPTIONAL).items()}
    assert left["an_sglang.Server"] is None
    assert left["an_sglang.start"] is not None


def test_what_needed_groups_and_we_lack_ends_the_start_in_one_list(
    an_sglang: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    del an_sglang.start
    monkeypatch.setattr(hooks, "_all_seams", lambda: iter(seams(OPTIONAL).items()))
    monkeypatch.setattr(hooks, "SOURCES", {})
    monkeypatch.setattr(sglang_check, "missing", lambda *_: ["an_sglang:Gone"])
    monkeypatch.setattr(sglang_check, "missing_variables", lambda _: [])
    reasons = r"a promise: an_sglang\.start is missing; it has no an_sglang:Gone"
    with pytest.raises(RuntimeError, match=reasons):
        hooks.verify(TESTED[-1])


def test_another_signature_counts_as_another_function(an_sglang: Any) -> None:
    class Other:
        def answer(self, text: str, language: str) -> str:
            return text

    an_sglang.Server = Other
    (problem,) = changed(OPTIONAL)[OPTIONAL]
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


def test_of_the_installed_sglang_only_the_groups_are_off_that_its_version_cannot_have() -> None:
    installed = version("sglang")
    with warnings.catch_warnings(action="ignore"):
        for name in ("entrypoints.http_server", "managers.scheduler", "parser.harmony_parser"):
            import_module(f"sglang.srt.{name}")
        put_stand_ins(installed)
        tested = sglang_check.tested_with(installed)
        now = hooks.tested_now(installed)
        assert {**tested.signatures, **now["signatures"]} == tested.signatures
        assert {path: {one} for path, one in now["sources"].items()} == tested.sources
        lacking = hooks.changed(dict(hooks._all_seams()), hooks.SOURCES, tested)
    assert {group.name for group in lacking} == OFF[installed]


def test_each_tested_version_has_all_tables() -> None:
    names = {group.name for group in hooks.groups()}
    table = json.loads(sglang_check._TESTED.read_text())
    assert tuple(table) == TESTED
    for one in TESTED:
        assert table[one]["sources"].keys() == hooks.SOURCES.keys(), one
        assert OFF[one] <= names
    assert all(group.without for group in hooks.groups() if group.name in OFF[TESTED[0]])


def test_a_version_that_nobody_tested_is_compared_with_all_that_were() -> None:
    path = next(iter(hooks.SOURCES))
    each = [sglang_check.tested_with(one) for one in TESTED]
    untested = sglang_check.tested_with("99.0")
    assert untested.signatures == each[-1].signatures
    assert untested.sources[path] == {one for known in each for one in known.sources[path]}


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


def test_no_module_that_is_not_looked_through_holds_what_is_hooked() -> None:
    off = OFF.get(version("sglang"), frozenset())
    with warnings.catch_warnings(action="ignore"):  # SGLang's, where it is imported first here
        hooked = {
            id(resolve_name(path))
            for _, path, _, _, group in hooks.rows()
            if path.startswith("sglang.") and group not in off
        }
    left_out = [
        module
        for path, module in list(sys.modules.items())
        if isinstance(module, ModuleType) and path.partition(".")[0] in hooks._WITHOUT_SGLANG
    ]
    assert len(left_out) > 1000
    found = {
        module.__name__
        for module in left_out
        for value in list(vars(module).values())
        if id(value) in hooked
    }
    assert not found
