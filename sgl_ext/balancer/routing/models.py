"""The models that the workers serve: each has a router, a queue and trials of its own.

    a request's `model` --> Models.find --> its ModelPool --> a worker of that model

A worker belongs to the pool of the model that it states (`worker_probes`), or that its source
states. One that states none belongs to the first. A pool has all that a request meets from its
reading to its placement: workers of other models are not seen there. The prefix index is one for
all: a pool sees its own workers' slots in it.

A request's name means, in this order: a model, an adapter, an alias, an alias with a pattern (the
first in the operator's order). Without names and aliases of the operator's, any other name means
the model that was there first: clients then need not know its name.

An engine that restarts belongs already to the model that it will serve, so that requests which
arrive meanwhile do not wait for one that never comes.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from http import HTTPStatus
from typing import Any

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.balancer.routing.admission import AdmissionQueue, Trials
from sgl_ext.balancer.routing.router import Router
from sgl_ext.balancer.routing.standby_prefill import StandbyPrefill
from sgl_ext.balancer.routing.worker import Worker
from sgl_ext.balancer.routing.workers import Workers, WorkerSet
from sgl_ext.protocols.errors import BalancerError
from sgl_ext.protocols.models import PATH, TAGS_PATH, StatedModel

log = logging.getLogger(__name__)

MOST_MODELS = 64
"""Engines of further models get no requests."""
ANY = "*"
_MOST_FOUND = 1024
_LONGEST_NAME = 512


@dataclass(eq=False)
class ModelPool:
    """What belongs to one model.

    name: "" until a worker states it.
    fallback: the model whose engines answer while this one has none; "": no other.
    """

    name: str
    workers: WorkerSet
    router: Router
    queue: AdmissionQueue
    trials: Trials
    standby: StandbyPrefill
    fallback: str = ""

    @property
    def is_listed(self) -> bool:
        """Whether it has a worker, or expects one."""
        return any(not w.draining or w.is_expected for w in self.workers.all)

    @property
    def adapters(self) -> list[str]:
        """The names of the LoRA adapters that its workers have loaded."""
        return [*dict.fromkeys(name for w in self.workers.all for name in w.stated.adapters)]

    @property
    def window_tokens(self) -> int | None:
        """The tokens of prompt and answer together, the least that a worker takes; None if none
        says it."""
        windows = [w.stated.window_tokens for w in self.workers.all]
        return min((tokens for tokens in windows if tokens is not None), default=None)


@dataclass(eq=False)
class Models(Collector):
    """All models. One a process.

    make: makes the pool of a model with this name.
    all: the pools, those that the operator names first.
    names: the operator's. aliases: the model or adapter of each alias, in the operator's order.
    fallbacks: the fallback of each model that has one.
    on_new: called with each pool that is added. on_move: called with each worker that now serves
        another model.
    """

    workers: Workers
    metrics: Metrics
    make: Callable[[str], ModelPool]
    names: Sequence[str] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    fallbacks: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.on_new: list[Callable[[ModelPool], None]] = []
        self.on_move: list[Callable[[Worker], None]] = []
        self._found: dict[str, ModelPool | None] = {}
        self.all: list[ModelPool] = [self.make(name) for name in self.names or ("",)]
        self._by_name = {pool.name: pool for pool in self.all}
        self.default = self.all[0]
        self.change(self.aliases, self.fallbacks)
        self.workers.on_change.append(self.sort)
        # Before what forgets a worker for all models.
        self.workers.on_leave.insert(0, self._left)
        self.workers.on_found.append(self._is_found)
        self.metrics.registry.register(self)
        self.metrics.tables.add("models", self.all.__len__, lambda: MOST_MODELS)
        self.sort()

    def change(self, aliases: Mapping[str, str], fallbacks: Mapping[str, str]) -> None:
        """Replaces the operator's aliases and fallbacks."""
        self.aliases, self.fallbacks = aliases, fallbacks
        for pool in self.all:
            pool.fallback = fallbacks.get(pool.name, "")
        self._forget_names()

    @property
    def is_strict(self) -> bool:
        """Whether a name must be that of a model, of an adapter or of an alias."""
        return len(self.names) > 1 or bool(self.aliases)

    @property
    def listed(self) -> list[ModelPool]:
        """The models that clients may name, those without a worker, too, if the operator names
        them: first those in the operator's order, then others by their names."""
        places = {name: place for place, name in enumerate(self.names)}
        known = filter(self._is_known, self.all)
        return sorted(known, key=lambda pool: (places.get(pool.name, len(places)), pool.name))

    def _is_known(self, pool: ModelPool) -> bool:
        return bool(pool.name) and (pool.name in self.names or pool.is_listed)

    @property
    def exact_aliases(self) -> list[str]:
        """The aliases that are no patterns."""
        return [name for name in self.aliases if not _is_pattern(name)]

    def lists(self, path: str) -> bool:
        """Whether this balancer answers a request to this path itself: it asks for names, and there
        are some that no engine knows."""
        if path != TAGS_PATH and not path.startswith(PATH):
            return False
        return bool(self.aliases) or len(self.listed) > 1

    # Which model a request goes to.

    def named(self, name: object) -> ModelPool:
        """The model that a request means by this name. Raises BalancerError as `choose`."""
        pool = self.find(name)
        if pool is None:
            raise self._unknown(name)
        return pool

    def find(self, name: object) -> ModelPool | None:
        """The model that a request means by this name; None if there is none."""
        if not isinstance(name, str):
            name = ""
        try:
            return self._found[name]
        except KeyError:
            pool = self._find(name)
        if len(self._found) >= _MOST_FOUND:
            self._found.clear()
        if len(name) <= _LONGEST_NAME:
            self._found[name] = pool
        return pool

    def _find(self, name: str) -> ModelPool | None:
        pool = self._exact(self._meant(name))
        return self.default if pool is None and not self.is_strict else pool

    def _meant(self, name: str) -> str:
        """The name of the model or adapter that a request means by this name."""
        if self._exact(name) is not None:
            return name
        if (target := self.aliases.get(name)) is not None:
            return target
        patterns = self.aliases.items()
        return next((target for each, target in patterns if fnmatchcase(name, each)), name)

    def name_for_engine(self, name: object, *, is_checked: bool) -> str | None:
        """The name that a request must have at its engine in place of this one; None: this one.

        SGLang takes an adapter as MODEL:ADAPTER, and a name without an adapter as that of its
        model. is_checked: but for one protocol, where it refuses other names.
        """
        if not self._may_rename or not isinstance(name, str) or (pool := self.find(name)) is None:
            return None
        meant = self._meant(name)
        if (other := self._fallback_of(pool)) is not None:
            return other.name if is_checked else None
        if meant in pool.adapters and meant != pool.name:
            return f"{pool.name}:{meant}"
        return pool.name if is_checked and meant == pool.name != name else None

    def _exact(self, name: str) -> ModelPool | None:
        """The pool with this name, or with this adapter."""
        pool = self._by_name.get(name)
        if pool is not None and self._is_known(pool):
            return pool
        base, _, adapter = name.rpartition(":")
        for pool in self.all:
            adapters = pool.adapters
            if name in adapters or (base == pool.name and adapter in adapters):
                return pool
        return None

    def choose(self, name: object) -> ModelPool:
        """The model whose engines answer a request now. Raises BalancerError 404 for a name that
        means none, and 400 for none where one is needed."""
        return self.serving(self.named(name))

    def serving(self, pool: ModelPool) -> ModelPool:
        """The model itself, or its fallback while only that has a ready engine."""
        other = self._fallback_of(pool)
        if other is None:
            return pool
        self.count_fallback(pool, other)
        return other

    def _fallback_of(self, pool: ModelPool) -> ModelPool | None:
        """The fallback that answers now; None if the model itself does, or none is ready."""
        if not pool.fallback or pool.router.any_available():
            return None
        other = self._exact(pool.fallback)
        return other if other is not None and other.router.any_available() else None

    def instead_of(self, pool: ModelPool) -> ModelPool | None:
        """The model that takes a request for which the other has no engine any more; None if it is
        refused, as one is that finds all engines busy."""
        if pool.router.any_available():
            return None
        name = pool.fallback
        other = self._exact(name) if name else None
        if other is None and not self._is_known(pool) and not self.is_strict:
            other = self.default
        if other is None or other is pool or not other.router.may_wait():
            return None
        self.count_fallback(pool, other)
        return other

    def count_fallback(self, pool: ModelPool, other: ModelPool) -> None:
        """A request of one model is answered by another."""
        self.metrics.model_fallbacks.counts[pool.name, other.name] += 1

    def _unknown(self, name: object) -> BalancerError:
        known = [pool.name for pool in self.listed]
        known += [adapter for pool in self.listed for adapter in pool.adapters]
        shown = ", ".join(known)
        if not isinstance(name, str) or not name:
            message = f"model: must be given, as this server has several: {shown}"
            return BalancerError(HTTPStatus.BAD_REQUEST, message, param="model")
        message = f"The model {name[:_LONGEST_NAME]!r} does not exist. There are: {shown}"
        code = "model_not_found"
        return BalancerError(HTTPStatus.NOT_FOUND, message, code=code, param="model")

    # Which model a worker belongs to.

    def of(self, worker: Worker) -> ModelPool:
        """The pool of a worker."""
        return self._by_name.get(worker.model, self.default)

    def note(self, worker: Worker, stated: StatedModel) -> None:
        """A worker has stated its model, and the adapters that are loaded."""
        if stated != worker.stated:
            worker.stated = stated
            self.sort()

    def sort(self) -> None:
        """Puts each worker into the pool of its model. Call it when the workers have changed, or
        what they state."""
        sorted_into: dict[ModelPool, list[Worker]] = {pool: [] for pool in self.all}
        for worker in self.workers.all:
            if (pool := self._pool_for(worker)) is None:
                continue
            if worker.model != pool.name:
                self._move(worker, pool)
            sorted_into.setdefault(pool, []).append(worker)
        for pool, workers in sorted_into.items():
            pool.workers.all = workers
            pool.workers.index()
            pool.router.prefixes.slots = -1 if len(self.all) == 1 else pool.workers.slots
        if not self.names:
            taking = (p for p in self.all if any(not w.draining for w in p.workers.all))
            there = (pool for pool in self.all if pool.workers.all)
            if not any(not w.draining for w in self.default.workers.all):
                self.default = next(taking, None) or next(there, self.default)
        self._forget_names()

    def _forget_names(self) -> None:
        self._found.clear()
        has_names = bool(self.aliases or self.fallbacks)
        self._may_rename = has_names or any(w.stated.adapters for w in self.workers.all)

    def _pool_for(self, worker: Worker) -> ModelPool | None:
        """The pool of the model that a worker serves; None if there are too many."""
        name = worker.stated.name or worker.member.model
        if worker.is_expected and worker.member.model:
            name = worker.member.model
        if not name:
            return self.default
        if (pool := self._by_name.get(name)) is not None:
            return pool
        first = self.all[0]
        if not first.name:
            return self._name(first, name)
        if len(self.all) >= MOST_MODELS:
            log.warning("%s gets no requests: there are %d models", worker.id, MOST_MODELS)
            return None
        pool = self.make(name)
        pool.fallback = self.fallbacks.get(name, "")
        self.all.append(pool)
        self._by_name[name] = pool
        for action in self.on_new:
            action(pool)
        return pool

    def _name(self, pool: ModelPool, name: str) -> ModelPool:
        """The first worker states its model: what was there before is that model's."""
        del self._by_name[pool.name]
        pool.name, pool.fallback = name, self.fallbacks.get(name, "")
        self._by_name[name] = pool
        for worker in pool.workers.all:
            worker.model = name
        return pool

    def _move(self, worker: Worker, pool: ModelPool) -> None:
        before = self._by_name.get(worker.model)
        worker.model = pool.name
        if before is not None and worker in before.workers.all:
            before.router.forget(worker)
            for action in self.on_move:
                action(worker)

    def _left(self, worker: Worker) -> None:
        for action in self.of(worker).workers.on_leave:
            action(worker)

    def _is_found(self, worker: Worker, probed_s: float) -> None:
        for action in self.of(worker).workers.on_found:
            action(worker, probed_s)

    # What all pools do.

    def list_others(self) -> None:
        """Each attempt lists other workers that it could have gone to, from now on."""

        def list_others(pool: ModelPool) -> None:
            pool.router.lists_others = True

        self.on_new.append(list_others)
        for pool in self.all:
            list_others(pool)

    def sweep_queues(self) -> None:
        """Call it periodically."""
        for pool in self.all:
            pool.queue.sweep()

    def sweep_trials(self) -> None:
        """Call it periodically."""
        for pool in self.all:
            pool.trials.sweep()

    def router_of(self, worker: Worker) -> Router:
        """The router of a worker's model."""
        return self.of(worker).router

    def rows(self) -> list[dict[str, Any]]:
        """Each model, as the state shows it."""
        return [
            {
                "name": pool.name,
                "aliases": [name for name, of in self.aliases.items() if of == pool.name],
                "adapters": pool.adapters,
                "window_tokens": pool.window_tokens,
                "fallback": pool.fallback or None,
                "engines": len([w for w in pool.workers.all if not w.is_gone]),
                "ready": len([w for w in pool.workers.all if w.is_available]),
                "waiting": len(pool.queue),
            }
            for pool in self.listed
        ]

    def collect(self) -> Iterable[Metric]:
        engines = GaugeMetricFamily(
            "sgl_ext_model_engines",
            "Engines of a model, and how many of them take requests now.",
            labels=["model", "state"],
        )
        queued = GaugeMetricFamily(
            "sgl_ext_model_queued_requests",
            "Requests in the admission queue of a model.",
            labels=["model"],
        )
        agents = GaugeMetricFamily(
            "sgl_ext_model_agents",
            "Agents that engines of a model keep room for, as this process knows them (`there`), "
            "and how many more like them fit (`fit`).",
            labels=["model", "state"],
        )
        served = GaugeMetricFamily(
            "sgl_ext_worker_model",
            "The model of a worker; to be joined with its other metrics. The value is 1.",
            labels=["worker", "model"],
        )
        for row in self.rows():
            engines.add_metric([row["name"], "all"], row["engines"])
            engines.add_metric([row["name"], "ready"], row["ready"])
            queued.add_metric([row["name"]], row["waiting"])
        for pool in self.listed:
            for state, number in pool.queue.agents().items():
                agents.add_metric([pool.name, state], number)
        for worker in self.workers.all:
            served.add_metric([worker.id, worker.model], 1)
        return [engines, queued, agents, served]


def _is_pattern(name: str) -> bool:
    return not {*"*?["}.isdisjoint(name)
