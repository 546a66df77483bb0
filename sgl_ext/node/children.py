"""The launcher's children: its engines, or what keeps those on Ray, and its balancer."""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from socket import gethostname

from msgspec.structs import replace

from sgl_ext.balancer.reporting.spans import check_export
from sgl_ext.balancer.store.opening import check_store
from sgl_ext.membership.member import Member, MembershipError, State
from sgl_ext.membership.sources import open_source, open_sources, write_members
from sgl_ext.node import hardware
from sgl_ext.node.child import FLEET, Child
from sgl_ext.node.flags import ports_beside
from sgl_ext.node.log_dir import new_log
from sgl_ext.node.reloads import changes_path
from sgl_ext.ports import base_url, free_ports, reachable, require_free
from sgl_ext.settings.schema import LaunchSettings, SettingsError
from sgl_ext.settings.sources import served_by_flag

# The command's, which engines need not know; SGLang would warn of their names.
_COMMAND_VARIABLES = ("SGL_EXT_URL", "SGL_EXT_API_KEY")


class Engine(Child):
    """One engine. It keeps its port, its devices and its log over all its starts.

    settings: those of its model, as its next start uses them. launched: as its first one did.
    """

    def __init__(
        self,
        settings: LaunchSettings,
        found: hardware.Hardware,
        index: int,
        port: int,
        log: Path,
        number: int | None = None,
    ) -> None:
        """index: among the engines of its model. number: among those of the node."""
        self.launched = settings
        self._found = found
        self._port = port
        environment = hardware.engine_environment(settings, found, index)
        url = f"http://{reachable(settings.engine_host, port)}"
        name = f"engine-{index if number is None else number}"
        super().__init__(name, (), environment, log, url, _COMMAND_VARIABLES)
        self.configure(settings)

    def configure(self, settings: LaunchSettings) -> None:
        """What the next start uses: the model path and SGLang's flags."""
        self.settings = settings
        self.change_command(hardware.engine_command(settings, self._found, self._port))


def served_model(settings: LaunchSettings) -> str:
    """The name under which an engine with these settings serves its model."""
    return served_by_flag(settings.engine_args) or settings.model_name


_STORE, _REQUEST_LOG = "store.sqlite", "requests.jsonl"


def events_path(logs: Path) -> Path:
    """The file of the node's events."""
    return logs / "events.jsonl"


_ENGINES = "engines.json"
# systemd sets it to the unit's StateDirectory, or several.
_STATE_FOLDERS = "STATE_DIRECTORY"


def store_of(settings: LaunchSettings, environ: Mapping[str, str] = os.environ) -> str:
    """Where responses and contexts are stored: where the settings say, or else in systemd's
    StateDirectory, or else beside the logs."""
    folder = environ.get(_STATE_FOLDERS, "").partition(":")[0] or settings.log_dir
    return settings.balancer.store or str(Path(folder) / _STORE)


def request_log_of(settings: LaunchSettings) -> str:
    """Where the request log is: where the settings say, or else beside the other logs."""
    return settings.balancer.request_log or str(Path(settings.log_dir) / _REQUEST_LOG)


class EngineList:
    """The file that lists the node's engines, which its balancer watches: `membership.file`.

    node: tells its engines from those of other nodes, whose balancers may share a store with it.
    restarting: the names of engines that get no new requests now, and will again; and the model
        that each serves then.
    """

    def __init__(self, path: Path, engines: Sequence[Child], node: str) -> None:
        self._path = path
        self._engines = engines
        self._node = node
        self.restarting: dict[str, str] = {}
        # Without engines of the node's own there is nothing to list.
        self._written: tuple[Member, ...] | None = None if engines else ()

    def id_of(self, engine: Child) -> str:
        """The id under which the balancer knows the engine as it runs now."""
        return f"{engine.run_id}@{self._node}"

    def update(self) -> None:
        """Lists the engines, if that has changed. One that was started again has a new id. Call it
        periodically. Raises OSError."""
        members = tuple(
            Member(
                id=self.id_of(engine),
                url=engine.url,
                model=self.restarting.get(engine.name) or _model_of(engine),
                state=self._state_of(engine),
                name=f"{engine.name}@{self._node}",
            )
            for engine in self._engines
        )
        if members != self._written:
            write_members(self._path, members)
            self._written = members

    def _state_of(self, engine: Child) -> State:
        if engine.name in self.restarting:
            return "restarting"
        return "ready" if engine.exit_code is None else "ended"


def _model_of(engine: Child) -> str:
    return served_model(engine.settings) if isinstance(engine, Engine) else ""


def make_children(
    settings: LaunchSettings, found: hardware.Hardware | None, socket: Path | None = None
) -> tuple[list[Child], Child, EngineList]:
    """The node's engines, or what keeps those on Ray, and its balancer, not started yet; and the
    list of the engines.

    socket: where the launcher listens for its balancer.
    """
    logs, balancer = Path(settings.log_dir), settings.balancer
    logs.mkdir(mode=0o700, parents=True, exist_ok=True)
    require_free(balancer.host, balancer.port)
    store = store_of(settings)
    check_store(store, balancer.store_limit_bytes)
    node = f"{gethostname()}:{balancer.port}"
    if found is None:
        engines: list[Child] = [_fleet_child(settings, logs)]
        listed = EngineList(logs / _ENGINES, [], node)
        source = f"ray:{settings.ray_address}/{settings.ray_fleet}"
    else:
        engines = [*_node_engines(settings, found, logs)]
        listed, source = EngineList(logs / _ENGINES, engines, node), f"file:{logs / _ENGINES}"
    # They say now what the balancer would say in its log.
    open_sources(balancer)
    check_export(balancer)
    balancer = replace(
        balancer,
        store=store,
        request_log=request_log_of(settings),
        workers_from=(source, *balancer.workers_from),
        launcher_socket=socket and str(socket),
        changed_settings=str(changes_path(logs)),
        event_log=str(events_path(logs)),
    )
    command = [sys.executable, "-m", "sgl_ext.balancer.serve"]
    started = _child("balancer", command, balancer.to_environment(), logs, base_url(balancer))
    return engines, started, listed


def _node_engines(settings: LaunchSettings, found: hardware.Hardware, logs: Path) -> list[Engine]:
    first = settings.balancer.port + 1
    beside = {port for one in settings.of_models for port in ports_beside(one.engine_args)}
    ports = free_ports(first, settings.instances, settings.engine_host, tuple(sorted(beside)))
    places = [
        (own, devices, index)
        for own, devices in hardware.divide(settings, found)
        for index in range(own.instances)
    ]
    return [
        Engine(own, devices, index, port, new_log(logs / f"engine-{number}.log"), number)
        for number, ((own, devices, index), port) in enumerate(zip(places, ports, strict=True))
    ]


def _fleet_child(settings: LaunchSettings, logs: Path) -> Child:
    """The process that keeps the engines on Ray. Raises SettingsError if no cluster is there."""
    try:
        open_source(f"ray:{settings.ray_address}")
    except MembershipError as error:
        raise SettingsError(f"ray_address={settings.ray_address!r}: {error}") from None
    command = [sys.executable, "-m", "sgl_ext.integrations.ray.keeper"]
    return _child(FLEET, command, settings.to_environment(), logs, "http://")


def _child(
    name: str, command: list[str], environment: dict[str, str], logs: Path, url: str
) -> Child:
    log = new_log(logs / f"{name}.log")
    return Child(name, command, environment, log, url)
