"""The hardware for engines: the devices of the node, and each engine's command and environment.

`gpus_of_engine` counts the GPUs of this node that one engine takes, by the launcher's `tp` and
SGLang's flags. SGLang runs a process on each GPU: `tp` x `pp` for each of `dp` replicas. Attention
data parallelism (`--attn-dp-size`, or `--dp-size` with the older `--enable-dp-attention`), context
and expert parallelism divide the ranks of `tp`, so they add none.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import NamedTuple

from msgspec import Struct

from sgl_ext.node.flags import sizes_given
from sgl_ext.settings.schema import LaunchSettings, SettingsError, Unavailable
from sgl_ext.settings.shared_tier import tier_flags
from sgl_ext.settings.sources import gpu_names

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
LIMIT_S = 30.0
"""A driver without its persistence daemon takes many seconds for its first answer."""
TORCH_LIMIT_S = 120.0


class Hardware(NamedTuple):
    """The devices for engines: ids of GPUs or MIG slices, or the name of an SGLang platform.

    reason: what was chosen, and why, in a line for people. variable: the one that gives an engine
    its devices. ranks: of all engines that share the CPU's cores; 0: those of one model.
    """

    gpus: tuple[str, ...]
    platform: str | None = None
    reason: str = ""
    variable: str = _CUDA
    ranks: int = 0


class EngineGpus(NamedTuple):
    """The GPUs of an engine on this node. shown: the sizes whose product they are."""

    gpus: int
    shown: str


class Listed(NamedTuple):
    """The devices that CUDA_VISIBLE_DEVICES can name.

    ids: indices of GPUs, and UUIDs of MIG slices in place of a GPU that is divided.
    problem: why nvidia-smi did not answer; "" if it did.
    """

    ids: tuple[str, ...] = ()
    problem: str = ""


class Seen(Struct, frozen=True):
    """What torch says.

    cuda, hip: the versions that it is built for. warning: why it uses no GPU, as far as it says.
    problem: why it says nothing.
    """

    count: int = 0
    version: str = ""
    cuda: str | None = None
    hip: str | None = None
    warning: str = ""
    problem: str = ""

    @property
    def build(self) -> str:
        """Its version, and what it is built for."""
        kind = f"CUDA {self.cuda}" if self.cuda else f"ROCm {self.hip}" if self.hip else "no GPU"
        return f"torch {self.version}, built for {kind}"


def list_devices(limit_s: float = LIMIT_S) -> Listed:
    """The node's devices as nvidia-smi lists them."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return Listed(problem="nvidia-smi is not installed")
    try:
        answer = subprocess.run(
            [program, "-L"], capture_output=True, text=True, timeout=limit_s, errors="replace"
        )
    except subprocess.TimeoutExpired:
        return Listed(problem=f"nvidia-smi -L gave no answer in {limit_s:g} s")
    except OSError as error:
        return Listed(problem=f"nvidia-smi cannot be run: {error.strerror}")
    if answer.returncode:
        said = " ".join((answer.stderr + answer.stdout).split())[:300]
        return Listed(problem=f"nvidia-smi -L ended with status {answer.returncode}: {said}")
    return Listed(parsed_devices(answer.stdout))


_GPU = re.compile(r"GPU (\d+):")
_SLICE = re.compile(r"\s+MIG .*\(UUID: (MIG-[^)]+)\)")


def parsed_devices(text: str) -> tuple[str, ...]:
    """The devices in the output of `nvidia-smi -L`."""
    ids: list[str] = []
    for line in text.splitlines():
        if found := _GPU.match(line):
            whole = found[1]
            ids.append(whole)
        elif (found := _SLICE.match(line)) and ids:
            if ids[-1] == whole:
                ids.pop()
            ids.append(found[1])
    return tuple(ids)


_QUESTION = """
import json, warnings
with warnings.catch_warnings(record=True) as heard:
    warnings.simplefilter("always")
    import torch
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
print(json.dumps({
    "count": count,
    "version": torch.__version__,
    "cuda": torch.version.cuda,
    "hip": torch.version.hip,
    "warning": " ".join(str(one.message) for one in heard if "CUDA" in str(one.message)),
}))
"""


