"""Finds the hardware for engines, and makes the command line and environment of each."""

import os
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import NamedTuple

from sgl_ext.node.devices.nvidia_smi import Listed, list_devices
from sgl_ext.node.devices.sizes import gpus_of_engine
from sgl_ext.node.devices.torch_probe import Seen, ask_torch
from sgl_ext.settings.schema import LaunchSettings, SettingsError
from sgl_ext.settings.shared_tier import tier_flags

CPU_PLATFORM = "sgl_ext_cpu"
NO_GPUS = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
"""The variables that hide the GPUs from an engine on the CPU, where SGLang would load kernels for
them."""
_CUDA, _HIP = NO_GPUS
_RANK_CORES = "SGLANG_CPU_OMP_THREADS_BIND"
# How often an idle OpenMP thread looks for work before it releases its core. By default it spins
# for milliseconds, which delays the first tokens of a server on the same core.
_SPINS, _FEW_SPINS = "GOMP_SPINCOUNT", "30000"
# SGLang's default pool takes most of the memory; CUDA graphs and the warm-up are for GPUs.
_CPU_DEFAULTS = (
    *("--max-total-tokens", "131072", "--max-running-requests", "32", "--skip-server-warmup"),
    *("--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled"),
)
_SMALL = "For a small model on the CPU: --config cpu, or --platform cpu (docs/start/developer.md)"


class Hardware(NamedTuple):
    """The devices for engines: ids of GPUs or MIG slices, or the name of an SGLang platform.

    reason: what was chosen, and why, in a line for people. variable: the one that gives an engine
    its devices.
    """

    gpus: tuple[str, ...]
    platform: str | None = None
    reason: str = ""
    variable: str = _CUDA


def find_hardware(
    settings: LaunchSettings,
    environ: Mapping[str, str] = os.environ,
    nvidia_smi: Callable[[], Listed] = list_devices,
    torch: Callable[[Mapping[str, str]], Seen] = ask_torch,
) -> Hardware:
    """The devices for the engines of these settings.

    GPUs, unless `platform` or SGLANG_PLATFORM names something else: nothing is used because
    something else is missing. Raises SettingsError if there is no GPU, or none that torch can use.
    """
    if platform := named_platform(settings, environ):
        by = "SGLANG_PLATFORM" if environ.get("SGLANG_PLATFORM") else "platform='cpu'"
        what = "the CPU" if platform == CPU_PLATFORM else f"SGLang's platform {platform!r}"
        return Hardware((), platform, f"engines run on {what}, which {by} names")
    given = next((name for name in (_HIP, _CUDA) if name in environ), None)
    listed = Listed(_ids(environ[given])) if given else nvidia_smi()
    if given and not listed.ids:
        raise SettingsError(f"{given}={environ[given]!r}: it hides all GPUs. {_SMALL}")
    seen = torch(environ)
    if not seen.count or _too_few(listed.ids, seen):
        raise SettingsError(_no_gpu(listed, seen, given))
    gpus = listed.ids or tuple(str(index) for index in range(seen.count))
    by = given or ("nvidia-smi" if listed.ids else "torch")
    count, slices = f"{len(gpus)} GPU{'s' * (len(gpus) > 1)}", sum(map(_is_slice, gpus))
    if slices:
        count += f", {slices} of them MIG slices"
    reason = f"engines run on GPUs: {by} lists {count}; {seen.build}"
    if listed.problem:
        reason += f"; {listed.problem}"
    return Hardware(gpus, None, reason, given or (_HIP if seen.hip else _CUDA))


def named_platform(settings: LaunchSettings, environ: Mapping[str, str] = os.environ) -> str | None:
    """The platform of SGLang that the settings or SGLANG_PLATFORM name; None for GPUs.

    Raises SettingsError if they differ, or if the CPU platform is named and not installed.
    """
    platform = environ.get("SGLANG_PLATFORM") or None
    if settings.platform == "cpu":
        if platform not in (None, CPU_PLATFORM):
            raise SettingsError(f"platform='cpu': SGLANG_PLATFORM={platform!r} names another one")
        platform = CPU_PLATFORM
    if platform == CPU_PLATFORM and CPU_PLATFORM not in _installed_platforms():
        raise SettingsError("the CPU platform is not installed: pip install 'sgl-ext[cpu]'")
    return platform


