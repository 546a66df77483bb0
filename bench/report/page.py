"""docs/measured.md and the README's part, from the document of a run.

Every figure comes from the document. What was not measured, failed or was not valid says so.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from bench.report.contents import SECTIONS, Section
from bench.report.peers import PEERS, peer_rows
from bench.report.pictures import Picture, svg
from bench.report.tables import NO_DIFFERENCE, Figures, Table, shown, table

Report = Mapping[str, Any]

MADE = "<!-- Made by `make report`. -->"
_END = "<!-- The end of that. -->"
ON_A_CPU = (
    "These figures are of a CPU with small local models. No report of a GPU has been committed yet."
)
_INTRODUCTION = f"""\
{MADE}

# Measured

`make report` measures what is on this page and writes it, in 45 minutes; \
`make report REPORT='--only judges'` measures the section \
that takes longer. Engines are real SGLang processes with small local models on the CPU, unless a \
section says otherwise: absolute times are not those of a GPU. \
Arms that are compared ran on the same machine in the same run.
"""
_HOW_TO_READ = f"""\
A figure with a range is the median of all rounds, then the smallest and the largest: \
`18.4 (17.9–21)`. A ratio whose range contains 1 says "{NO_DIFFERENCE}". A step is "not valid" if \
it could not make the load that it is about.
"""
_HEAD = ("measured", "against", "theirs", "sgl-ext")
_NOT_RUN = "no report has been committed yet"


def page(report: Report) -> str:
    """The page."""
    parts = [_INTRODUCTION, _HOW_TO_READ, *_run(report), *_against(report)]
    for section in SECTIONS:
        step = _steps(report).get(section.step)
        if step is not None or section.step != "gpu":
            parts.append("\n".join(_section(section, step)) + "\n")
    return "\n".join(parts)


def pictures(report: Report) -> dict[str, str]:
    """The page's pictures: each one's text, by its place beside the page."""
    found = figures_of(report)
    return {
        _image(picture): svg(picture)
        for section in SECTIONS
        for picture in section.pictures(found.get(section.step, {}))
        if picture.lines
    }


def _image(picture: Picture) -> str:
    return f"images/{picture.name}.svg"


def figures_of(report: Report) -> dict[str, Figures]:
    """The figures of each step that ended well."""
    return {
        name: step["figures"] for name, step in _steps(report).items() if step["status"] == "ok"
    }


def with_readme_part(readme: str, report: Report) -> str:
    """The README with its figures brought up to date."""
    rows = peer_rows(_found(report))
    lines = [MADE, "", *table(_HEAD, rows), ""]
    if "gpu" not in figures_of(report):
        lines += [ON_A_CPU, ""]
    some = (
        " Some figures are from another machine: the page says which." if _elsewhere(report) else ""
    )
    lines += [f"{_measured_on(report)}{some} [All figures](docs/measured.md).", "", _END]
    made = re.compile(f"{re.escape(MADE)}.*?{re.escape(_END)}", re.DOTALL)
    return made.sub(lambda _: "\n".join(lines), readme)


def _found(report: Report) -> dict[str, Figures | str]:
    """The figures of each step, or how it ended instead."""
    ended: dict[str, Figures | str] = dict(figures_of(report))
    for name, step in _steps(report).items():
        ended.setdefault(name, step["status"])
    return ended


def _steps(report: Report) -> dict[str, Mapping[str, Any]]:
    return {step["name"]: step for step in report.get("steps", ())}


def _run(report: Report) -> Iterator[str]:
    if not report.get("steps"):
        yield f"Nothing is measured here: {_NOT_RUN}.\n"
        return
    yield f"{_measured_on(report)} [All figures](benchmarks.json).\n"
    rows = [(step["name"], step["status"], step["why"]) for step in report["steps"]]
    bad = [row for row in rows if row[1] != "ok"]
    if bad:
        yield "\n".join(table(("step", "ended", "why"), bad)) + "\n"
    minutes = sum(step["seconds"] for step in report["steps"]) / 60
    yield f"All steps together took {minutes:.0f} minutes.\n"
    others = sorted({step["commit"] for step in report["steps"]} - {report["commit"]})
    if others:
        yield f"Some steps were measured at another commit: {', '.join(others)}.\n"
    for machine, names in _elsewhere(report).items():
        yield f"Measured on another machine, {machine}: {', '.join(names)}.\n"


def _elsewhere(report: Report) -> dict[str, list[str]]:
    """The steps that were measured on other machines, by machine."""
    found: dict[str, list[str]] = {}
    for step in report.get("steps", ()):
        machine = _machine(step.get("machine", report["machine"]))
        if machine != _machine(report["machine"]):
            found.setdefault(machine, []).append(step["name"])
    return found


def _machine(machine: Mapping[str, Any]) -> str:
    return (
        f"{machine['cores']} cores of {machine['processor']} with {machine['memory_gib']:.0f} GiB"
    )


def _measured_on(report: Report) -> str:
    if not report.get("steps"):
        return f"Not measured: {_NOT_RUN}."
    machine = report["machine"]
    versions = ", ".join(f"{name} {one}" for name, one in report["packages"].items())
    return (
        f"Measured on {report['began']} at commit {report['commit']}, in its {report['size']} "
        f"form, on {_machine(machine)}; Python {machine['python']}, {versions}."
    )


def _against(report: Report) -> Iterator[str]:
    versions = {**report.get("packages", {}), **report.get("peers", {})}
    peers = (f"{peer.name} {versions.get(peer.key, '')} ({peer.what})" for peer in PEERS)
    yield "## Compared with\n"
    yield f"{', '.join(peers)}.\n"


def anchor(title: str) -> str:
    """A heading's anchor, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def _section(section: Section, step: Mapping[str, Any] | None) -> Iterator[str]:
    more = f" More: [{section.page}]({section.page})." if section.page else ""
    yield from (f"## {section.title}", "", section.text + more)
    if step is None:
        yield from ("", "**Not run.**")
        return
    yield from ("", f"    {step['command']}", "")
    if step["status"] != "ok":
        yield f"**{step['status'].capitalize()}**: {step['why']}"
        if section.step != "gpu":
            return
    for one in section.tables(step["figures"]):
        if one.rows:
            yield from (*_shown(one), "")
    for picture in section.pictures(step["figures"]):
        if not picture.lines:
            continue
        yield from (f"![{picture.title}: {picture.axis}]({_image(picture)})", "")
        yield from (f"    {picture.command}", "")


def _shown(one: Table) -> Iterator[str]:
    return table(one.head, [[shown(value) for value in row] for row in one.rows])
