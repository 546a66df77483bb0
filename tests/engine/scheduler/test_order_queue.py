"""The order of an engine's queue as its hook makes it, without an engine."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from scheduler.order import MOST
from sgl_ext.engine.scheduler import priority
from sgl_ext.engine.scheduler.extension import extension_of
from sgl_ext.engine.scheduler.state import RequestState, state_of
from sgl_ext.settings.schema import EngineSettings, Tenant
from sgl_ext.wire.hints import Hints


def request(
    owner: str, importance: int = 0, queued_s: float = 0.0, window_s: float = 0.0
) -> SimpleNamespace:
    """A request of 100 tokens, with the fields that its place in the queue depends on."""
    waited = {"queued_s": queued_s, "window_s": window_s}
    hints = Hints((), (), (), owner, "", 0.0, True, False, True, **waited)
    return SimpleNamespace(
        priority=importance,
        origin_input_ids=[0] * 100,
        output_ids=[],
        num_matched_prefix_tokens=0,
        host_hit_length=0,
        sgl_ext=RequestState(hints),
    )


def ordered(
    queue: list[Any], *tenants: Tenant, now_s: float = 0.0, token_s: float = 0.0
) -> list[Any]:
    """The queue as the hook leaves it. token_s: how long a token is computed."""
    cache: Any = SimpleNamespace(
        pins=SimpleNamespace(now_s=now_s),
        supports_fast_match_prefix=lambda: True,
    )
    extension_of(cache).settings = EngineSettings(tenants=tenants)
    extension_of(cache).token_s = token_s
    policy: Any = SimpleNamespace(
        tree_cache=cache,
        enable_priority_scheduling=True,
        schedule_low_priority_values_first=False,
        policy=SimpleNamespace(value="fcfs"),
    )
    priority.order_queue(lambda *_: None, policy, queue)
    return queue


def owners(queue: list[Any]) -> list[str]:
    return [state_of(one).hints.owner for one in queue]  # type: ignore[union-attr]


def test_a_tenant_of_weight_three_gets_three_of_four_turns() -> None:
    queue = [request(owner) for owner in ("other", "people") for _ in range(12)]
    turns = owners(ordered(queue, Tenant("people", 0, 3)))
    for begin in range(0, 16, 4):
        assert Counter(turns[begin : begin + 4]) == {"people": 3, "other": 1}


def test_a_waiting_prompt_is_looked_up_without_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of those that wait is looked up once a second."""
    found: list[Any] = []
    api = SimpleNamespace(RadixKey=lambda ids, *_, **__: found.append(ids))
    monkeypatch.setattr(priority, "sglang_api", api)
    core = SimpleNamespace(match_full_device_prefix=lambda _: (60, None, 0))
    cache: Any = SimpleNamespace(tree_core=core, cache_controller=None)
    one, preempted = request("people"), request("people")
    preempted.output_ids = [1, 2]
    for req in (one, preempted):
        req.extra_key = req.cache_salt = None
        priority._match(cache, req, 1.0)
        assert req.num_matched_prefix_tokens == 60
    assert found[0] is one.origin_input_ids
    assert found[1] == [*preempted.origin_input_ids, 1, 2]


def test_what_the_host_has_costs_less_than_what_is_computed_and_more_than_nothing() -> None:
    cold, on_host, on_device = (request("people") for _ in range(3))
    on_host.num_matched_prefix_tokens = on_host.host_hit_length = 90
    on_device.num_matched_prefix_tokens = 90
    assert ordered([cold, on_host, on_device]) == [on_device, on_host, cold]
    waiting = priority._waiting(on_host, 0.0, load_share=0.5)
    assert waiting.cost_tokens == 10 + 45


def test_without_weights_tenants_have_turns_alike() -> None:
    queue = [request(owner) for owner in ("other", "people") for _ in range(12)]
    assert Counter(owners(ordered(queue))[:8]) == {"people": 4, "other": 4}


def test_a_weight_moves_no_request_over_a_step() -> None:
    queue = [request("people"), request("other", importance=1)]
    assert owners(ordered(queue, Tenant("people", 0, 1000)))[0] == "other"


def test_what_waits_decides_for_how_long_the_cheapest_go_first() -> None:
    """As long as much is to be computed, the age of a dear request lets it pass no cheap ones."""
    cold, cached = request("one", queued_s=15.0), request("one")
    cached.num_matched_prefix_tokens = 90
    assert ordered([cold, cached]) == [cold, cached]
    assert ordered([cold, cached], token_s=0.05) == [cached, cold], "a window is 22 s"
    assert ordered([cold, cached], token_s=0.03) == [cold, cached], "a window is 13 s"


def test_an_engines_window_is_as_long_as_that_of_the_queue_that_a_request_waited_in() -> None:
    """Else its age would let it pass cheap requests here that it could not pass there."""
    cold, cached = request("one", queued_s=15.0, window_s=20.0), request("one")
    cached.num_matched_prefix_tokens = 90
    assert ordered([cold, cached]) == [cached, cold]
    aging_s = EngineSettings().aging_s
    older = request("one", queued_s=MOST * aging_s + 1, window_s=1e9)
    assert ordered([cached, older]) == [older, cached], "no window is longer than MOST times that"


def test_a_wait_in_the_balancer_counts_as_a_wait_in_the_engine() -> None:
    aging_s = EngineSettings().aging_s
    important, waited = request("one", importance=2), request("two", queued_s=3 * aging_s)
    assert ordered([important, waited]) == [waited, important]
    almost = request("two", queued_s=2 * aging_s - 1)
    assert ordered([almost, important]) == [important, almost]


class Trying(SimpleNamespace):
    """A scheduler that has refused somebody; `fields` differ from that."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(
            **{
                "tree_cache": SimpleNamespace(
                    pins=SimpleNamespace(now_s=5.0), ongoing_write_through={}, ongoing_load_back={}
                ),
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


def test_a_vain_try_is_not_repeated_until_something_has_changed() -> None:
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
def test_where_more_may_have_changed_every_try_is_made(fields: dict[str, Any]) -> None:
    scheduler = Trying(**fields)
    assert [scheduler.defers() for _ in range(3)] == [False] * 3


def test_no_try_is_deferred_while_nothing_runs_or_after_a_request_waited_for_a_prefix() -> None:
    scheduler = Trying()
    assert [scheduler.defers(running=0) for _ in range(3)] == [False] * 3
    assert [scheduler.defers() for _ in range(2)] == [False, True]
    extension_of(scheduler.tree_cache).is_prefix_awaited = True
    assert [scheduler.defers() for _ in range(3)] == [False, False, True]
