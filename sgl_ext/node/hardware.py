"""Finds the hardware for engines, and makes the command line and environment of each."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import NamedTuple

from sgl_ext.settings.schema import LaunchSettings, SettingsError

CPU_PLATFORM = "sgl_ext_cpu"
_RANK_CORES = "SGLANG_CPU_OMP_THREADS_BIND"
# How often an idle OpenMP thread looks for work before it releases its core. By default it spins
# for milliseconds, which delays the first tokens of a server on the same core.
_SPINS, _FEW_SPINS = "GOMP_SPINCOUNT", "30000"
# SGLang's default pool takes most of the memory; CUDA graphs and the warm-up are for GPUs.
_CPU_DEFAULTS = (
    *("--max-total-tokens", "131072", "--max-running-requests", "32", "--skip-server-warmup"),
    *("--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled"),
)


class Hardware(NamedTuple):
    """The devices for engines: CUDA device ids, or the name of an SGLang platform."""

    gpus: tuple[str, ...]
    platform: str | None = None


def find_hardware(environ: Mapping[str, str] = os.environ) -> Hardware:
    """The visible GPUs, or the CPU platform if there is none.

    SGLANG_PLATFORM overrides both. Raises SettingsError if there is neither a GPU nor the CPU
    platform.
    """
    if platform := environ.get("SGLANG_PLATFORM"):
        return Hardware((), platform)
    if gpus := _visible_gpus(environ):
        return Hardware(gpus)
    if CPU_PLATFORM in entry_points(group="sglang.srt.platforms").names:
        return Hardware((), CPU_PLATFORM)
    raise SettingsError(
        "no GPU found, and no CPU platform is installed: pip install 'sgl-ext[cpu]' (docs/cpu.md)"
    )


def cluster_platform(*, has_gpus: bool, environ: Mapping[str, str] = os.environ) -> str | None:
    """The platform of engines on a cluster; None for GPUs.

    SGLANG_PLATFORM overrides what the cluster has. Without GPUs it is the CPU platform, if that is
    installed here.
    """
    if platform := environ.get("SGLANG_PLATFORM"):
        return platform
    has_cpu_platform = CPU_PLATFORM in entry_points(group="sglang.srt.platforms").names
    return CPU_PLATFORM if has_cpu_platform and not has_gpus else None


def check_capacity(settings: LaunchSettings, hardware: Hardware) -> None:
    """Raises SettingsError if the engines need more GPUs than there are."""
    needed = settings.instances * settings.tp
    if hardware.gpus and needed > len(hardware.gpus):
        raise SettingsError(
            f"instances={settings.instances}: with tp={settings.tp} this needs {needed} GPUs, "
            f"but only {len(hardware.gpus)} are visible"
        )


def engine_command(settings: LaunchSettings, hardware: Hardware, port: int) -> list[str]:
    """The command line of one engine. SGLang's flags from the user come last and win."""
    command = [sys.executable, "-m", "sgl_ext.engine.serve", "--model-path", settings.model_path]
    command += ["--served-model-name", settings.model_name]
    command += ["--host", settings.engine_host, "--port", str(port)]
    command += ["--enable-cache-report", "--enable-metrics", "--log-level-http", "warning"]
    if settings.balancer.log_level != "info":  # SGLang's own default
        command += ["--log-level", settings.balancer.log_level]
    if settings.tp > 1:
        command += ["--tp-size", str(settings.tp)]
    if hardware.platform == CPU_PLATFORM:
        command += _CPU_DEFAULTS
    return [*command, *settings.engine_args]


def engine_environment(settings: LaunchSettings, hardware: Hardware, index: int) -> dict[str, str]:
    """What engine `index` gets in addition to the launcher's own environment."""
    environment = settings.engine.to_environment()
    if hardware.gpus:
        mine = hardware.gpus[index * settings.tp : (index + 1) * settings.tp]
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(mine)
    if hardware.platform:
        environment["SGLANG_PLATFORM"] = hardware.platform
    if hardware.platform == CPU_PLATFORM:
        environment |= _cores_of(settings, index)
    return environment


def _cores_of(settings: LaunchSettings, index: int) -> dict[str, str]:
    """The threads of engine `index`: engines that compete for cores slow each other down."""
    cores, ranks = os.cpu_count() or 1, settings.instances * settings.tp
    waiting = {} if {_SPINS, "OMP_WAIT_POLICY"} & os.environ.keys() else {_SPINS: _FEW_SPINS}
    if {"OMP_NUM_THREADS", _RANK_CORES} & os.environ.keys():
        return waiting
    each = max(1, cores // ranks)
    if settings.tp == 1:
        return {**waiting, "OMP_NUM_THREADS": str(each)}
    firsts = (rank * each % cores for rank in range(index * settings.tp, (index + 1) * settings.tp))
    return {**waiting, _RANK_CORES: "|".join(f"{first}-{first + each - 1}" for first in firsts)}


def _visible_gpus(environ: Mapping[str, str]) -> tuple[str, ...]:
    named = environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return tuple(part.strip() for part in named.split(",") if part.strip() not in ("", "-1"))
    nvidia_smi = shutil.which("nvidia-smi")
    if nvidia_smi is None:
        return ()
    listed = subprocess.run([nvidia_smi, "-L"], capture_output=True, text=True, timeout=60)
    lines = [line for line in listed.stdout.splitlines() if line.startswith("GPU ")]
    return tuple(str(index) for index in range(len(lines)))
