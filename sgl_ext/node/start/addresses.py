"""The ports of a node's engines beside their own, and engines that have several machines.

With data-parallel attention, SGLang listens on ports at a fixed distance from an engine's own
(`PortArgs.init_new` and `_broadcast_worker_ports`). So two engines with consecutive ports would
take each other's.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from sgl_ext.node.ports import require_port
from sgl_ext.node.start.flags import values_of
from sgl_ext.settings.schema import LaunchSettings, SettingsError

_ATTENTION_DP = (13, *range(233, 240))
_MEETING = "--dist-init-addr"
_BOOTSTRAP, _BOOTSTRAP_DEFAULT = "--disaggregation-bootstrap-port", 8998
# Each may name a port, or a Unix socket.
_ENDPOINTS = ("--kv-events-config", "--load-publish-endpoint")
# Each names a port on which an engine listens.
_NAMED = (
    *(_MEETING, _BOOTSTRAP, "--nccl-port", "--encoder-bootstrap-port"),
    *("--engine-info-bootstrap-port", "--gated-launch-port", "--smg-http-sidecar-port"),
    *_ENDPOINTS,
)
_SERVE = "python -m sgl_ext.engine.serve"


def ports_beside(engine_args: Sequence[str]) -> tuple[int, ...]:
    """The distances from an engine's port to the further ports that SGLang derives from it."""
    given = values_of(engine_args)
    spreads = given.get("--enable-dp-attention") or given.get("--dwdp-size")
    if not (spreads or given.get("--attn-dp-size", 1) > 1) or _MEETING in given:
        return ()
    return _ATTENTION_DP


def check_addresses(settings: LaunchSettings) -> None:
    """Raises SettingsError for a port that is taken, or that several engines would take, and for an
    engine on several machines that this launcher cannot start."""
    given = values_of(settings.engine_args)
    _check_machines(settings, given)
    if given.get("--disaggregation-mode") == "prefill":
        given = {_BOOTSTRAP: _BOOTSTRAP_DEFAULT} | given
    for flag in _NAMED:
        if flag not in given or (flag in _ENDPOINTS and "tcp:" not in str(given[flag])):
            continue
        if settings.instances > 1:
            reason = "all engines would listen on it; start them by themselves, each with its own"
            shared = f"with instances={settings.instances}, {reason}"
            raise SettingsError(f"{flag}={given[flag]}: {shared}")
        if settings.ray_address is None:
            for port in _ports_of(flag, str(given[flag]), given):
                require_port(port, f"{flag}={given[flag]}")


def why_one_start(settings: LaunchSettings) -> str:
    """Why the engine cannot be restarted by this launcher alone; "" if it can."""
    nodes = values_of(settings.engine_args).get("--nnodes", 1)
    if nodes == 1:
        return ""
    reason = "the engine's other machines must start again, too: docs/guide/fleet.md"
    return f"--nnodes={nodes}: {reason}"


def _check_machines(settings: LaunchSettings, given: Mapping[str, Any]) -> None:
    nodes, rank = given.get("--nnodes", 1), given.get("--node-rank", 0)
    if rank > 0:
        reason = f"it has no HTTP server; start it with {_SERVE}: docs/guide/fleet.md"
        raise SettingsError(f"--node-rank={rank}: only the first machine has a launcher; {reason}")
    if nodes == 1:
        return
    if settings.ray_address is not None:
        raise SettingsError(f"--nnodes={nodes}: an engine on Ray has one machine")
    if settings.instances > 1:
        reason = "an engine of several machines needs a launcher of its own; set instances to 1"
        raise SettingsError(f"instances={settings.instances}: with --nnodes={nodes}, {reason}")
    if _MEETING not in given:
        reason = f"its ranks need an address where they meet: {_MEETING} HOST:PORT"
        raise SettingsError(f"--nnodes={nodes}: {reason}")


def _ports_of(flag: str, value: str, given: Mapping[str, Any]) -> list[int]:
    """The ports that a flag's value stands for; none if it is malformed, which SGLang says."""
    port = value.rpartition(":")[2]
    if not port.isdecimal():
        return []
    base = int(port)
    spreads = flag == _MEETING and given.get("--attn-dp-size", 1) > 1
    # The first is where ranks meet, the others are derived from it.
    return [base, *range(base + 1, base + 7), base + 13] if spreads else [base]
