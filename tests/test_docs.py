"""Documents name files that exist, and link to places that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]


def _id(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


# Paths in docs/how/architecture.md begin at these.
_PACKAGES = ("", "sgl_ext/", "sgl_ext/balancer/", "sgl_ext/engine/")


@pytest.mark.parametrize("page", PAGES, ids=_id)
def test_every_path_that_a_page_names_exists(page: Path) -> None:
    text = page.read_text()
    named = re.findall(r"`((?:[\w.]+/)+[\w.]*)`", text)
    firsts = {"sgl_ext", "radix", "scheduler", "tests", "bench", "docs", "launch"}
    if page.name == "architecture.md":
        firsts |= {"engine", "balancer", "protocols", "reading"}
    paths = [path for path in named if path.split("/")[0] in firsts and "NAME" not in path]
    missing = [path for path in paths if not _exists(path)]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=_id)
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), target
        if anchor and file.suffix == ".md":
            assert anchor in _anchors(file), target


def test_every_module_that_a_comment_names_exists() -> None:
    tops = {"radix": ROOT, "scheduler": ROOT, "sgl_ext": ROOT, "sgl_ext_cpu": ROOT / "launch/cpu"}
    missing = [
        f"{file.relative_to(ROOT)}: {name}"
        for top, folder in tops.items()
        for file in (folder / top).rglob("*.py")
        for name in re.findall(r"`((?:\w+\.)+\w+)`", file.read_text())
        if name.split(".")[0] in tops and not _is_module(tops[name.split(".")[0]], name)
    ]
    assert not missing


def _is_module(folder: Path, name: str) -> bool:
    """Whether a dotted name is a package, a module, or something that the module has."""
    path = folder / name.replace(".", "/")
    if path.is_dir() or path.with_suffix(".py").exists():
        return True
    modules = [parent.with_suffix(".py") for parent in (path.parent, path.parent.parent)]
    return any(module.exists() and path.name in module.read_text() for module in modules)


def test_every_alert_has_a_runbook_that_exists() -> None:
    for group in yaml.safe_load((ROOT / "launch/alerts.yml").read_text())["groups"]:
        for rule in (rule for rule in group["rules"] if "alert" in rule):
            path, _, anchor = rule["annotations"]["runbook"].partition("#")
            assert not anchor or anchor in _anchors(ROOT / path), rule["alert"]
            assert (ROOT / path).exists()


def _anchors(page: Path) -> set[str]:
    return {_anchor(one) for one in re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)}


def _exists(path: str) -> bool:
    places = (ROOT / package / path for package in _PACKAGES)
    return any(place.exists() or place.with_suffix(".py").exists() for place in places)


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
