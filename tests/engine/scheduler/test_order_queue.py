"""The order of an engine's queue as its hook makes it, without an engine."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from scheduler.order import Served
from sgl_ext.engine.core.hints import Hints
from sgl_ext.engine.scheduler import priority, single_flight
from sgl_ext.settings.schema import EngineSettings, Tenant


def request(owner: str, importance: int = 0) -> SimpleNamespace:
    """A request as far as its place in the queue is concerned, of 100 tokens."""
    hints = Hints((), (), (), owner, "", 0.0, True, False, True)
    return SimpleNamespace(
        priority=importance,
        origin_input_ids=[0] * 100,
        output_ids=[],
        num_matched_prefix_tokens=0,
        _sgl_ext_hints=hints,
    )


def ordered(monkeypatch: pytest.MonkeyPatch, queue: list[Any], *tenants: Tenant) -> list[Any]:
    """The queue as the hook leaves it."""
    policy = SimpleNamespace(
        tree_cache=SimpleNamespace(supports_fast_match_prefix=lambda: True),
    )
    monkeypatch.setattr(priority, "_settings", lambda: EngineSettings(tenants=tenants))
    monkeypatch.setattr(priority, "_weights", priority._weights.__wrapped__)
    monkeypatch.setattr(priority, "_served", Served())
    monkeypatch.setattr(priority, "_is_ours", lambda _: True)
    monkeypatch.setattr(priority, "keeper_of", lambda _: SimpleNamespace(now_s=0.0))
    priority.order_queue(lambda *_: None, policy, queue)
    return queue


def test_a_tenant_of_weight_three_has_three_of_four_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = [request(owner) for owner in ("other", "people") for _ in range(12)]
    turns = [
        one._sgl_ext_hints.owner for one in ordered(monkeypatch, queue, Tenant("people", 0, 3))
    ]
    for begin in range(0, 16, 4):
        assert Counter(turns[begin : begin + 4]) == {"people": 3, "other": 1}


def test_without_weights_tenants_have_turns_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = [request(owner) for owner in ("other", "people") for _ in range(12)]
    turns = [one._sgl_ext_hints.owner for one in ordered(monkeypatch, queue)]
    assert Counter(turns[:8]) == {"people": 4, "other": 4}


def test_a_weight_takes_nobody_over_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = [request("people"), request("other", importance=1)]
    first = ordered(monkeypatch, queue, Tenant("people", 0, 1000))[0]
    assert first._sgl_ext_hints.owner == "other"


class Trying(SimpleNamespace):
    """A scheduler that has refused somebody; `fields` differ from that."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(
            **{
                "tree_cache": SimpleNamespace(pins=SimpleNamespace(now_s=5.0)),
                "waiting_queue": [SimpleNamespace(rid="one")],
                "enable_priority_preemption": True,
                "chunked_req": None,
                "grammar_manager": SimpleNamespace(has_waiting_grammars=lambda: False),
                "enable_hicache_storage": False,
                "enable_lmcache": False,
                "require_mlp_sync": False,
                "enable_lora": False,
                "prefill_delayer": None,
                "min_free_slots_delayer": None,
                **fields,
            }
        )

    def defers(self, running: int = 3) -> bool:
        batch = SimpleNamespace(batch_size=lambda: running, is_empty=lambda: running == 0)
        return priority.defer_vain_try(lambda *_: False, self, batch)


def test_who_was_refused_is_not_tried_again_until_something_has_changed() -> None:
    scheduler = Trying()
    assert [scheduler.defers() for _ in range(3)] == [False, True, True]
    assert [scheduler.defers(running=2) for _ in range(2)] == [False, True]
    scheduler.waiting_queue.append(SimpleNamespace(rid="two"))
    assert [scheduler.defers(running=2) for _ in range(2)] == [False, True]
    scheduler.tree_cache.pins.now_s += 1
    assert [scheduler.defers(running=2) for _ in range(2)] == [False, True]


@pytest.mark.parametrize(
    "fields",
    [
        {"chunked_req": SimpleNamespace()},
        {"waiting_queue": []},
        {"enable_priority_preemption": False},
        {"enable_hicache_storage": True},
        {"enable_lora": True},
        {"tree_cache": SimpleNamespace()},
        {"grammar_manager": SimpleNamespace(has_waiting_grammars=lambda: True)},
    ],
)
def test_where_more_may_have_changed_all_are_tried(fields: dict[str, Any]) -> None:
    scheduler = Trying(**fields)
    assert [scheduler.defers() for _ in range(3)] == [False] * 3


def test_nobody_waits_for_a_clock_where_nothing_runs_or_a_prefix_is_in_the_making(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scheduler = Trying()
    assert [scheduler.defers(running=0) for _ in range(3)] == [False] * 3
    assert [scheduler.defers() for _ in range(2)] == [False, True]
    monkeypatch.setattr(single_flight, "_awaited", True)
    assert [scheduler.defers() for _ in range(3)] == [False, False, True]
