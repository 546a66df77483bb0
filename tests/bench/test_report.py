"""`make report`: what a page says of figures, of what is missing, and which steps run again."""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from sgl_ext_cpu.node import ROOT

from bench.lib.script import NOT_VALID
from bench.lib.spread import ratio_spread, spread
from bench.report import __main__ as report_module
from bench.report.__main__ import (
    PAGE,
    README,
    committed,
    measure,
    shown_of,
    with_other_steps,
)
from bench.report.contents import SECTIONS
from bench.report.page import MADE, anchor, page, pictures, with_readme_part
from bench.report.plan import HANG, NAMES, QUICK_MINUTES, STEPS, Planned
from bench.report.saved import Saved
from bench.report.steps import Result, Step, run_step
from bench.report.tables import number, shown

KEY = {"code": "a", "machine": {"cores": 2}, "size": "quick"}


def arm(tokens: int, *ttft_ms: float) -> dict[str, Any]:
    return {"prompt_tokens": tokens, "ttft_ms": spread(ttft_ms), "host_ms": spread([7.25])}


WARM = {
    "cold_ratio": ratio_spread([0.98, 1.03, 1.0], [1.0, 1.0, 1.0]),
    "/v1/messages": {
        "slope_ratio": 0.2,
        **{
            str(size): {
                "ttft_ratio": ratio_spread([88.0], [31.0]),
                "stock": arm(size + 7, 88.0, 90.0, 84.0),
                "ours": arm(size + 7, 31.0, 35.0, 30.0),
            }
            for size in (16_000, 52_000)
        },
    },
}
PRIORITY = {
    "slots": {"not_valid": "the engine is too fast"},
    "memory": {
        "arms": {
            "fcfs": {"interactive": {"ttft_p50_ms": 1500, "ttft_p99_ms": 3100}},
            "ours": {"interactive": {"ttft_p50_ms": 70, "ttft_p99_ms": 160}},
        }
    },
}


FLOOD = {"arms": {"stock_priority": {"cached_share": 0.5}, "pinned": {"cached_share": 1}}}


