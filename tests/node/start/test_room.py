"""Whether disks, memory and GPUs have room."""

from __future__ import annotations

import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from sgl_ext.node.hardware import CPU_PLATFORM, Hardware
from sgl_ext.node.start import room
from sgl_ext.node.start.room import (
    ENGINE_BYTES,
    check_disks,
    check_gpus,
    check_host_pools,
    check_memory,
    free_memory,
    parsed_gpu_memory,
)
from sgl_ext.settings.schema import LaunchSettings, SettingsError

MIB, GIB = 1 << 20, 1 << 30
CPU = Hardware((), CPU_PLATFORM)
Usage = namedtuple("Usage", "free")


def disk(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(free))


def model(folder: Path, size: int, dtype: str = "bfloat16") -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(f'{{"dtype": "{dtype}"}}')
    with (folder / "model.safetensors").open("wb") as file:
        file.truncate(size)  # without blocks on the disk
    return folder


def test_a_full_disk_is_refused_and_a_small_one_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = LaunchSettings(model_path="m", log_dir=str(tmp_path / "new" / "logs"))
    disk(monkeypatch, 1 << 40)
    assert check_disks(settings) == ""
    disk(monkeypatch, GIB)
    assert "has 1 GiB free, and logs and the store may grow to 1.75 GiB" in check_disks(settings)
    disk(monkeypatch, 3 * MIB)
    with pytest.raises(SettingsError, match=r"3 MiB free; logs and the store need 32 MiB at least"):
        check_disks(settings)


def test_engines_that_memory_does_not_hold_are_refused(tmp_path: Path) -> None:
    folder = str(model(tmp_path / "m", 2 * GIB))
    many = LaunchSettings(model_path=folder, instances=3)
    # On the CPU the weights, as float32; on GPUs the processes alone.
    check_memory(many, CPU, free=3 * (4 * GIB + ENGINE_BYTES))
    with pytest.raises(SettingsError, match=r"instances=3: .*4 GiB of weights.*enough for 2"):
        check_memory(many, CPU, free=3 * (4 * GIB + ENGINE_BYTES) - 1)
    check_memory(many, Hardware(("0", "1", "2")), free=3 * ENGINE_BYTES)
    with pytest.raises(SettingsError, match="instances=3"):
        check_memory(many, Hardware(("0", "1", "2")), free=2 * ENGINE_BYTES)


def test_a_gpu_without_room_for_its_part_of_the_weights_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = parsed_gpu_memory(["0, GPU-a, 2048", "1, GPU-b, 1000", "2, GPU-c, [N/A]", ""])
    assert free == {"0": 2048 * MIB, "GPU-a": 2048 * MIB, "1": 1000 * MIB, "GPU-b": 1000 * MIB}
    monkeypatch.setattr(room, "free_gpu_memory", lambda: free)
    folder = str(model(tmp_path / "m", 4 * GIB))
    found = Hardware(("0", "GPU-b"))
    with pytest.raises(SettingsError, match=r"GPU 0 needs 4 GiB .* 2 GiB are free"):
        check_gpus(LaunchSettings(model_path=folder), found)
    with pytest.raises(SettingsError, match=r"GPU GPU-b needs 2 GiB .*tp=2.* 1000 MiB are free"):
        check_gpus(LaunchSettings(model_path=folder, tp=2), found)
    check_gpus(LaunchSettings(model_path=folder, engine_args=("--quantization", "fp8")), found)
    check_gpus(LaunchSettings(model_path=folder, tp=2), Hardware(("GPU-d", "GPU-e")))
    with pytest.raises(SettingsError, match="there is no GPU 7, only 0, 1"):
        check_gpus(LaunchSettings(model_path="m"), Hardware(("7",)))


def test_a_containers_limit_counts_without_files_that_give_way(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:    2097152 kB\n")
    assert free_memory(tmp_path, tmp_path) == 2 * GIB
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text(f"{GIB}\n")
    (tmp_path / "memory.stat").write_text(f"active_file {MIB}\ninactive_file {MIB}\n")
    assert free_memory(tmp_path, tmp_path) == 2 * GIB
    (tmp_path / "memory.max").write_text(f"{GIB + 5 * MIB}\n")
    assert free_memory(tmp_path, tmp_path) == 7 * MIB
    assert free_memory(tmp_path / "none", tmp_path / "none") is None


def with_host_cache(*flags: str, **settings: int) -> LaunchSettings:
    argv = ("--enable-hierarchical-cache", *flags)
    return LaunchSettings(model_path="m", engine_args=argv, **settings)


def test_host_pools_that_memory_does_not_hold_are_refused_with_the_largest_that_fit() -> None:
    gpus, gb = Hardware(tuple("01234567")), 10**9
    settings = with_host_cache("--hicache-size", "100", instances=4, tp=2)
    assert check_host_pools(settings, gpus, free=800 * gb + 10 * GIB) == ""
    least = r"--hicache-size=100: 8 host pools need 745 GiB .*leaves 10 GiB: at most 99"
    with pytest.raises(SettingsError, match=least):
        check_host_pools(settings, gpus, free=800 * gb + 10 * GIB - 1)
    one = with_host_cache("--hicache-size", "1")
    assert check_host_pools(one, CPU, free=gb + GIB) == ""
    with pytest.raises(SettingsError, match=r"leaves 1 GiB: at most 0"):
        check_host_pools(one, CPU, free=GIB // 2)
    off = LaunchSettings(model_path="m", engine_args=("--hicache-size", "100"))
    assert check_host_pools(off, gpus, free=0) == ""


def test_engines_that_would_all_count_the_same_free_memory_are_named() -> None:
    gpus = Hardware(tuple("01"))
    assert "instances=2: each sizes its host pool" in check_host_pools(
        with_host_cache(instances=2), gpus, free=GIB
    )
    for flags in (("--hicache-ratio", "2"), ("--hicache-host-memory-fraction", "0.4")):
        assert check_host_pools(with_host_cache(*flags, instances=2), gpus, free=GIB) == ""
    assert check_host_pools(with_host_cache(), gpus, free=GIB) == ""
