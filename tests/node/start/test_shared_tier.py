"""The folder of the tier that a node's engines share, and what is refused with it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from sgl_ext.node.hardware import Hardware, engine_command
from sgl_ext.node.start.room import ENGINE_BYTES, check_host_pools, check_memory
from sgl_ext.node.start.shared_tier import check_shared_tier, open_shared_tier
from sgl_ext.settings.schema import LaunchSettings, SettingsError
from sgl_ext.settings.shared_tier import FOLDER_VARIABLE, read_tier
from sgl_ext.settings.sources import launch_settings

GIB = 1 << 30


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
