"""How many GPUs of this node one engine takes, by the launcher's `tp` and SGLang's flags.

SGLang runs a process on each GPU: `tp` x `pp` for each of `dp` replicas. Attention data parallelism
(`--attn-dp-size`, or `--dp-size` with the older `--enable-dp-attention`), context and expert
parallelism divide the ranks of `tp`, so they add none.
"""

from typing import NamedTuple

from sgl_ext.node.start.flags import sizes_given
from sgl_ext.settings.schema import LaunchSettings, SettingsError

_TP, _PP, _DP, _NODES = "--tp-size", "--pp-size", "--dp-size", "--nnodes"
_FIRST, _STEP = "--base-gpu-id", "--gpu-id-step"
_READ = (_TP, _PP, _DP, _NODES, _FIRST, _STEP)
_DP_IN_TP = "--enable-dp-attention"


class EngineGpus(NamedTuple):
    """The GPUs of an engine on this node. shown: the sizes whose product they are."""

    gpus: int
    shown: str


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
