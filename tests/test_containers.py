"""The Dockerfile, the compose file and the systemd unit are valid, and agree with the settings."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path
from typing import Any

import pytest
import yaml
from sgl_ext_cpu.node import ROOT

from sgl_ext.launch import WRONG_COMMAND
from sgl_ext.node.children import store_of
from sgl_ext.recipes import recipes
from sgl_ext.settings.schema import BalancerSettings
from sgl_ext.settings.sources import launch_settings

LAUNCH = ROOT / "launch"
DOCKERFILE = (LAUNCH / "Dockerfile").read_text()
COMPOSE = ("compose.yaml", "compose.gpu.yaml")
UNIT = LAUNCH / "systemd/sgl-ext.service"
# What a stop takes beyond drain-s: the balancer's and the engines' end.
STOP_S = 5 + 20
TOOLS = Path(sys.executable).parent


def stages() -> dict[str, str]:
    """The text of each stage by its name."""
    parts = re.split(r"^FROM (\S+) AS (\S+)$", DOCKERFILE, flags=re.MULTILINE)
    return dict(zip(parts[2::3], parts[3::3], strict=True))


def bases() -> dict[str, str]:
    found = re.findall(r"^FROM (\S+) AS (\S+)$", DOCKERFILE, flags=re.MULTILINE)
    return {name: base for base, name in found}


def whole(target: str) -> str:
    """A stage with those that it is built on."""
    base = bases()[target]
    return (whole(base) if base in stages() else "") + stages()[target]


@pytest.mark.skipif(not (TOOLS / "hadolint").exists(), reason="hadolint is not installed")
def test_hadolint_accepts_the_dockerfile() -> None:
    command = [str(TOOLS / "hadolint"), str(LAUNCH / "Dockerfile")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("target", ["balancer", "cpu", "cuda", "engine"])
def test_an_image_runs_as_a_user_of_its_own_and_builds_nothing(target: str) -> None:
    text = whole(target)
    assert re.findall(r"^USER (.*)$", text, re.MULTILINE) == ["10001"]
    assert "HEALTHCHECK" in text
    assert "org.opencontainers.image.title" in text
    assert "pip install" not in text, "the stages before it install"
    assert 'ENTRYPOINT ["tini"' in text
    # The port of the healthcheck and of EXPOSE.
    assert set(re.findall(r"127\.0\.0\.1:(\d+)/(?:live|ready)|EXPOSE (\d+)", text)) == {
        (str(BalancerSettings().port), ""),
        ("", str(BalancerSettings().port)),
    }


def test_a_build_sees_the_wheels_and_nothing_else() -> None:
    ignored = (LAUNCH / "Dockerfile.dockerignore").read_text().splitlines()
    assert [line for line in ignored if not line.startswith("#")] == ["*", "!dist"]
    copied = re.findall(r"^COPY (?!--from)(\S+)", DOCKERFILE, re.MULTILINE)
    assert set(copied) == {"dist"}
    named = set(re.findall(r"/dist/([\w.-]+)", DOCKERFILE))
    made = set(re.findall(r"\bdist/([\w.-]+)?$", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert named == {"constraints.txt", "cpu-overrides.txt"}
    assert "cpu-overrides.txt" in made


@pytest.mark.parametrize("name", COMPOSE)
def test_a_compose_file_is_what_compose_takes(name: str) -> None:
    command = [str(TOOLS / "check-jsonschema"), "--builtin-schema", "vendor.compose-spec"]
    done = subprocess.run([*command, LAUNCH / name], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def compose(name: str) -> Any:
    return yaml.safe_load((LAUNCH / name).read_text())


@pytest.mark.parametrize("name", COMPOSE)
def test_a_compose_file_names_targets_and_flags_that_exist(name: str) -> None:
    for service in compose(name)["services"].values():
        if "build" in service:
            assert service["build"]["target"] in stages()
    argv = [
        re.sub(r"\$\{MODEL.*\}", "m", word) for word in compose(name)["services"]["node"]["command"]
    ]
    assert launch_settings(argv).balancer.port == BalancerSettings().port


def test_what_the_compose_file_mounts_is_there_and_comes_with_the_wheel() -> None:
    services = compose("compose.yaml")["services"]
    mounted = [
        volume.split(":")[0].removeprefix("./")
        for service in services.values()
        for volume in service.get("volumes", ())
        if volume.startswith("./")
    ]
    assert set(mounted) == {"prometheus.yml", "alerts.yml", "grafana"}
    for name in mounted:
        assert any(known == name or known.startswith(f"{name}/") for known in recipes()), name


def test_the_compose_file_publishes_nothing_beyond_this_machine() -> None:
    for service in compose("compose.yaml")["services"].values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))


def unit() -> ConfigParser:
    read = ConfigParser(strict=False, interpolation=None)
    read.optionxform = str  # type: ignore[assignment,method-assign]
    read.read(UNIT)
    return read


def test_a_node_has_time_to_drain_before_it_is_killed() -> None:
    needed = BalancerSettings().drain_s + STOP_S
    service = unit()["Service"]
    assert float(service["TimeoutStopSec"]) > needed
    grace = compose("compose.yaml")["services"]["node"]["stop_grace_period"]
    assert float(grace.removesuffix("s")) > needed
    # The launcher stops its children: SIGTERM to all would cut off what they run.
    assert service["KillMode"] == "mixed"


def test_the_unit_s_command_is_one_of_ours() -> None:
    command = unit()["Service"]["ExecStart"].split()
    assert command[0].endswith("/bin/sgl-ext")
    assert command[1] == "serve"
    assert command[2::2] == ["--config", "--log-dir"]
    assert unit()["Service"]["User"] != "root"


def test_a_wrong_file_is_not_tried_again_and_the_store_is_no_log() -> None:
    service = unit()["Service"]
    assert int(service["RestartPreventExitStatus"]) == WRONG_COMMAND
    settings = launch_settings(["--model-path", "m", "--log-dir", "/var/log/sgl-ext"])
    state = {"STATE_DIRECTORY": f"/var/lib/{service['StateDirectory']}"}
    assert store_of(settings, state) == "/var/lib/sgl-ext/store.sqlite"
    assert store_of(settings, {}) == "/var/log/sgl-ext/store.sqlite"
    assert store_of(settings, {"STATE_DIRECTORY": "/a:/b"}) == "/a/store.sqlite"
    own = launch_settings(["--model-path", "m", "--store", "own.sqlite"])
    assert store_of(own, state) == "own.sqlite"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_accepts_the_unit_and_finds_it_hardened(tmp_path: Path) -> None:
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace("/opt/sgl-ext/bin/sgl-ext", "/bin/true"))
    for command in (["verify"], ["security", "--offline=true", "--threshold=30"]):
        done = subprocess.run(
            ["systemd-analyze", *command, copy], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "sgl-ext.service:" not in done.stderr