def step(name: str, figures: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    how = {"command": f"python -m bench.{name} --quick", "commit": "abc", "measured": "2026-01-02"}
    result = Result(name, fields.pop("status", "ok"), 12.0, figures or {}, fields.pop("why", ""))
    return {**result.document(), **how, **fields}


def machine(cores: int) -> dict[str, Any]:
    return {"processor": "A CPU", "cores": cores, "memory_gib": 15.6, "python": "3.11.4"}


def report(*steps: dict[str, Any]) -> dict[str, Any]:
    facts = {"began": "2026-01-02", "commit": "abc", "size": "quick", "machine": machine(2)}
    return {**facts, "packages": {"sglang": "0.5.23"}, "peers": {"smg": "1.13"}, "steps": [*steps]}


def section(text: str, title: str) -> str:
    return text.partition(f"## {title}\n")[2].partition("\n## ")[0]


def test_a_figure_is_shown_with_its_spread_and_its_command() -> None:
    found = section(page(report(step("warm_turn", WARM))), "A turn whose prefix is cached")
    assert "    python -m bench.warm_turn --quick\n" in found
    assert "| 52,007 | 88 (84–90) | 31 (30–35) | 2.84" in found


def test_a_ratio_whose_spread_crosses_1_shows_no_difference() -> None:
    found = page(report(step("warm_turn", WARM)))
    assert "| cold turn: sgl-ext / SGLang | 1 (0.98–1.03): no difference shown |" in found


def test_what_failed_was_not_valid_or_did_not_run_is_shown_as_such_and_without_figures() -> None:
    arms = {"arms": {"ours": {"ttft_p50_ms": 123456}}}
    text = page(
        report(
            step("fanout", arms, status="failed", why="an answer differs"),
            step("pin_flood", arms, status="not valid", why="the flood fits the cache"),
        )
    )
    assert "**Failed**: an answer differs" in section(text, "Sub-agents that start together")
    not_valid = section(text, "A pinned prefix under a flood")
    assert "**Not valid**: the flood fits the cache" in not_valid
    assert "**Not run.**" in section(text, "What a proxy costs")
    assert "123,456" not in text


def test_a_part_that_is_not_valid_leaves_the_other_parts() -> None:
    found = section(page(report(step("priority", PRIORITY))), "Interactive requests beside a batch")
    assert "| not valid: the engine is too fast |" in found
    assert "| sgl-ext | 70 | 160 |" in found


def test_a_figure_that_its_bench_does_not_report_says_so() -> None:
    found = section(page(report(step("header_strip", {}))), "A header that changes, at token 0")
    assert "| tokens per second of all streams, sgl-ext / SGLang | not reported |" in found


def test_no_number_of_the_tables_is_invented() -> None:
    """Without figures there is none but those of the sections' own sentences."""
    empty = page(report(*(step(name, {}) for name in NAMES)))
    for one in SECTIONS:
        cells = re.findall(r"^\|.*\|$", section(empty, one.title), re.MULTILINE)
        values = [cell for line in cells[2:] for cell in line.split("|")[2:-1]]
        assert not re.search(r"\d", " ".join(values).replace("p50", "").replace("p99", "")), values


def test_steps_of_another_commit_are_named() -> None:
    assert "another commit: abd." in page(report(step("fanout", commit="abd"), step("index")))


def test_steps_of_another_machine_are_named(tmp_path: Path) -> None:
    for name, cores in (("fanout", 8), ("index", 2)):
        run = Saved(tmp_path / "report.json", {"cores": cores}, {"machine": machine(cores)})
        run.go_on(keep=True, also_ended=False)
        run.add(Result(name, "ok"), "", "abc")
    found = report(*run.document()["steps"])
    assert "another machine, 8 cores of A CPU with 16 GiB: fanout." in page(found)
    readme = (ROOT / README).read_text()
    assert "Some figures are from another machine" in with_readme_part(readme, found)
    assert "Some figures are from another machine" not in with_readme_part(
        readme, report(step("index"))
    )


def test_the_readme_has_figures_of_the_same_document_and_says_of_which_machine() -> None:
    readme = (ROOT / README).read_text()
    text = with_readme_part(readme, report(step("warm_turn", WARM)))
    line = "| TTFT of a cached turn of 52K tokens, ms | SGLang | 88 (84–90) | 31 (30–35) |"
    assert line in text
    assert "of a CPU" in text
    assert "| not run | not run |" in text
    assert with_readme_part(text, report()) == with_readme_part(readme, report())


def test_steps_that_did_not_run_stay_on_the_page() -> None:
    def said(document: dict[str, Any]) -> list[tuple[str, str]]:
        return [(one["name"], one["status"]) for one in document["steps"]]

    before = {**report(step("gpu", {}), step("fanout", {}), step("index", {})), "size": "quick"}
    before["peers"] = {"smg": "1"}
    run = {**report({**step("index", {}), "status": "failed"}), "size": "quick", "peers": {}}
    found = with_other_steps(run, before)
    assert said(found) == [("index", "failed"), ("fanout", "ok"), ("gpu", "ok")]
    assert found["peers"] == {"smg": "1"}
    assert said(with_other_steps({**run, "size": "full"}, before)) == [("index", "failed")]


def test_the_committed_pages_are_those_of_the_committed_figures() -> None:
    document = committed(ROOT)
    assert (ROOT / PAGE).read_text() == page(document)
    readme = (ROOT / README).read_text()
    assert readme == with_readme_part(readme, document)
    for name, text in pictures(document).items():
        assert ((ROOT / PAGE).parent / name).read_text() == text


def test_a_picture_has_each_arms_line_and_says_how_it_is_made() -> None:
    points = {str(n): {"cached_share": n / 100, "within": 1.0} for n in (24, 32)}
    found = report(step("recorded", {"engine": {"ours": points, "stock": points}}))
    text = pictures(found)["images/recorded-cache.svg"]
    assert text.count("<polyline") == 2
    for each in (">24</text>", ">SGLang</text>"):
        assert each in text
    assert "](images/recorded-cache.svg)\n\n    python -m bench.recorded" in page(found)
    assert not any("gaps" in name for name in pictures(found)), "it was not measured"


def test_the_document_has_only_what_is_shown() -> None:
    document = committed(ROOT)
    assert shown_of(document, ROOT) == document, "run python -m bench.report --page"
    more = {**WARM, "unread": {"median": 1}}
    assert "unread" not in shown_of(report(step("warm_turn", more)), ROOT)["steps"][0]["figures"]


def test_links_of_the_page_have_a_target() -> None:
    text = page(report(step("warm_turn", WARM)))
    anchors = {anchor(title) for title in re.findall(r"^## (.*)$", text, re.MULTILINE)}
    assert set(re.findall(r"\]\(#([^)]*)\)", text)) <= anchors
    for name in re.findall(r"\]\(([\w/-]+\.md)[#)]", text):
        assert (ROOT / "docs" / name).exists(), name


OTHER_PAGES = ("measured.md", "measuring.md", "clients.md", "fleet.md")
"""Their figures are those that their own commands print."""
MEASURED = re.compile(
    r"\d ?(µs|us|microseconds?)\b|\b(2-core|(2|two) (CPU )?cores)\b|\bmedians? (of|over) \d"
    r"|\d times (faster|slower|sooner)|\d (ms|s|%) (faster|slower|sooner|less)\b"
)


def test_pages_link_to_the_benchmarks_and_have_no_measured_times_of_their_own() -> None:
    """As far as words show it: limits and settings have other units, and no machine."""
    anchors = {anchor(one.title) for one in SECTIONS}
    for path in [ROOT / README, *sorted((ROOT / "docs").rglob("*.md"))]:
        text = path.read_text()
        for link in re.findall(r"measured\.md#([\w-]+)", text):
            assert link in anchors, f"{path.name}: {link}"
        own = text.partition(MADE)[0] if path.name == README else text
        prose = re.sub(r"^```.*?^```", "", own, flags=re.MULTILINE | re.DOTALL)
        if path.name not in OTHER_PAGES:
            assert not MEASURED.search(prose), f"{path.name}: {MEASURED.search(prose)}"


def test_arms_are_named_as_their_bench_means_them() -> None:
    found = section(page(report(step("pin_flood", FLOOD))), "A pinned prefix under a flood")
    assert "| SGLang, priority eviction | 0.5 |" in found


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.123456, "0.123"), (18.44, "18.4"), (1234.5, "1,234"), (52_000, "52,000"), ("x", "x")],
)
def test_numbers_have_three_digits_that_matter(value: Any, text: str) -> None:
    assert number(value) == text
    assert shown(None) == "not reported"


