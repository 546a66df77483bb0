"""The hardware of each engine: its GPUs, its cores, and what is rejected."""

from __future__ import annotations

from pathlib import Path

import pytest

from sgl_ext.node import hardware
from sgl_ext.node.hardware import CPU_PLATFORM, Hardware
from sgl_ext.settings.schema import EngineSettings, LaunchSettings, SettingsError, Tenant


def gpus_of(config: LaunchSettings, found: Hardware) -> list[str]:
    environments = [hardware.engine_environment(config, found, i) for i in range(config.instances)]
    return [environment["CUDA_VISIBLE_DEVICES"] for environment in environments]


def test_each_engine_gets_its_own_gpus() -> None:
    found = hardware.find_hardware({"CUDA_VISIBLE_DEVICES": "4,5,6,7"})
    assert gpus_of(LaunchSettings(model_path="m", instances=2, tp=2), found) == ["4,5", "6,7"]
    assert gpus_of(LaunchSettings(model_path="m", instances=3), found) == ["4", "5", "6"]


def test_too_few_gpus_are_an_error_with_the_numbers() -> None:
    with pytest.raises(SettingsError, match=r"instances=3: with tp=2 this needs 6 GPUs, but only"):
        hardware.check_capacity(
            LaunchSettings(model_path="m", instances=3, tp=2), Hardware(("0", "1", "2", "3"))
        )


def test_without_a_gpu_the_cpu_platform_is_used_or_named_as_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    none = {"CUDA_VISIBLE_DEVICES": ""}
    assert hardware.find_hardware(none) == Hardware((), CPU_PLATFORM)
    assert hardware.find_hardware({**none, "SGLANG_PLATFORM": "x"}) == Hardware((), "x")
    monkeypatch.setattr(hardware, "entry_points", lambda group: type("None_", (), {"names": ()})())
    with pytest.raises(SettingsError, match="no GPU found"):
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
    config = LaunchSettings(model_path="m", instances=instances, tp=tp)
    environment = hardware.engine_environment(config, Hardware((), CPU_PLATFORM), index)
    assert environment["SGLANG_PLATFORM"] == CPU_PLATFORM
    found = {k: v for k, v in environment.items() if "OMP" in k}
    assert int(found.pop("GOMP_SPINCOUNT")) < 300_000
    assert found == wanted


@pytest.mark.parametrize("name", ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY"])
def test_the_users_choice_of_waiting_stays(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "passive")
    environment = hardware.engine_environment(
        LaunchSettings(model_path="m"), Hardware((), CPU_PLATFORM), 0
    )
    assert "GOMP_SPINCOUNT" not in environment


def test_an_engine_gets_its_settings() -> None:
    settings = EngineSettings(max_priority=20, tenants=(Tenant("people", 200, 3.0),))
    config = LaunchSettings(model_path="m", engine=settings)
    environment = hardware.engine_environment(config, Hardware(("0",)), 0)
    assert EngineSettings.from_environment(environment) == settings


def test_a_local_model_goes_by_its_folders_name(tmp_path: Path) -> None:
    assert LaunchSettings(model_path=str(tmp_path)).model_name == tmp_path.name
    assert LaunchSettings(model_path="Qwen/Qwen3-32B").model_name == "Qwen/Qwen3-32B"
    config = LaunchSettings(model_path=str(tmp_path), tp=2)
    command = hardware.engine_command(config, Hardware(()), 5)
    assert command[command.index("--served-model-name") + 1] == tmp_path.name
    assert command[command.index("--tp-size") + 1] == "2"
