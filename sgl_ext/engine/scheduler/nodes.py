"""The ranks of an engine on several machines agree before they serve.

All ranks must decide alike in every iteration, or their batches differ and their collectives hang.
On one machine they have the environment of one main process. On several, each machine has a main
process with an environment of its own, so the first rank's counts on all of them:

    first rank     writes `Terms` into torch's store, and waits until every rank has answered
    other ranks    read the terms, compare what must be equal already, answer, and adopt the rest

A rank that does not answer runs without the extension. Then no rank serves.
"""

import os
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Protocol

import msgspec

from sgl_ext.engine.arguments import in_effect
from sgl_ext.engine.core.folder import adopt_name, engine_name
from sgl_ext.settings.schema import VARIABLE, EngineSettings
from sgl_ext.version import versions

_TERMS, _ANSWER = "sgl_ext/terms", "sgl_ext/answer/"
_WAIT = timedelta(seconds=120)
# The arguments by which ranks decide. SGLang itself compares none of them.
ALIKE = (
    *("chunked_prefill_size", "disable_overlap_schedule", "max_running_requests", "page_size"),
    *("disable_priority_preemption", "enable_priority_scheduling", "schedule_policy"),
    *("disable_radix_cache", "enable_flexkv", "enable_hierarchical_cache", "enable_lmcache"),
    *("radix_cache_backend", "radix_eviction_policy", "schedule_low_priority_values_first"),
)

_ahead_s = 0.0


class Store(Protocol):
    """What is used of torch's store."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def wait(self, keys: list[str], timeout: timedelta, /) -> None: ...
    def delete_key(self, key: str, /) -> bool: ...


class Terms(msgspec.Struct, frozen=True):
    """What the ranks of an engine must have in common.

    name: of the engine, which no client knows (`engine_name`).
    settings: `EngineSettings`, as JSON.
    alike: the version, and the flags, that must be equal on all machines.
    boot_s: when the first rank's monotonic clock was 0.
    """

    name: str
    settings: str
    alike: dict[str, str]
    boot_s: float


class NodesDiffer(Exception):
    """The ranks of an engine cannot decide alike. The message says what the operator can change."""


def clock_s() -> float:
    """The monotonic clock of the first rank's machine, by which its HTTP process dates requests."""
    return time.monotonic() + _ahead_s


def agree_with_nodes(*_: Any, **__: Any) -> None:
    """After SGLang's `init_parallel_runtime`: on several machines, this rank adopts the first
    rank's name, settings and clock. Raises SystemExit if ranks cannot decide alike."""
    nodes = in_effect().nnodes
    if nodes == 1:
        return
    from torch import distributed

    store, own = distributed.distributed_c10d._get_default_store(), _own_terms()
    try:
        terms = agree(store, distributed.get_rank(), distributed.get_world_size(), own)
    except NodesDiffer as error:
        raise SystemExit(f"sgl-ext: --nnodes {nodes}: {error}") from None
    adopt(terms, own.boot_s)


def agree(store: Store, rank: int, ranks: int, own: Terms, wait: timedelta = _WAIT) -> Terms:
    """The first rank's terms, once all ranks have them. Raises NodesDiffer."""
    if rank == 0:
        store.set(_TERMS, msgspec.json.encode(own).decode())
        answers = [f"{_ANSWER}{other}" for other in range(1, ranks)]
        _await(store, answers, wait, "a rank of another machine")
        store.delete_key(_TERMS)  # every process that reaches the store could read it
        if problems := {store.get(answer).decode() for answer in answers} - {""}:
            raise NodesDiffer("; ".join(sorted(problems)))
        return own
    _await(store, [_TERMS], wait, "the first rank")
    terms = msgspec.json.decode(store.get(_TERMS), type=Terms)
    problem = ", ".join(_differences(terms.alike, own.alike))
    store.set(f"{_ANSWER}{rank}", problem)
    if problem:
        raise NodesDiffer(problem)
    return terms


def adopt(terms: Terms, boot_s: float) -> None:
    """Makes the terms this process's own. boot_s: when its own monotonic clock was 0."""
    global _ahead_s
    adopt_name(terms.name)
    os.environ[VARIABLE] = terms.settings
    _ahead_s = boot_s - terms.boot_s


def _own_terms() -> Terms:
    settings = msgspec.json.encode(EngineSettings.from_environment()).decode()
    args = in_effect()
    alike = {name: str(getattr(args, name)) for name in ALIKE}
    alike["version of sgl-ext"] = versions().sgl_ext
    return Terms(engine_name(), settings, alike, time.time() - time.monotonic())


def _await(store: Store, keys: list[str], wait: timedelta, whose: str) -> None:
    try:
        store.wait(keys, wait)
    except RuntimeError:
        reason = f"{whose} has not answered for {wait.total_seconds():g} s"
        hint = "every machine needs sgl-ext, and python -m sgl_ext.engine.serve"
        raise NodesDiffer(f"{reason}: {hint}") from None


def _differences(first: dict[str, str], own: dict[str, str]) -> Iterator[str]:
    for name, value in first.items():
        if own.get(name) != value:
            yield f"{name} is {value} on the first machine and {own.get(name)} on another"