def test_every_step_has_a_section_and_all_end_in_time() -> None:
    assert {one.step for one in SECTIONS} == {*NAMES, "gpu"}
    assert sum(one.quick_s for one in STEPS) < 60 * QUICK_MINUTES
    for planned in STEPS:
        module = planned.step(is_full=False).module.replace(".", "/")
        assert any((ROOT / name).exists() for name in (f"{module}.py", f"{module}/__main__.py"))


def saved(path: Path, key: dict[str, Any], *, keep: bool = False, only: bool = False) -> Saved:
    found = Saved(path / "report.json", key, {"machine": {}})
    found.go_on(keep=keep, also_ended=only)
    return found


def test_an_interrupted_run_goes_on_with_what_did_not_end_well(tmp_path: Path) -> None:
    first = saved(tmp_path, KEY)
    first.add(Result("fanout", "ok"), "", "abc")
    first.add(Result("index", "failed", why="no memory"), "", "abc")
    again = saved(tmp_path, KEY)
    assert again.has("fanout")
    assert not again.has("index")


@pytest.mark.parametrize("changed", [{"code": "b"}, {"machine": {"cores": 4}}, {"size": "full"}])
def test_a_change_of_code_or_machine_begins_a_new_run(
    tmp_path: Path, changed: dict[str, Any]
) -> None:
    saved(tmp_path, KEY).add(Result("fanout", "ok"), "", "abc")
    assert not saved(tmp_path, {**KEY, **changed}).has("fanout")
    assert saved(tmp_path, {**KEY, **changed}, keep=True).has("fanout")


def test_a_run_that_has_ended_begins_again_but_for_single_steps(tmp_path: Path) -> None:
    first = saved(tmp_path, KEY)
    first.add(Result("fanout", "ok"), "", "abc")
    first.end()
    assert saved(tmp_path, KEY, only=True).has("fanout")
    assert not saved(tmp_path, KEY).has("fanout")


def test_a_file_that_cannot_be_read_begins_a_new_run(tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text("{")
    assert "new run" in Saved(tmp_path / "report.json", KEY, {}).go_on(keep=True, also_ended=False)


def test_logs_of_a_failure_stay_out_of_the_committed_document(tmp_path: Path) -> None:
    run = saved(tmp_path, KEY)
    run.add(Result("fanout", "failed", log_end="/home/me/x.log"), "", "abc")
    assert "/home/me" in (tmp_path / "report.json").read_text()
    assert "log_end" not in run.document()["steps"][0]


def test_a_slow_machine_may_take_longer_than_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[float] = []

    def note(step: Step, _: Path) -> Result:
        limits.append(step.limit_s)
        return Result(step.name, "ok", 40.0)

    monkeypatch.setattr(report_module, "run_step", note)
    steps = tuple(Planned(name, 100, 200) for name in ("fanout", "index", "store"))
    run = saved(tmp_path, KEY)
    run.add(Result("index", "ok"), "", "abc")
    options = argparse.Namespace(only=None, full=False, folder=tmp_path)
    found = measure(steps, run, options, Console(quiet=True))
    assert [result.name for result in found] == ["fanout", "store"]
    assert limits == [100 * HANG, 100 * HANG]


def test_a_bench_that_could_not_make_its_load_is_not_valid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        f"import sys\nprint('bench.x: not valid: it fits', file=sys.stderr)\nsys.exit({NOT_VALID})"
    )
    (tmp_path / "made_step.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]]))
    result = run_step(Step("x", "made_step"), tmp_path / "logs", 60)
    assert (result.status, result.why) == ("not valid", "it fits")
