"""Admission in SGLang's own trees: what a request matched is there when it is admitted."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from sgl_ext.engine.scheduler import admission
from sgl_ext.engine.scheduler.request_state import Admission, state_of
from tests.engine.core.test_shared_prefixes import TOKENS, Tree, loaded, sglang

pytestmark = pytest.mark.filterwarnings("ignore")  # SGLang warns while it is imported

WAITING, RUNNING = 50, 0
PREFIX = 300


@pytest.fixture(params=["rust", "python"])
def tree(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tree]:
    monkeypatch.setattr(loaded("sgl_ext.engine.core.ranks"), "is_entry_rank", lambda: True)
    schedule = {"enable_priority_scheduling": True}
    with sglang("runtime_context").get_context().override_server_args(**schedule):
        yield Tree(request.param)


def request_of(name: str, priority: int, ids: range, max_new_tokens: int = 8) -> Any:
    batch = sglang("managers.schedule_batch")
    sampling = batch.SamplingParams(max_new_tokens=max_new_tokens)
    sampling.normalize(None)
    return batch.Req(name, "", array("q", ids), sampling, priority=priority)


def running_batch(tree: Tree, *requests: Any) -> Any:
    """Requests that run, and are released as SGLang releases them."""
    release = sglang("managers.schedule_batch").release_req

    def release_req(index: int, remaining: int) -> None:
        release(
            req=batch.reqs[index],
            remaing_req_count=remaining,
            req_to_token_pool=tree.rows,
            token_to_kv_pool_allocator=tree.memory,
            tree_cache=tree.cache,
            hisparse_coordinator=None,
        )

    def filter_batch(keep_indices: list[int]) -> None:
        batch.reqs = [batch.reqs[index] for index in keep_indices]

    batch = SimpleNamespace(reqs=list(requests), release_req=release_req, filter_batch=filter_batch)
    for req in requests:
        tree.admit(req)
        tree.cache.checkpoint(req, up_to=len(req.origin_input_ids))
        state_of(req).admission = Admission(RUNNING, 0.0)
    return batch


def adder_of(tree: Tree, batch: Any) -> Any:
    kind = sglang("managers.schedule_policy").PrefillAdder
    return kind(tree.page, tree.cache, tree.memory, batch, 0.0, TOKENS, TOKENS)


@pytest.mark.parametrize("new", [PREFIX - 100, PREFIX + 20])
def test_a_preemption_evicts_nothing_of_what_the_request_matched(tree: Tree, new: int) -> None:
    """The victims' tokens are stored later than the match, so recency alone would evict it. Nor
    does what it matched count as memory that it could take."""
    tree.insert_owned(list(range(PREFIX)))
    held = (TOKENS - PREFIX) // 2
    victims = [
        request_of(f"victim {number}", RUNNING, range(1000 * number, 1000 * number + held))
        for number in (1, 2)
    ]
    batch = running_batch(tree, *victims)
    assert tree.memory.available_size() == 0
    waiting = request_of("waiting", WAITING, range(PREFIX + new))
    waiting.init_next_round_input(tree.cache)
    assert waiting.prefix_len == PREFIX
    adder = adder_of(tree, batch)
    add = type(adder).add_one_req
    admission.add_one(add, adder, waiting, has_chunked_req=False, truncation_align_size=None)
    assert adder.can_run_list == [waiting]
    assert len(adder.preempt_list) == 1
    assert len(tree.cache.prefix_device_indices(waiting)) == PREFIX
    tree.cache.unlock(waiting.lock)
    tree.cache.sanity_check()
