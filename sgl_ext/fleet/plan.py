"""What brings a fleet nearer to what is wanted of it: which engines to create and which to drain.

    missing ──create──> starting ──> ready ──drain──> draining ──> missing

Engines have the numbers 0 to instances - 1; those above leave. An engine of an earlier generation
is replaced in its place: it drains, and is created again. Engines that serve are replaced one at a
time, and only while all others serve, so a new generation that does not start stops the restart.
"""

from collections.abc import Sequence
from typing import NamedTuple


class Engine(NamedTuple):
    """An engine whose actor exists.

    generation: the one that it was made for; None before its actor has said so.
    ready: it has served for some time. draining: it was ordered to.
    """

    number: int
    generation: int | None
    ready: bool
    draining: bool = False


class Steps(NamedTuple):
    """The numbers of the engines to create, and of those that shall leave or be replaced."""

    create: tuple[int, ...]
    drain: tuple[int, ...]


def next_steps(instances: int, generation: int, engines: Sequence[Engine]) -> Steps:
    """The steps to take now; both empty if the fleet is as wanted, or has to wait."""
    numbers = {engine.number for engine in engines}
    create = tuple(number for number in range(instances) if number not in numbers)
    leaving = {e.number for e in engines if e.number >= instances or e.draining}
    staying = [e for e in engines if e.number not in leaving]
    outdated = [e for e in staying if e.generation not in (None, generation)]
    serving = [e for e in staying if e.ready]
    # What does not serve is replaced at once.
    leaving |= {e.number for e in outdated if not e.ready}
    if outdated and len(serving) == instances:
        leaving.add(min(e.number for e in outdated))
    return Steps(create, tuple(sorted(leaving)))


def is_settled(instances: int, generation: int, engines: Sequence[Engine]) -> bool:
    """Whether the fleet is as wanted, and all of it serves."""
    current = [e for e in engines if e.generation == generation and e.ready and not e.draining]
    return sorted(e.number for e in engines) == [*range(instances)] and len(current) == instances


class Room(NamedTuple):
    """What a node of the cluster has of the resource that engines take: GPUs or CPUs."""

    node: str
    free: float
    total: float


def too_small(engines: int, devices: int, resource: str, rooms: Sequence[Room]) -> str:
    """Why so many more engines, with `devices` on one node for each, do not fit into a cluster; ""
    if they do."""
    fitting = sum(int(room.free // devices) for room in rooms)
    if fitting >= engines:
        return ""
    each = f"{devices} {resource}{'s' if devices > 1 else ''} on one node"
    found = ", ".join(
        f"{room.node} has {room.free:g} of {room.total:g} free" for room in rooms if room.total
    )
    if not found:
        found = f"no node of the cluster has a {resource}"
        found += "; platform='cpu' runs engines on CPUs" if resource == "GPU" else ""
    need = f"{engines} more engines need {each} each, {engines * devices} {resource}s in all"
    return f"{need}, and there is room for {fitting}: {found}"
