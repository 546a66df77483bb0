"""The hardware of each engine: its GPUs, its cores, and what is rejected."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from msgspec.structs import replace

from sgl_ext.node import hardware
from sgl_ext.node.hardware import (
    CPU_PLATFORM,
    Hardware,
    Listed,
    Seen,
    ask_torch,
    gpus_of_engine,
    list_devices,
)
from sgl_ext.settings.schema import (
    EngineSettings,
    LaunchSettings,
    Model,
    SettingsError,
    Tenant,
)

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


@pytest.mark.parametrize(
    ("tp", "flags", "count", "shown"),
    [
        (1, "", 1, "tp=1"),
        (2, "--pp-size 2", 4, "tp=2 x pp=2"),
        (2, "--pipeline-parallel-size=2 --data-parallel-size 3", 12, "tp=2 x pp=2 x dp=3"),
        (1, "--dp 2", 2, "tp=1 x dp=2"),
        (1, "--no-such-flag", 1, "tp=1"),
        (4, "--attn-dp-size 4 --attn-cp-size 2 --ep-size 4 --moe-dp-size 2", 4, "tp=4"),
        (4, "--dp-size 4 --enable-dp-attention", 4, "tp=4"),
        (8, "--nnodes 2 --node-rank 0", 4, "tp=8 on nnodes=2"),
        (2, "--gpu-id-step 2 --base-gpu-id 1", 4, "tp=2, --base-gpu-id 1, --gpu-id-step 2"),
        (1, "--pp-size 2 --pp-size 4", 4, "tp=1 x pp=4"),
        (1, "--dp-size 2 --data-parallel-size 2", 2, "tp=1 x dp=2"),
    ],
)
def test_every_process_of_sglang_counts(tp: int, flags: str, count: int, shown: str) -> None:
    settings = LaunchSettings(model_path="m", tp=tp, engine_args=tuple(flags.split()))
    assert gpus_of_engine(settings) == (count, shown)


def test_two_names_that_disagree_are_refused_by_name() -> None:
    flags = ("--pp-size", "2", "--pipeline-parallel-size", "4")
    with pytest.raises(SettingsError, match="--pp-size=2 and --pipeline-parallel-size=4: two name"):
        gpus_of_engine(LaunchSettings(model_path="m", engine_args=flags))
    with pytest.raises(SettingsError, match="the launcher's own setting is tp"):
        gpus_of_engine(LaunchSettings(model_path="m", engine_args=("--tensor-parallel", "2")))


MIG = """GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-0a)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-1a)
  MIG 3g.20gb     Device  0: (UUID: MIG-b1)
  MIG 4g.20gb     Device  1: (UUID: MIG-b2)
GPU 2: NVIDIA A100-SXM4-40GB (UUID: GPU-2a)
  MIG 7g.40gb     Device  0: (UUID: MIG-c1)
GPU 3: NVIDIA A100-SXM4-40GB (UUID: GPU-3a)
"""
PROGRAMS = {
    "two": "echo 'GPU 0: NVIDIA H100 (UUID: GPU-a)'; echo 'GPU 1: NVIDIA H100 (UUID: GPU-b)'",
    "mig": f"cat <<'END'\n{MIG}END",
    "none": "echo No devices found.",
    "failing": "echo 'NVIDIA-SMI has failed: no communication with the driver.'; exit 9",
    "slow": "exec sleep 60",
}


def listed(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Listed:
    if name in PROGRAMS:
        program = folder / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{PROGRAMS[name]}\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return list_devices(0.1 if name == "slow" else 30)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("two", Listed(("0", "1"))),
        ("mig", Listed(("0", "MIG-b1", "MIG-b2", "MIG-c1", "3"))),
        ("none", Listed()),
        ("absent", Listed(problem="nvidia-smi is not installed")),
        ("slow", Listed(problem="nvidia-smi -L gave no answer in 0.1 s")),
        (
            "failing",
            Listed(
                problem="nvidia-smi -L ended with status 9: "
                "NVIDIA-SMI has failed: no communication with the driver."
            ),
        ),
    ],
)
def test_what_it_lists(
    name: str, wanted: Listed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert listed(name, tmp_path, monkeypatch) == wanted


@pytest.mark.long
def test_torch_is_asked_in_a_process_of_its_own() -> None:
    seen = ask_torch({**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    assert (seen.count, seen.problem) == (0, "")
    assert seen.version
    assert "no GPU" in seen.build or "CUDA" in seen.build


def test_a_torch_that_cannot_be_imported_is_named(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13: not found')")
    seen = ask_torch({**os.environ, "PYTHONPATH": str(tmp_path)})
    assert seen.problem == "torch cannot be imported: ImportError: libcudart.so.13: not found"
    assert "within 0.001 s" in ask_torch(os.environ, 0.001).problem


def of_models(*models: Model) -> LaunchSettings:
    return LaunchSettings(model_path="m", models=models)


def divided(found: Hardware, *models: Model) -> dict[str, tuple[str, ...]]:
    parts = hardware.divide(of_models(*models), found)
    return {settings.model_name: own.gpus for settings, own in parts}


def test_models_get_the_gpus_that_they_name_and_the_others_those_that_are_left() -> None:
    eight = Hardware(tuple("01234567"))
    large = Model(name="large", path="m", instances=2, tp=2)
    small, other = Model(name="small", path="m", gpus="1,4"), Model(name="other", path="m")
    found = divided(eight, large, replace(small, instances=2), Model(name="far"), other)
    assert found == {"large": ("0", "2", "3", "5"), "small": ("1", "4"), "other": ("6",)}


@pytest.mark.parametrize(
    ("models", "message"),
    [
        ((Model(name="a", path="m", gpus="9"),), "a: gpus: no GPU 9; there are 0, 1"),
        ((Model(name="a", path="m", tp=4),), "a: instances=1: with tp=4 this needs 4 GPUs"),
        (
            (Model(name="a", path="m", tp=2), Model(name="b", path="m")),
            "b: no GPU is left for its engines",
        ),
        ((Model(name="a", path="m", gpus="0", tp=2),), "a: instances=1: with tp=2 this needs 2"),
    ],
)
def test_too_few_gpus_of_a_model_are_an_error_with_its_name(
    models: tuple[Model, ...], message: str
) -> None:
    with pytest.raises(SettingsError, match=re.escape(message)):
        divided(Hardware(("0", "1")), *models)


def test_the_engines_of_all_models_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("SGLANG_CPU_OMP_THREADS_BIND", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    models = Model(name="a", path="m", instances=3), Model(name="b", path="m")
    for settings, own in hardware.divide(of_models(*models), Hardware((), CPU_PLATFORM)):
        environment = hardware.engine_environment(settings, own, 0)
        assert environment["OMP_NUM_THREADS"] == "2"


def test_gpus_on_a_cpu_are_refused() -> None:
    with pytest.raises(SettingsError, match="no GPU 0; there are none: engines run on the CPU"):
        divided(Hardware((), CPU_PLATFORM), Model(name="a", path="m", gpus="0"))
