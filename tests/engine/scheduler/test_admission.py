"""Admission in SGLang's own trees: what a request matched is there when it is admitted."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from sgl_ext.engine.scheduler import admission
from sgl_ext.engine.scheduler.state import Admission, state_of
from tests.engine.core.test_shared_prefixes import TOKENS, Tree, loaded, sglang

pytestmark = pytest.mark.filterwarnings("ignore")  # SGLang warns while it is imported

WAITING, RUNNING = 50, 0
PREFIX = 300


@pytest.fixture(params=["rust", "python"])
def tree(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tree]:
    monkeypatch.setattr(loaded("sgl_ext.engine.scheduler.state"), "is_entry_rank", lambda: True)
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


def victims_of(tree: Tree) -> list[Any]:
    """Two requests that share out the memory that is free."""
    held = tree.memory.available_size() // 2
    ids = (range(1000 * number, 1000 * number + held) for number in (1, 2))
    return [request_of(f"victim {one.start}", RUNNING, one) for one in ids]


def admit(tree: Tree, batch: Any, waiting: Any) -> None:
    """Admits a request at the cost of one that runs."""
    kind = sglang("managers.schedule_policy").PrefillAdder
    adder = kind(tree.page, tree.cache, tree.memory, batch, 0.0, TOKENS, TOKENS)
    given = {"has_chunked_req": False, "truncation_align_size": None}
    admission.add_one(kind.add_one_req, adder, waiting, **given)
    assert adder.can_run_list == [waiting]
    assert len(adder.preempt_list) == 1


@pytest.mark.parametrize("ending", [0, 1])
def test_a_request_that_ends_with_its_next_token_is_not_preempted(tree: Tree, ending: int) -> None:
    """With overlap scheduling that token may be computed already."""
    victims = victims_of(tree)
    for one in victims:
        one.output_ids.extend([1, 2])
    victims[ending].sampling_params.max_new_tokens = 3
    batch = running_batch(tree, *victims)
    waiting = request_of("waiting", WAITING, range(5000, 5000 + PREFIX))
    waiting.init_next_round_input(tree.cache)
    admit(tree, batch, waiting)
    assert batch.reqs == [victims[ending]]


@pytest.mark.parametrize("new", [PREFIX - 100, PREFIX + 20])
def test_a_preemption_evicts_nothing_of_what_the_request_matched(tree: Tree, new: int) -> None:
    """The victims' tokens are stored later than the match, so recency alone would evict it. Nor
    does what it matched count as memory that it could take."""
    tree.insert_owned(list(range(PREFIX)))
    batch = running_batch(tree, *victims_of(tree))
    assert tree.memory.available_size() == 0
    waiting = request_of("waiting", WAITING, range(PREFIX + new))
    waiting.init_next_round_input(tree.cache)
    assert waiting.prefix_len == PREFIX
    admit(tree, batch, waiting)
    assert len(tree.cache.prefix_device_indices(waiting)) == PREFIX
    tree.cache.unlock(waiting.lock)
    tree.cache.sanity_check()


@pytest.mark.parametrize("tree", ["python"], indirect=True)  # the other hides its nodes
def test_a_preemption_leaves_what_the_request_matched_on_the_device_and_on_the_host(
    tree: Tree,
) -> None:
    """With HiCache an evicted node stays in the tree without its memory on the device. Its lock
    would succeed, and the request would read the memory of another."""
    core = tree.cache.tree_core
    core.set_hicache_enabled()
    full = loaded("sglang.srt.mem_cache.unified_cache.component_type").ComponentType.FULL
    on_host = 100
    tree.insert_owned(list(range(PREFIX + on_host)))
    assert tree.matched(list(range(PREFIX)), None) == PREFIX  # splits the node
    node = core.node_by_id(tree.match(list(range(PREFIX + on_host)), None).last_device_node)
    for one in (node, node.parent):
        one.component_data[full].host_value = one.component_data[full].value.clone()
    tree.evict(on_host)
    batch = running_batch(tree, *victims_of(tree))
    waiting = request_of("waiting", WAITING, range(PREFIX + on_host + 20))
    waiting.init_next_round_input(tree.cache)
    assert (waiting.prefix_len, waiting.host_hit_length) == (PREFIX, on_host)
    release = batch.release_req

    def release_req(index: int, remaining: int) -> None:
        release(index, remaining)
        tree.cache.evict_host(TOKENS)

    batch.release_req = release_req
    admit(tree, batch, waiting)
    assert len(tree.cache.prefix_device_indices(waiting)) == PREFIX
    assert core.node_by_id(node.id) is node
    tree.cache.unlock(waiting.lock)


def test_no_second_prompt_is_cut_into_chunks_whoever_it_could_preempt(tree: Tree) -> None:
    """SGLang tracks one unfinished prompt, and ends with an assertion at a second."""
    batch = running_batch(tree, *victims_of(tree))
    kind = sglang("managers.schedule_policy").PrefillAdder
    adder = kind(tree.page, tree.cache, tree.memory, batch, 0.0, TOKENS, PREFIX)
    waiting = request_of("waiting", WAITING, range(5000, 5000 + 2 * PREFIX))
    waiting.init_next_round_input(tree.cache)
    given = {"has_chunked_req": True, "truncation_align_size": None}
    result = admission.add_one(kind.add_one_req, adder, waiting, **given)
    results = sglang("managers.schedule_policy").AddReqResult
    assert (result, adder.can_run_list, len(batch.reqs)) == (results.OTHER, [], 2)
    given["has_chunked_req"] = False
    admission.add_one(kind.add_one_req, adder, waiting, **given)
    assert adder.new_chunked_req is waiting
