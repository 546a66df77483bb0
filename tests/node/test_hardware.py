"""What an engine is started on: its GPUs, its share of cores, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from sgl_ext.config import BalancerConfig, ConfigError, LaunchConfig
from sgl_ext.engine.core.settings import EngineSettings
from sgl_ext.node import hardware
from sgl_ext.node.hardware import CPU_PLATFORM, Hardware
from sgl_ext.tenants import Tenant


def gpus_of(config: LaunchConfig, found: Hardware) -> list[str]:
    environments = [hardware.engine_environment(config, found, i) for i in range(config.instances)]
    return [environment["CUDA_VISIBLE_DEVICES"] for environment in environments]


def test_each_engine_gets_its_own_gpus() -> None:
    found = hardware.find_hardware({"CUDA_VISIBLE_DEVICES": "4,5,6,7"})
    assert gpus_of(LaunchConfig("m", instances=2, tp=2), found) == ["4,5", "6,7"]
    assert gpus_of(LaunchConfig("m", instances=3), found) == ["4", "5", "6"]


def test_too_few_gpus_is_an_error_that_counts() -> None:
    with pytest.raises(ConfigError, match=r"instances=3: with tp=2 that takes 6 GPUs, and 4"):
        hardware.check_capacity(
            LaunchConfig("m", instances=3, tp=2), Hardware(("0", "1", "2", "3"))
        )


def test_without_a_gpu_the_cpu_platform_is_taken_and_said_to_be_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    none = {"CUDA_VISIBLE_DEVICES": ""}
    assert hardware.find_hardware(none) == Hardware((), CPU_PLATFORM)
    assert hardware.find_hardware({**none, "SGLANG_PLATFORM": "x"}) == Hardware((), "x")
    monkeypatch.setattr(hardware, "entry_points", lambda group: type("None_", (), {"names": ()})())
    with pytest.raises(ConfigError, match="no GPU found"):
        hardware.find_hardware(none)


@pytest.mark.parametrize(
    ("instances", "tp", "index", "wanted"),
    [
        (1, 1, 0, {"OMP_NUM_THREADS": "8"}),
        (2, 1, 1, {"OMP_NUM_THREADS": "4"}),
        (1, 2, 0, {"SGLANG_CPU_OMP_THREADS_BIND": "0-3|4-7"}),
        (2, 2, 1, {"SGLANG_CPU_OMP_THREADS_BIND": "4-5|6-7"}),
        (16, 1, 3, {"OMP_NUM_THREADS": "1"}),
    ],
)
def test_engines_on_a_cpu_share_its_cores(
    monkeypatch: pytest.MonkeyPatch, instances: int, tp: int, index: int, wanted: dict[str, str]
) -> None:
    monkeypatch.setattr(hardware.os, "cpu_count", lambda: 8)
    for name in ("OMP_NUM_THREADS", "SGLANG_CPU_OMP_THREADS_BIND", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    config = LaunchConfig("m", instances=instances, tp=tp)
    environment = hardware.engine_environment(config, Hardware((), CPU_PLATFORM), index)
    assert environment["SGLANG_PLATFORM"] == CPU_PLATFORM
    told = {k: v for k, v in environment.items() if "OMP" in k}
    assert int(told.pop("GOMP_SPINCOUNT")) < 300_000
    assert told == wanted


@pytest.mark.parametrize("name", ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY"])
def test_how_threads_wait_is_the_callers_choice(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "passive")
    environment = hardware.engine_environment(LaunchConfig("m"), Hardware((), CPU_PLATFORM), 0)
    assert "GOMP_SPINCOUNT" not in environment


def test_an_engine_is_told_what_tenants_may_have() -> None:
    tenants = (Tenant("people", 200, 3.0), Tenant("batch", -5))
    config = LaunchConfig("m", balancer=BalancerConfig(max_priority=20, tenants=tenants))
    environment = hardware.engine_environment(config, Hardware(("0",)), 0)
    told = EngineSettings.from_environment(environment)
    assert (told.max_priority, told.tenants) == (20, tenants)
    assert hash(told) == hash(EngineSettings.from_environment(environment))


def test_a_file_for_engines_is_found_from_wherever_they_run() -> None:
    for share, told in ((None, ""), ("s.jsonl", str(Path("s.jsonl").resolve()))):
        environment = hardware.engine_environment(LaunchConfig("m", share=share), Hardware(()), 0)
        assert EngineSettings.from_environment(environment).share == told


def test_a_local_model_goes_by_its_folders_name(tmp_path: Path) -> None:
    assert LaunchConfig(str(tmp_path)).model_name == tmp_path.name
    assert LaunchConfig("Qwen/Qwen3-32B").model_name == "Qwen/Qwen3-32B"
    command = hardware.engine_command(LaunchConfig(str(tmp_path), tp=2), 5)
    assert command[command.index("--served-model-name") + 1] == tmp_path.name
    assert command[command.index("--tp-size") + 1] == "2"
