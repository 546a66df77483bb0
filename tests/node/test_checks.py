"""The model's path, and how `tp` divides it."""

from __future__ import annotations

import json
import os
import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from sgl_ext.node import checks
from sgl_ext.node.checks import (
    ENGINE_BYTES,
    check_disks,
    check_gpus,
    check_host_pools,
    check_memory,
    check_model,
    check_shared_tier,
    free_memory,
    open_shared_tier,
    parsed_gpu_memory,
)
from sgl_ext.node.hardware import CPU_PLATFORM, Hardware, engine_command
from sgl_ext.settings.schema import LaunchSettings, SettingsError
from sgl_ext.settings.shared_tier import FOLDER_VARIABLE, read_tier
from sgl_ext.settings.sources import launch_settings


@pytest.fixture(autouse=True)
def _no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "models" / "tiny"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"num_attention_heads": 12}')
    return folder


def check(path: Path | str, *argv: str, tp: int = 1) -> str:
    return check_model(LaunchSettings(model_path=str(path), tp=tp, engine_args=argv))


def refusal(path: Path | str, *argv: str, tp: int = 1) -> str:
    with pytest.raises(SettingsError) as refused:
        check(path, *argv, tp=tp)
    return str(refused.value)


def test_a_folder_with_a_model_passes(model: Path) -> None:
    assert check(model) == ""


def test_a_path_that_does_not_exist_says_so_in_one_line(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert refusal("/nope/x") == "model_path='/nope/x': does not exist"
    near = refusal(model.parent / "tny")
    assert near.endswith(f"tny': does not exist; did you mean {model}?")
    assert refusal("models/tny").endswith("did you mean models/tiny?")
    monkeypatch.setenv("HOME", str(model.parent))
    assert refusal("~/tiny").endswith(f"does not exist; did you mean {model}?")
    assert refusal("two words") == "model_path='two words': does not exist"


def test_a_folder_without_a_model_or_with_a_part_of_it_is_refused(model: Path) -> None:
    assert "has no config.json" in refusal(model.parent)
    files = {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-2.safetensors"}
    index = json.dumps({"weight_map": files})
    (model / "model.safetensors.index.json").write_text(index)
    (model / "model-1.safetensors").touch()
    assert "1 of 2 weight files are missing, as model-2.safetensors" in refusal(model)


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"]
)
def test_a_file_of_the_model_that_is_no_json_is_named(model: Path, name: str) -> None:
    (model / name).write_text('{"version": ')
    said = refusal(model)
    assert f": {name} is not valid JSON, as if it was cut off or edited: " in said
    assert "line 1 column 13" in said


def test_a_model_without_a_tokenizer_is_refused_unless_it_has_another(model: Path) -> None:
    (model / "model.safetensors").touch()
    assert "the folder has no tokenizer" in refusal(model)
    assert check(model, "--tokenizer-path", "/models/other") == ""
    assert check(model, "--skip-tokenizer-init") == ""
    (model / "qwen.tiktoken").touch()
    assert check(model) == ""


def test_a_hub_name_says_what_will_happen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    note = check("Qwen/Qwen3-32B")
    assert note.startswith("model_path='Qwen/Qwen3-32B': is no folder here, so the engines down")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "HF_HUB_OFFLINE is set" in refusal("Qwen/Qwen3-32B")
    cached = tmp_path / "hub" / "models--Qwen--Qwen3-32B" / "snapshots" / "1"
    cached.mkdir(parents=True)
    (cached / "config.json").write_text("{}")
    assert check("Qwen/Qwen3-32B") == ""
    assert check("s3://bucket/model") == ""


def test_tp_must_divide_the_attention_heads(model: Path) -> None:
    assert check(model, tp=4) == ""
    assert refusal(model, tp=5) == (
        "tp=5: the model has 12 attention heads, so tp must be one of 1, 2, 3, 4, 6, 12"
    )
    assert check(model, "--enable-dp-attention", tp=5) == ""


MIB, GIB = 1 << 20, 1 << 30
CPU = Hardware((), CPU_PLATFORM)
Usage = namedtuple("Usage", "free")


def disk(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(free))


def sized_model(folder: Path, size: int, dtype: str = "bfloat16") -> Path:
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
    assert "has 1 GiB free, and logs and the store may grow to 2 GiB" in check_disks(settings)
    disk(monkeypatch, 3 * MIB)
    with pytest.raises(SettingsError, match=r"3 MiB free; logs and the store need 32 MiB at least"):
        check_disks(settings)


def test_engines_that_memory_does_not_hold_are_refused(tmp_path: Path) -> None:
    folder = str(sized_model(tmp_path / "m", 2 * GIB))
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
    monkeypatch.setattr(checks, "free_gpu_memory", lambda: free)
    folder = str(sized_model(tmp_path / "m", 4 * GIB))
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


HOST = "--enable-hierarchical-cache"


def settings(*argv: str, size: int = GIB, host: str = HOST) -> LaunchSettings:
    given = ["--model-path", "m", "--shared-tier-bytes", str(size), *argv]
    return launch_settings([*given, *filter(None, [host])])


def test_without_it_engines_get_no_flags_and_there_is_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    without = settings(size=0, host="")
    assert not [word for word in engine_command(without, Hardware(()), 1) if "hicache" in word]
    open_shared_tier(without, tmp_path)
    assert FOLDER_VARIABLE not in os.environ
    check_shared_tier(without, tmp_path / "missing")


def test_every_engine_is_given_the_same_folder_with_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, "")
    check_shared_tier(settings(), tmp_path)
    open_shared_tier(settings(), tmp_path)
    (folder,) = tmp_path.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    policy = ("--hicache-storage-prefetch-policy", "wait_complete")
    command = engine_command(settings(*policy, host=HOST), Hardware(()), 1)
    assert HOST in command
    last = len(command) - 1 - command[::-1].index(policy[0])
    assert command[last + 1] == policy[1], "the user's flags come last and win"
    extra = command[command.index("--hicache-storage-backend-extra-config") + 1]
    assert read_tier(json.loads(extra)) == (folder, GIB)


