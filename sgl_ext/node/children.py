"""The launcher's children: its engines, or what keeps those on Ray, and its balancer."""

import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from socket import gethostname

from msgspec.structs import replace

from sgl_ext.balancer.store.opening import check_store
from sgl_ext.membership.file import write_members
from sgl_ext.membership.member import Member, MembershipError
from sgl_ext.membership.sources import open_source, open_sources
from sgl_ext.node import hardware
from sgl_ext.node.child import Child
from sgl_ext.node.log_dir import new_log
from sgl_ext.node.ports import free_ports, reachable, require_free
from sgl_ext.node.stages import FLEET
from sgl_ext.settings.schema import LaunchSettings, SettingsError

_STORE = "store.sqlite"
_ENGINES = "engines.json"
# The command's, which engines need not know; SGLang would warn of their names.
_COMMAND_VARIABLES = ("SGL_EXT_URL", "SGL_EXT_API_KEY")


class EngineList:
    """The file that lists the node's engines, which its balancer watches: `membership.file`.

    node: tells its engines from those of other nodes, whose balancers may share a store with it.
    """

    def __init__(self, path: Path, engines: Sequence[Child], node: str) -> None:
        self._path = path
        self._engines = engines
        self._node = node
        # Without engines of the node's own there is nothing to list.
        self._written: tuple[Member, ...] | None = None if engines else ()

    def update(self) -> None:
        """Lists the engines that have not ended, if that has changed. One that was started again
        has a new id. Call it periodically. Raises OSError."""
        members = tuple(
            Member(id=f"{engine.run_id}@{self._node}", url=engine.url)
            for engine in self._engines
            if engine.exit_code is None
        )
        if members != self._written:
            write_members(self._path, members)
            self._written = members


def make_children(
    settings: LaunchSettings, found: hardware.Hardware | None
) -> tuple[list[Child], Child, EngineList]:
    """The node's engines, or what keeps those on Ray, and its balancer, not started yet; and the
    list of the engines."""
    logs, balancer = Path(settings.log_dir), settings.balancer
    logs.mkdir(mode=0o700, parents=True, exist_ok=True)
    require_free(balancer.host, balancer.port)
    store = balancer.store or str(logs / _STORE)
    check_store(store, balancer.store_limit_bytes)
    node = f"{gethostname()}:{balancer.port}"
    if found is None:
        engines, listed = [_fleet_child(settings, logs)], EngineList(logs / _ENGINES, [], node)
        source = f"ray:{settings.ray_address}/{settings.ray_fleet}"
    else:
        engines = _node_engines(settings, found, logs)
        listed, source = EngineList(logs / _ENGINES, engines, node), f"file:{logs / _ENGINES}"
    open_sources(balancer)  # it says now what the balancer would say in its log
    balancer = replace(balancer, store=store, workers_from=(source, *balancer.workers_from))
    command = [sys.executable, "-m", "sgl_ext.balancer.serve"]
    address = reachable(balancer.host, balancer.port)
    started = _child("balancer", command, balancer.to_environment(), logs, address)
    return engines, started, listed


def _node_engines(settings: LaunchSettings, found: hardware.Hardware, logs: Path) -> list[Child]:
    host, engines = settings.engine_host, []
    first = settings.balancer.port + 1
    for index, port in enumerate(free_ports(first, settings.instances, host)):
        command = hardware.engine_command(settings, found, port)
        environment = hardware.engine_environment(settings, found, index)
        address = reachable(host, port)
        child = f"engine-{index}", command, environment, logs, address
        engines.append(_child(*child, without=_COMMAND_VARIABLES))
    return engines


def _fleet_child(settings: LaunchSettings, logs: Path) -> Child:
    """The process that keeps the engines on Ray. Raises SettingsError if no cluster is there."""
    try:
        open_source(f"ray:{settings.ray_address}")
    except MembershipError as error:
        raise SettingsError(f"ray_address={settings.ray_address!r}: {error}") from None
    command = [sys.executable, "-m", "sgl_ext.fleet.serve"]
    return _child(FLEET, command, settings.to_environment(), logs, "")


def _child(
    name: str,
    command: list[str],
    environment: dict[str, str],
    logs: Path,
    address: str,
    without: Collection[str] = (),
) -> Child:
    log = new_log(logs / f"{name}.log")
    return Child(name, command, environment, log, f"http://{address}", without)
