"""The wheels hold what their user needs, and serve where there is no checkout."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tomllib
from configparser import ConfigParser
from pathlib import Path
from zipfile import ZipFile

import psutil
import pytest
import requests
import torch
from sgl_ext_cpu.node import ROOT, free_port, running_process

from sgl_ext.process import ENGINE_FOLDERS, remove_stale
from tests.waiting import HANG_S

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CPU = ROOT / "launch/cpu"
FILES = "sgl_ext/recipe_files/"


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The extension's wheel and the CPU platform's, as `make wheels` builds them."""
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory"]
    for project in (ROOT, CPU):
        subprocess.run([*build, str(folder)], cwd=project, check=True, capture_output=True)
    return sorted(folder.glob("*.whl"))


def tracked(*folders: str) -> set[str]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *folders],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return {name for name in listed.stdout.splitlines() if (ROOT / name).exists()}


def test_the_wheel_holds_the_packages_the_recipes_and_the_documents_and_nothing_else(
    wheels: list[Path],
) -> None:
    with ZipFile(wheels[0]) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    recipes = {name.removeprefix("launch/") for name in tracked("launch")}
    recipes = {name for name in recipes if not name.startswith("cpu/") and name[-3:] != ".py"}
    assert {"gpu.toml", "cpu.toml", "alerts.yml", "kubernetes/base/engine/engine.yaml"} <= recipes
    recipes.add("cpu/overrides.txt")
    documents = {
        name for name in tracked("docs") if not name.endswith((".py", ".json", ".toml", ".txt"))
    }
    assert {"docs/index.md", "docs/start/team.md", "docs/images/page-light.webp"} <= documents
    recipes |= documents
    packages = tracked("sgl_ext", "scheduler", "radix")
    # The commit that it was built from is no file of the repository.
    assert names - {"sgl_ext/commit.txt"} == packages | {FILES + name for name in recipes}


def test_the_platform_s_wheel_holds_the_platform_without_what_needs_a_checkout(
    wheels: list[Path],
) -> None:
    with ZipFile(wheels[1]) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    package = {name.removeprefix("launch/cpu/") for name in tracked("launch/cpu/sgl_ext_cpu")}
    of_checkouts = {f"sgl_ext_cpu/{name}.py" for name in ("node", "peers", "envoy")}
    assert names == package - of_checkouts


def test_the_wheels_have_their_entry_points_and_name_each_other(wheels: list[Path]) -> None:
    platform = tomllib.loads((CPU / "pyproject.toml").read_text())["project"]
    for path, project in zip(wheels, (PROJECT, platform), strict=True):
        info = path.name.partition("-py3")[0] + ".dist-info/"
        found = ConfigParser()
        found.optionxform = str  # type: ignore[assignment,method-assign]
        with ZipFile(path) as wheel:
            found.read_string(wheel.read(info + "entry_points.txt").decode())
            metadata = wheel.read(info + "METADATA").decode()
        stated = dict(project["entry-points"])
        if "scripts" in project:
            stated["console_scripts"] = project["scripts"]
        assert {name: dict(found[name]) for name in found.sections()} == stated
        assert f"Name: {project['name']}\nVersion: {project['version']}\n" in metadata
    (extra,) = (one for one in PROJECT["optional-dependencies"]["cpu"] if "==" in one)
    assert extra == f"{platform['name']}=={platform['version']}"


@pytest.mark.engine
@pytest.mark.slow
def test_an_installed_wheel_serves_away_from_any_checkout(
    wheels: list[Path], tiny_model: Path, tmp_path: Path
) -> None:
    """The environment is new, and finds other distributions where this one has them. Nothing is
    forked: these are the processes that a user's node has, and they end with their launcher."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    (packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    python = str(tmp_path / "venv/bin/python")
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "--python", python, "install", "--quiet"),
            *("--no-deps", "--no-index", *map(str, wheels)),
        ],
        check=True,
        env=environment,
    )
    # A folder that a .pth file names: Python does not read the .pth files in it, so an editable
    # install of a checkout there is not seen.
    (packages / "others.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    away, port = tmp_path / "away", free_port()
    away.mkdir()

    def called(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [python, *arguments],
            cwd=away,
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    where = "import sgl_ext, sgl_ext_cpu, radix; print(sgl_ext.__file__, sgl_ext_cpu.__file__)"
    assert all(
        Path(file).is_relative_to(packages) for file in called("-c", where).stdout.split()
    ), "the environment imports a checkout"
    flags = ["--config", "cpu", "--model-path", str(tiny_model), "--port", str(port), "--diagnose"]
    url, log = f"http://127.0.0.1:{port}", away / "launch.out"
    with running_process(
        ["env", "-u", "PYTHONPATH", "-C", str(away), python, "-m", "sgl_ext.launch", *flags],
        log,
        lambda: "sgl-ext is serving" in log.read_text(),
        end_signal=signal.SIGTERM,
    ) as launcher:
        body = {"model": "m", "max_tokens": 2, "messages": [{"role": "user", "content": "Count."}]}
        answer = requests.post(f"{url}/v1/messages", json=body, timeout=HANG_S)
        assert answer.ok
        for verb in ("status", "doctor"):
            said = called("-m", "sgl_ext", verb, "--url", url)
            assert (said.returncode, said.stderr) == (0, ""), said.stdout
        children = psutil.Process(launcher.pid).children(recursive=True)
        assert len(children) >= 4
        opened = [Path(file.path) for child in children for file in child.open_files()]
        (folder,) = {file.parent for file in opened if ENGINE_FOLDERS in str(file)}
        remove_stale(ENGINE_FOLDERS)
        assert folder.exists()
        launcher.kill()
        assert psutil.wait_procs(children, timeout=60)[1] == []
    remove_stale(ENGINE_FOLDERS)
    assert not folder.exists()
    assert str(ROOT) not in log.read_text()
