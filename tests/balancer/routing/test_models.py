"""Which model a request's name means, and which workers belong to it."""

from __future__ import annotations

from typing import Any

import pytest

from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.balancer.routing import models as models_module
from sgl_ext.balancer.routing.worker import Worker
from sgl_ext.balancer.routing.workers import Workers
from sgl_ext.membership.member import Member
from sgl_ext.protocols.errors import BalancerError
from sgl_ext.protocols.models import StatedModel
from tests.balancer.workers import models_of, routed


class Node:
    """Workers at a, b and c, all ready, and their models."""

    def __init__(self, *members: Member, **options: Any) -> None:
        self.metrics = Metrics()
        self.workers = Workers(self.metrics, lambda: 0.0)
        self.models = models_of(self.workers, self.metrics, lambda: 0.0, **options)
        self.apply(*members)

    def apply(self, *members: Member) -> None:
        self.workers.apply("x", members)
        for worker in self.workers.all:
            self.workers.mark(worker, ready=True)

    def __getitem__(self, name: str) -> Worker:
        worker = self.workers.find(name)
        assert worker is not None
        return worker

    def states(self, worker: str, model: str, *adapters: str) -> None:
        self.models.note(self[worker], StatedModel(model, 1000, adapters))

    def served(self) -> dict[str, list[str]]:
        """The workers of each model."""
        return {p.name: [w.id for w in p.workers.all] for p in self.models.all}

    def goes_to(self, name: object) -> str:
        return self.models.choose(name).name


def member(id: str, model: str = "", state: Any = "ready") -> Member:
    return Member(id=id, url=f"http://{id}:1", model=model, state=state)


A, B, C = map(member, "abc")


def test_without_names_and_aliases_any_name_means_the_first_model() -> None:
    node = Node(A)
    assert node.goes_to("whatever") == ""
    node.states("a", "large")
    assert [node.goes_to(name) for name in ("large", "gpt-5", "", None, 7)] == ["large"] * 5


def test_engines_make_and_join_the_pools_of_the_models_that_they_state() -> None:
    node = Node(A, B, C)
    for name, model in (("a", "large"), ("b", "small"), ("c", "large")):
        node.states(name, model)
    assert node.served() == {"large": ["a", "c"], "small": ["b"]}
    assert [node.goes_to(name) for name in ("small", "large", "else")] == [
        "small",
        "large",
        "large",
    ]
    node.states("c", "small")
    assert node.served() == {"large": ["a"], "small": ["b", "c"]}


def test_a_request_sees_the_engines_of_its_model_alone() -> None:
    node = Node(A, B)
    node.states("a", "large")
    node.states("b", "small")
    body = {"model": "small", "messages": [{"role": "user", "content": "Hello" * 2000}]}
    for model, worker in (("small", "b"), ("large", "a")):
        pool = node.models.choose(model)
        routing = routed(pool.router, "/v1/messages", {}, body)
        for _ in range(2):
            attempt = pool.router.place(routing, set())
            assert attempt is not None
            assert attempt.worker is node[worker]
        # What the other one was sent is not expected here.
        assert pool.router.prefixes.lookup(routing.chain).most.expected_tokens > 0
        assert [view.name for view in attempt.considered] == [worker]
    index = node.models.all[0].router.prefixes.written
    assert index is not None
    index.store(node["b"].slot, None, 7, 100)
    assert [len(p.router.prefixes.index.matches([7])) for p in node.models.all] == [1, 1]


def test_each_model_has_the_slots_of_its_own_engines_in_the_index() -> None:
    node = Node(A, B)
    node.states("a", "large")
    assert node.models.all[0].router.prefixes.slots == -1  # one model sees all
    node.states("b", "small")
    slots = {p.name: p.router.prefixes.slots for p in node.models.all}
    assert slots == {"large": 1 << node["a"].slot, "small": 1 << node["b"].slot}


def test_exact_aliases_come_before_patterns_and_patterns_in_their_order() -> None:
    aliases = {"claude-*": "large", "claude-haiku-*": "small", "claude-haiku-5": "small", "q": "no"}
    node = Node(member("a", "large"), member("b", "small"), aliases=aliases)
    assert node.goes_to("claude-haiku-4") == "large"  # the first pattern that matches
    assert node.goes_to("claude-haiku-5") == "small"
    assert node.goes_to("small") == "small"
    for name in ("gpt-5", "q", "Claude-x"):
        with pytest.raises(BalancerError) as error:
            node.goes_to(name)
        assert (error.value.status, error.value.code) == (404, "model_not_found")
        assert "There are: large, small" in error.value.message