def check_capacity(settings: LaunchSettings, hardware: Hardware) -> None:
    """Raises SettingsError if the engines need more GPUs than there are, or a part of several."""
    each, found = gpus_of_engine(settings), len(hardware.gpus)
    if not found:
        return
    needed = settings.instances * each.gpus
    if needed > found:
        raise SettingsError(
            f"instances={settings.instances}: with {each.shown} this needs {needed} GPUs, "
            f"but only {found} are visible"
        )
    if each.gpus > 1 and any(map(_is_slice, hardware.gpus[:needed])):
        raise SettingsError(
            f"{each.shown}: an engine needs {each.gpus} GPUs, and CUDA gives a process one MIG "
            "slice; keep it at 1, or name whole GPUs in CUDA_VISIBLE_DEVICES"
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
    command += tier_flags(settings.shared_tier_bytes)
    return [*command, *settings.engine_args]


def engine_environment(settings: LaunchSettings, hardware: Hardware, index: int) -> dict[str, str]:
    """What engine `index` gets in addition to the launcher's own environment."""
    environment = settings.engine.to_environment()
    if hardware.gpus:
        each = gpus_of_engine(settings).gpus
        mine = hardware.gpus[index * each : (index + 1) * each]
        environment[hardware.variable] = ",".join(mine)
    if hardware.platform:
        environment["SGLANG_PLATFORM"] = hardware.platform
    if hardware.platform == CPU_PLATFORM:
        environment |= NO_GPUS | _cores_of(settings, index)
    return environment


def _cores_of(settings: LaunchSettings, index: int) -> dict[str, str]:
    """The threads of engine `index`: engines that compete for cores slow each other down."""
    cores, ranks = os.cpu_count() or 1, settings.instances * gpus_of_engine(settings).gpus
    waiting = {} if {_SPINS, "OMP_WAIT_POLICY"} & os.environ.keys() else {_SPINS: _FEW_SPINS}
    if {"OMP_NUM_THREADS", _RANK_CORES} & os.environ.keys():
        return waiting
    each = max(1, cores // ranks)
    if settings.tp == 1:
        return {**waiting, "OMP_NUM_THREADS": str(each)}
    firsts = (rank * each % cores for rank in range(index * settings.tp, (index + 1) * settings.tp))
    return {**waiting, _RANK_CORES: "|".join(f"{first}-{first + each - 1}" for first in firsts)}


def _no_gpu(listed: Listed, seen: Seen, given: str | None) -> str:
    """Why there is no GPU for the engines, and what to do."""
    if seen.problem:
        return f"{seen.problem}. {_SMALL}"
    if not listed.ids:
        why = listed.problem or "nvidia-smi lists none"
        return f"no GPU found: {why}, and {seen.build}, sees none. {_SMALL}"
    there = f"{given or 'nvidia-smi'} lists {len(listed.ids)}, and {seen.build}, "
    there += f"sees {seen.count or 'none'}"
    if not (seen.cuda or seen.hip):
        do = "install sgl-ext[engine] without the overrides for a CPU (docs/guide/operations.md)"
    else:
        do = "update the driver (docs/guide/operations.md#on-gpus)"
    warning = f" ({seen.warning})" if seen.warning else ""
    return f"GPUs cannot be used: {there}{warning}. What to do: {do}. {_SMALL}"


def _too_few(ids: tuple[str, ...], seen: Seen) -> bool:
    """Whether torch sees fewer GPUs than listed. Of MIG slices it never sees more than one."""
    return seen.count < len(ids) and not any(map(_is_slice, ids))


def _is_slice(gpu: str) -> bool:
    return gpu.startswith("MIG-")


def _ids(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip() not in ("", "-1"))


def _installed_platforms() -> set[str]:
    return entry_points(group="sglang.srt.platforms").names
