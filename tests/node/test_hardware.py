"""The hardware of each engine: its GPUs, its cores, and what is rejected."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from msgspec.structs import replace

from sgl_ext.node import hardware
from sgl_ext.node.devices.nvidia_smi import Listed
from sgl_ext.node.devices.torch_probe import Seen
from sgl_ext.node.hardware import CPU_PLATFORM, Hardware
from sgl_ext.settings.schema import EngineSettings, LaunchSettings, SettingsError, Tenant

SETTINGS = LaunchSettings(model_path="m")
CUDA = Seen(count=8, version="2.13.0+cu130", cuda="13.0")
ON_CPU = Seen(version="2.13.0+cpu")
OLD_DRIVER = Seen(version="2.13.0", cuda="13.0", warning="The NVIDIA driver is too old")
LISTED = Listed(tuple("01234567"))


def find(
    settings: LaunchSettings = SETTINGS,
    environ: Mapping[str, str] = {},
    listed: Listed = LISTED,
    seen: Seen = CUDA,
) -> Hardware:
    return hardware.find_hardware(settings, environ, lambda: listed, lambda _: seen)


def gpus_of(config: LaunchSettings, found: Hardware) -> list[str]:
    environments = [hardware.engine_environment(config, found, i) for i in range(config.instances)]
    return [environment[found.variable] for environment in environments]


def test_each_engine_gets_its_own_gpus() -> None:
    found = find(environ={"CUDA_VISIBLE_DEVICES": "4,5,6,7"})
    assert gpus_of(replace(SETTINGS, instances=2, tp=2), found) == ["4,5", "6,7"]
    assert gpus_of(replace(SETTINGS, instances=3), found) == ["4", "5", "6"]
    both = replace(SETTINGS, instances=2, tp=2, engine_args=("--pipeline-parallel-size=2",))
    assert gpus_of(both, find()) == ["0,1,2,3", "4,5,6,7"]


def test_too_few_gpus_are_an_error_with_the_numbers() -> None:
    four = Hardware(("0", "1", "2", "3"))
    with pytest.raises(SettingsError, match=r"instances=3: with tp=2 this needs 6 GPUs, but only"):
        hardware.check_capacity(replace(SETTINGS, instances=3, tp=2), four)
    replicas = replace(SETTINGS, tp=2, engine_args=("--dp-size", "4"))
    with pytest.raises(SettingsError, match=r"with tp=2 x dp=4 this needs 8 GPUs"):
        hardware.check_capacity(replicas, four)


def test_an_engine_on_several_mig_slices_is_refused() -> None:
    found = find(listed=Listed(("MIG-a", "MIG-b")), seen=replace(CUDA, count=1))
    assert gpus_of(replace(SETTINGS, instances=2), found) == ["MIG-a", "MIG-b"]
    with pytest.raises(SettingsError, match="tp=2: an engine needs 2 GPUs, and CUDA gives"):
        hardware.check_capacity(replace(SETTINGS, tp=2), found)


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (find(), "engines run on GPUs: nvidia-smi lists 8 GPUs; torch 2.13.0+cu130, built for "),
        (find(environ={"CUDA_VISIBLE_DEVICES": "3"}), "CUDA_VISIBLE_DEVICES lists 1 GPU; torch"),
        (find(listed=Listed()), "torch lists 8 GPUs; torch"),
        (find(listed=Listed(problem="nvidia-smi broke")), "CUDA 13.0; nvidia-smi broke"),
        (find(replace(SETTINGS, platform="cpu")), "engines run on the CPU, which platform='cpu'"),
        (find(environ={"SGLANG_PLATFORM": CPU_PLATFORM}), "the CPU, which SGLANG_PLATFORM names"),
        (find(environ={"SGLANG_PLATFORM": "x"}), "SGLang's platform 'x', which SGLANG_PLATFORM"),
    ],
)
def test_a_line_says_what_was_chosen_and_why(found: Hardware, reason: str) -> None:
    assert reason in found.reason
    assert found.reason.count("\n") == 0


def test_the_gpus_of_rocm_are_given_by_its_own_variable() -> None:
    amd = Seen(count=2, version="2.9.1", hip="7.2")
    found = find(listed=Listed(), seen=amd)
    assert gpus_of(replace(SETTINGS, instances=2), found) == ["0", "1"]
    assert found.variable == "HIP_VISIBLE_DEVICES"
    assert find(environ={"CUDA_VISIBLE_DEVICES": "1"}, seen=amd).variable == "CUDA_VISIBLE_DEVICES"


@pytest.mark.parametrize(
    ("environ", "listed", "seen", "error"),
    [
        ({}, LISTED, ON_CPU, "nvidia-smi lists 8, and torch 2.13.0.cpu, built for no GPU, sees no"),
        ({}, LISTED, OLD_DRIVER, r"sees none \(The NVIDIA driver is too old\).*update the driver"),
        ({}, LISTED, replace(CUDA, count=4), "nvidia-smi lists 8, and torch .* sees 4"),
        ({"CUDA_VISIBLE_DEVICES": "9"}, LISTED, ON_CPU, "CUDA_VISIBLE_DEVICES lists 1, and torch"),
        ({"CUDA_VISIBLE_DEVICES": ""}, LISTED, CUDA, "CUDA_VISIBLE_DEVICES='': it hides all GPUs"),
        ({}, Listed(), ON_CPU, "no GPU found: nvidia-smi lists none, and torch .* sees none"),
        ({}, Listed(problem="nvidia-smi broke"), ON_CPU, "no GPU found: nvidia-smi broke, and"),
        ({}, LISTED, Seen(problem="torch cannot be imported"), "torch cannot be imported"),
    ],
)
def test_without_a_gpu_that_torch_can_use_nothing_starts(
    environ: dict[str, str], listed: Listed, seen: Seen, error: str
) -> None:
    """The CPU platform is installed here, and takes no GPU's place."""
    with pytest.raises(SettingsError, match=error) as refused:
        find(environ=environ, listed=listed, seen=seen)
    assert "--platform cpu" in str(refused.value)


def test_a_platform_that_is_named_must_be_one_and_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_cpu = replace(SETTINGS, platform="cpu")
    with pytest.raises(SettingsError, match="SGLANG_PLATFORM='x' names another one"):
        find(on_cpu, {"SGLANG_PLATFORM": "x"})
    monkeypatch.setattr(hardware, "entry_points", lambda group: type("None_", (), {"names": ()})())
    with pytest.raises(SettingsError, match="the CPU platform is not installed: pip install"):
        find(on_cpu)


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
    assert environment["CUDA_VISIBLE_DEVICES"] == ""
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