def test_a_pattern_for_every_name_takes_requests_without_one() -> None:
    node = Node(member("a", "large"), names=["large", "small"], aliases={"*": "large"})
    assert (node.goes_to(None), node.goes_to("x")) == ("large", "large")
    strict = Node(member("a", "large"), names=["large", "small"])
    with pytest.raises(BalancerError) as error:
        strict.goes_to(None)
    assert (error.value.status, error.value.param) == (400, "model")


def test_a_model_that_the_operator_names_is_known_without_an_engine() -> None:
    node = Node(member("a", "large"), names=["large", "small"])
    pool = node.models.choose("small")
    assert (pool.name, pool.router.may_wait()) == ("small", False)
    assert [row["name"] for row in node.models.rows()] == ["large", "small"]


def test_adapters_are_models() -> None:
    node = Node(A, B, names=["large", "small"], aliases={"db": "sql"})
    node.states("a", "large")
    node.states("b", "small", "sql")
    assert [node.goes_to(n) for n in ("sql", "small:sql", "db")] == ["small"] * 3
    with pytest.raises(BalancerError):
        node.goes_to("large:sql")


@pytest.mark.parametrize("fallback", ["small", ""])
def test_a_fallback_answers_only_where_the_operator_names_it(fallback: str) -> None:
    node = Node(
        member("a", "large"),
        member("b", "small"),
        names=["large", "small"],
        fallbacks={"large": fallback} if fallback else {},
    )
    node["a"].ready = False
    assert node.goes_to("large") == (fallback or "large")
    assert node.metrics.model_fallbacks.counts["large", "small"] == bool(fallback)
    node["a"].ready = True
    assert node.goes_to("large") == "large"


def test_a_request_that_waits_goes_to_the_fallback_when_the_last_engine_is_gone() -> None:
    node = Node(
        member("a", "large"),
        member("b", "small"),
        names=["large", "small"],
        fallbacks={"large": "small"},
    )
    large, small = node.models.all
    assert node.models.instead_of(large) is None  # it is busy
    node["a"].ready = False
    assert node.models.instead_of(large) is small
    assert node.models.instead_of(small) is None
    node["b"].ready = False
    assert node.models.instead_of(large) is None


def test_a_model_that_replaces_another_takes_all_names_at_once() -> None:
    """As a rolling restart with another model path does: the first half waits for its turn."""
    node = Node(member("a", "old"), member("b", "old"))
    assert node.goes_to("old") == "old"
    node.apply(member("a", "new", "restarting"), member("b", "old"))
    assert (node.goes_to("old"), node.goes_to("any")) == ("old", "old")
    node.apply(member("a", "new"), member("b", "new", "restarting"))
    assert (node.goes_to("old"), node.goes_to("any")) == ("new", "new")
    assert node.models.instead_of(node.models.all[0]) is node.models.all[1]


def test_a_model_whose_only_engine_restarts_is_waited_for() -> None:
    node = Node(member("a", "large"), member("b", "small"))
    node.apply(member("a", "large"), member("b", "small", "restarting"))
    assert node.goes_to("small") == "small"
    assert node.models.choose("small").router.may_wait()


def test_there_are_as_many_models_as_the_bound_allows(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(models_module, "MOST_MODELS", 2)
    node = Node(*(member(name, f"model-{name}") for name in "abc"))
    assert node.served() == {"model-a": ["a"], "model-b": ["b"]}
    assert "c gets no requests: there are 2 models" in caplog.text


def test_names_of_strangers_fill_no_memory() -> None:
    node = Node(member("a", "large"))
    for number in range(3000):
        node.goes_to(f"name-{number}")
    node.goes_to("n" * 10_000)
    assert len(node.models._found) <= 1024
    assert max(map(len, node.models._found)) < 1000


def test_what_the_metrics_say_of_models() -> None:
    node = Node(member("a", "large"), member("b", "small"))
    node["b"].ready = False
    page = node.metrics.render().decode()
    for line in (
        'sgl_ext_model_engines{model="small",state="all"} 1.0',
        'sgl_ext_model_engines{model="small",state="ready"} 0.0',
        'sgl_ext_model_queued_requests{model="large"} 0.0',
        'sgl_ext_model_agents{model="large",state="there"} 0.0',
        'sgl_ext_model_agents{model="small",state="fit"} 0.0',
        'sgl_ext_worker_model{model="small",worker="b"} 1.0',
    ):
        assert line in page
