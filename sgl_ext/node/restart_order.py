"""What a restart of engines is to do, checked before the first engine is touched. No IO."""

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from sgl_ext.node.devices.sizes import gpus_of_engine
from sgl_ext.node.engine import Engine, served_model
from sgl_ext.settings.schema import LaunchSettings, SettingsError
from sgl_ext.settings.secrets import is_reachable
from sgl_ext.settings.sources import check_launch


class RestartRefused(Exception):
    """Nothing was restarted. The message is for the caller."""

    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


class Order(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a caller wants.

    engine: the name, id or URL of one engine; None: all, one after another.
    model_path: None: the one that each engine has.
    engine_args: SGLang's flags after those of the launcher's own start, where the later of two
        wins; () are the launcher's alone. None: those that each engine has.
    """

    engine: str | None = None
    model_path: str | None = None
    engine_args: tuple[str, ...] | None = None


class Plan(NamedTuple):
    """Engines in the order of their restart, each with its new settings.

    first: those that restart before the node serves another model; all, if the model stays.
    rest: those that restart after that.
    """

    first: list[tuple[Engine, LaunchSettings]]
    rest: list[tuple[Engine, LaunchSettings]]

    @property
    def all(self) -> list[tuple[Engine, LaunchSettings]]:
        return [*self.first, *self.rest]


def read_order(body: bytes) -> Order:
    """Raises RestartRefused 400 for a body that is no order."""
    try:
        return msgspec.json.decode(body or b"{}", type=Order)
    except msgspec.MsgspecError as error:
        raise RestartRefused(HTTPStatus.BAD_REQUEST, f"{error}") from None


def plan_restart(
    order: Order, engines: Sequence[Engine], ids: Mapping[str, str], launched: LaunchSettings
) -> Plan:
    """The plan for an order.

    ids: the engines' ids by their names. launched: the settings of the launcher's own start.
    Raises RestartRefused for an unknown engine, for settings that the launcher's start would
    refuse, for another model on one engine of several, and for changes that anyone could order.
    """
    _require_key(order, launched)
    chosen = _chosen(order.engine, engines, ids)
    steps = [(engine, _changed(engine.settings, order, launched)) for engine in chosen]
    for engine, settings in {settings: (engine, settings) for engine, settings in steps}.values():
        try:
            check_launch(settings)
            _require_same_gpus(engine, settings)
        except SettingsError as error:
            raise RestartRefused(HTTPStatus.BAD_REQUEST, f"{error}") from None
    served = {served_model(engine.settings) for engine in engines}
    if {served_model(settings) for _, settings in steps} <= served:
        return Plan(steps, [])
    if len(chosen) < len(engines):
        new, old = served_model(steps[0][1]), ", ".join(sorted(served))
        reason = f"a node serves one model: restart all engines, or serve {new} as {old}"
        message = f"engine={order.engine!r}: it would serve {new}, and the others {old}; {reason}"
        raise RestartRefused(HTTPStatus.BAD_REQUEST, message)
    half = max(1, len(steps) // 2)
    return Plan(steps[:half], steps[half:])


def _require_same_gpus(engine: Engine, settings: LaunchSettings) -> None:
    """Raises SettingsError if the engine would take other GPUs than it was given at its start."""
    needed, has = gpus_of_engine(settings), gpus_of_engine(engine.settings).gpus
    if needed.gpus != has:
        keeps = f"{engine.name} keeps those of the node's start, {has}: start the node again"
        raise SettingsError(f"engine_args: {needed.shown} needs {needed.gpus} GPUs, and {keeps}")


def _require_key(order: Order, launched: LaunchSettings) -> None:
    """Some flags and models run code: not everyone who reaches a port may choose them."""
    balancer = launched.balancer
    is_guarded = balancer.api_key is not None or balancer.keys is not None
    changes = order.model_path is not None or order.engine_args is not None
    if changes and not is_guarded and is_reachable(balancer.host):
        where = f"other machines can reach this node (host={balancer.host!r})"
        message = f"model_path, engine_args: {where}, so it needs --api-key or --keys for that"
        raise RestartRefused(HTTPStatus.FORBIDDEN, message)


def _chosen(
    name: str | None, engines: Sequence[Engine], ids: Mapping[str, str]
) -> Sequence[Engine]:
    if name is None:
        return engines
    found = [each for each in engines if name in (each.name, ids[each.name], each.url)]
    if not found:
        known = ", ".join(each.name for each in engines)
        raise RestartRefused(HTTPStatus.NOT_FOUND, f"engine={name!r}: must be one of {known}")
    return found


def _changed(settings: LaunchSettings, order: Order, launched: LaunchSettings) -> LaunchSettings:
    if order.model_path is not None:
        settings = replace(settings, model_path=order.model_path)
    if order.engine_args is not None:
        engine_args = (*launched.engine_args, *order.engine_args)
        settings = replace(settings, engine_args=engine_args)
    return settings