def test_the_folder_of_a_launcher_that_was_killed_is_removed_by_the_next(tmp_path: Path) -> None:
    left = tmp_path / "sgl-ext-tier-left"
    left.mkdir(mode=0o700)
    (left / "lock").touch()
    (left / "kv").mkdir()
    check_shared_tier(settings(), tmp_path)
    assert not left.exists()


def test_a_tier_without_room_is_refused_with_the_numbers(tmp_path: Path) -> None:
    with pytest.raises(
        SettingsError, match=rf"^shared_tier_bytes={1 << 60}: {tmp_path} has .* free"
    ):
        check_shared_tier(settings(size=1 << 60), tmp_path)
    with pytest.raises(SettingsError, match=r"missing: No such file"):
        check_shared_tier(settings(), tmp_path / "missing")
    two, gpus = settings("--instances", "2"), Hardware(("0", "1"))
    check_memory(two, gpus, free=2 * ENGINE_BYTES + GIB)
    with pytest.raises(SettingsError, match=r"^shared_tier_bytes=1073741824: 4 GiB .* less 3 GiB"):
        check_memory(two, gpus, free=2 * ENGINE_BYTES + GIB - 1)


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["--hicache-storage-backend", "file"], "--hicache-storage-backend=file"),
        (["--radix-cache-backend", "radix"], "--radix-cache-backend=radix"),
        (["--hicache-host-memory-mode", "buffer_only"], "--hicache-host-memory-mode=buffer_only"),
        (["--ray-address", "auto", "--engine-secret", "env:SECRET"], "engines on Ray"),
        (["--tenant-isolation", "on", "--shared-prefixes", "share.jsonl"], "shared_prefixes"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_contradicts_it_is_refused_by_name(
    argv: list[str], problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SECRET", "0123456789abcdef")
    Path("share.jsonl").touch()
    with pytest.raises(SettingsError, match=rf"^shared_tier_bytes={GIB}: .*{problem}"):
        check_shared_tier(settings(*argv), tmp_path)


def test_a_budget_without_host_pools_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=rf"^shared_tier_bytes={GIB}: .*; add {HOST}$"):
        check_shared_tier(settings(host=""), tmp_path)
    check_shared_tier(settings(host="--enable-hicache"), tmp_path)


def test_host_pools_and_the_tier_must_fit_memory_together() -> None:
    gpu = Hardware(("0",))
    pools = settings("--hicache-size", "20")
    need = 20 * 10**9 + 10 * GIB + GIB  # with what SGLang leaves free
    assert check_host_pools(pools, gpu, free=need) == ""
    with pytest.raises(SettingsError, match=r"^--hicache-size=20: .* the engines share 1 GiB: at"):
        check_host_pools(pools, gpu, free=need - 1)


def test_a_size_that_is_meant_in_gigabytes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"^shared_tier_bytes=8: must be 0, or at least"):
        check_shared_tier(settings(size=8), tmp_path)