def ask_torch(environ: Mapping[str, str], limit_s: float = TORCH_LIMIT_S) -> Seen:
    """What torch sees of the GPUs that these variables leave visible."""
    command = [sys.executable, "-c", _QUESTION]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=limit_s, env=dict(environ)
        )
    except subprocess.TimeoutExpired:
        return Seen(problem=f"torch found no GPU within {limit_s:g} s")
    if answer.returncode:
        last = (answer.stderr.strip().splitlines() or [f"status {answer.returncode}"])[-1]
        return Seen(problem=f"torch cannot be imported: {last}")
    return Seen(**json.loads(answer.stdout.splitlines()[-1]))


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
        raise Unavailable(_no_gpu(listed, seen, given))
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
        raise Unavailable(
            f"instances={settings.instances}: with {each.shown} this needs {needed} GPUs, "
            f"but only {found} are visible"
        )
    if each.gpus > 1 and any(map(_is_slice, hardware.gpus[:needed])):
        raise SettingsError(
            f"{each.shown}: an engine needs {each.gpus} GPUs, and CUDA gives a process one MIG "
            "slice; keep it at 1, or name whole GPUs in CUDA_VISIBLE_DEVICES"
        )


def divide(settings: LaunchSettings, found: Hardware) -> list[tuple[LaunchSettings, Hardware]]:
    """The engines' settings of each model, with the devices for them.

    Models get the GPUs that they name, and the others those that are left, in order. Raises
    SettingsError for a GPU that is not there, and for too few.
    """
    parts = settings.of_models
    if len(parts) == 1 and not settings.models:
        check_capacity(settings, found)
        return [(settings, found)]
    named = {model.name: gpu_names(model.gpus) for model in settings.models}
    taken = [gpu for gpus in named.values() for gpu in gpus]
    for name, gpus in named.items():
        if missing := [gpu for gpu in gpus if gpu not in found.gpus]:
            there = ", ".join(found.gpus) or "none: engines run on the CPU"
            raise Unavailable(f"[[models]] {name}: gpus: no GPU {missing[0]}; there are {there}")
    left = [gpu for gpu in found.gpus if gpu not in taken]
    ranks = sum(one.instances * gpus_of_engine(one).gpus for one in parts)
    divided = []
    for one in parts:
        own = named[one.served_name]
        if found.gpus and not own:
            count = one.instances * gpus_of_engine(one).gpus
            own, left = left[:count], left[count:]
        part = found._replace(gpus=tuple(own), ranks=ranks)
        try:
            check_capacity(one, part)
            if found.gpus and not own:
                raise Unavailable("no GPU is left for its engines")
        except SettingsError as error:
            raise type(error)(f"[[models]] {one.served_name}: {error}") from None
        divided.append((one, part))
    return divided


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
    command += tier_flags(settings.tier_bytes)
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
        environment |= NO_GPUS | _cores_of(settings, index, hardware.ranks)
    return environment


def _cores_of(settings: LaunchSettings, index: int, ranks: int = 0) -> dict[str, str]:
    """The threads of engine `index`: engines that compete for cores slow each other down."""
    cores = os.cpu_count() or 1
    ranks = ranks or settings.instances * gpus_of_engine(settings).gpus
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


_TP, _PP, _DP, _NODES = "--tp-size", "--pp-size", "--dp-size", "--nnodes"
_FIRST, _STEP = "--base-gpu-id", "--gpu-id-step"
_READ = (_TP, _PP, _DP, _NODES, _FIRST, _STEP)
_DP_IN_TP = "--enable-dp-attention"


def gpus_of_engine(settings: LaunchSettings) -> EngineGpus:
    """The GPUs that each engine of these settings takes. Raises SettingsError if a size is given
    under two names that disagree."""
    given = sizes_given(settings.engine_args, _READ)
    if _TP in given:
        raise SettingsError(f"[engine] {_TP}={given[_TP]}: the launcher's own setting is tp")
    if _DP_IN_TP in settings.engine_args:
        given.pop(_DP, None)
    sizes = {"tp": settings.tp, "pp": given.get(_PP, 1), "dp": given.get(_DP, 1)}
    shown = " x ".join(f"{name}={size}" for name, size in sizes.items() if size > 1 or name == "tp")
    count = sizes["tp"] * sizes["pp"] * sizes["dp"]
    if (nodes := given.get(_NODES, 1)) > 1:
        count, shown = -(-count // nodes), f"{shown} on nnodes={nodes}"
    # SGLang counts from the first, and may leave some out.
    first, step = given.get(_FIRST, 0), given.get(_STEP, 1)
    if (first, step) != (0, 1):
        count, shown = first + (count - 1) * step + 1, f"{shown}, {_FIRST} {first}, {_STEP} {step}"
    return EngineGpus(count, shown)