def on_disk(folder: Path, *argv: str, size: int = GIB) -> LaunchSettings:
    tier = ["--disk-tier", str(folder), "--disk-tier-bytes", str(size)]
    return launch_settings(["--model-path", "m", *tier, HOST, *argv])


def test_a_disk_tier_is_the_operators_folder_and_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, "")
    monkeypatch.chdir(tmp_path)
    for folder in (tmp_path / "tier", Path("relative")):
        check_shared_tier(on_disk(folder))
        open_shared_tier(on_disk(folder))
        assert Path(os.environ[FOLDER_VARIABLE]) == tmp_path / folder
        assert (tmp_path / folder).stat().st_mode & 0o777 == 0o700
    command = engine_command(on_disk(tmp_path / "tier"), Hardware(()), 1)
    extra = command[command.index("--hicache-storage-backend-extra-config") + 1]
    assert read_tier(json.loads(extra), {FOLDER_VARIABLE: "x"}) == (Path("x"), GIB)


@pytest.mark.parametrize("tier", ["disk_tier_bytes", "shared_tier_bytes"])
@pytest.mark.parametrize(
    ("page", "warned"),
    [
        ((), "without --page-size most models have 1: "),
        (("--page-size", "1"), "--page-size is 1: "),
        (("--page-size=16",), ""),
    ],
)
def test_a_tier_of_small_pages_is_warned_of_with_its_cure(
    tmp_path: Path, tier: str, page: tuple[str, ...], warned: str
) -> None:
    node = on_disk(tmp_path / "tier", *page) if "disk" in tier else settings(*page)
    said = check_shared_tier(node, tmp_path)
    assert said.startswith(f"{tier}={GIB}: {warned}" if warned else "")
    assert said.endswith("; set --page-size 64 (docs/guide/pins.md)" if warned else "")


def test_a_disk_tier_that_cannot_be_is_refused_by_name(tmp_path: Path) -> None:
    free = rf"^disk_tier_bytes={1 << 60}: {tmp_path}/tier has .* free"
    with pytest.raises(SettingsError, match=free):
        check_shared_tier(on_disk(tmp_path / "tier", size=1 << 60))
    with pytest.raises(SettingsError, match=r"^disk_tier_bytes=8: must be 0, or at least"):
        check_shared_tier(on_disk(tmp_path / "tier", size=8))
    with pytest.raises(SettingsError, match=r"leave shared_tier_bytes out"):
        check_shared_tier(on_disk(tmp_path / "tier", "--shared-tier-bytes", str(GIB)))
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o755)
    with pytest.raises(SettingsError, match=r"^disk_tier: .*open: only its owner"):
        check_shared_tier(on_disk(open_to_all))
    for argv, missing in (
        (["--disk-tier", str(tmp_path / "tier")], "disk_tier_bytes"),
        (["--disk-tier-bytes", str(GIB)], "disk_tier"),
    ):
        with pytest.raises(SettingsError, match=rf": give {missing}, too$"):
            check_shared_tier(launch_settings(["--model-path", "m", HOST, *argv]))
