"""Jobs of the prefiller, with a scheduler whose answers the tests choose."""

from __future__ import annotations

import asyncio
import itertools
import time
import warnings
from array import array
from collections.abc import AsyncIterator, Callable
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sgl_ext.engine.core.hints import part_of
from sgl_ext.engine.core.request_context import RequestContext
from sgl_ext.engine.prefill_ahead.prefiller import MOST_JOBS, Job, Prefiller
from tests.waiting import HANG_S

SIZES = {"page_size": 1, "chunked_prefill_size": None}
ARGS: Any = SimpleNamespace(**SIZES, dp_size=1, attn_dp_size=1, dcp_size=1)
Answer = Callable[[Any], dict[str, Any]]


class Manager:
    """The part of SGLang's manager that is used. `answer` gets each slice."""

    def __init__(self, answer: Answer) -> None:
        self.rid_to_state: dict[str, Any] = {}
        self.sent: list[Any] = []
        self.mm_processor = None
        self.request_logger = SimpleNamespace(log_requests=False)
        self.dump_requests_folder = self.crash_dump_folder = ""
        is_exported = SimpleNamespace(exporter_enabled=lambda: False)
        self.request_metrics_exporter_manager = is_exported
        self._answer = answer

    def ends(self) -> list[int]:
        """How many tokens each slice has."""
        return [part_of(request)[1] for request in self.sent]

    async def generate_request(self, request: Any, _: Any) -> AsyncIterator[dict[str, Any]]:
        self.sent.append(request)
        yield {"meta_info": self._answer(request)}


class Tree:
    """An idle scheduler, and a cache of what it computed."""

    def __init__(self, slice_tokens: int, cached: int = 0, on_host: int = 0) -> None:
        """on_host: how many tokens after the cached ones the host has."""
        self.cached, self.on_host = cached, on_host
        self._slice_tokens = slice_tokens

    def __call__(self, request: Any) -> dict[str, Any]:
        length, had = part_of(request)[1], self.cached
        on_host = min(self.on_host, max(length - had, 0))
        if length - had <= 0:
            return refused("too_short", had)
        if length - had - on_host > self._slice_tokens:
            return refused("too_long", had, on_host)
        self.cached, self.on_host = length, self.on_host - on_host
        return {
            "cached_tokens": had + on_host,
            "cached_tokens_details": {"device": had, "host": on_host},
            "finish_reason": {"type": "length"},
        }


def refused(why: str, cached: int, on_host: int = 0) -> dict[str, Any]:
    return {"finish_reason": {"type": "abort", "message": f"{why} {cached} {on_host}"}}


def job(name: str = "one", tokens: int = 1000, **fields: Any) -> Job:
    asked: Any = SimpleNamespace(extra_key="adapter", cache_salt="salt", lora_path=None)
    context = RequestContext("/v1/messages", {"messages": []})
    return Job(name, array("q", range(tokens)), asked, context, **fields)


async def worked(prefiller: Prefiller, *jobs: Job) -> None:
    """Runs a prefiller until these jobs have ended."""
    working = asyncio.create_task(prefiller.run())
    try:
        async with asyncio.timeout(HANG_S):
            for one in jobs:
                await one.done.wait()
    finally:
        working.cancel()


@pytest.fixture(autouse=True)
def sglang(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SGLEXT_ENGINE_FOLDER", str(tmp_path))
    with warnings.catch_warnings(action="ignore"):  # SGLang's, while it is imported
        import_module("sglang.srt.managers.io_struct")


async def test_a_prompt_is_computed_in_slices_from_where_it_is_cached() -> None:
    manager = Manager(Tree(256, cached=100))
    one = job()
    prefiller = Prefiller(manager, ARGS, 256)
    prefiller.put(one)
    await worked(prefiller, one)
    assert manager.ends() == [1000, 356, 612, 868, 1000]
    assert (one.cached_tokens, one.prefilled_tokens) == (100, 900)
    assert (one.is_complete, one.reason) == (True, "")
    for request in manager.sent:
        assert request.sampling_params == {"max_new_tokens": 0}
        assert (request.extra_key, request.cache_salt) == ("adapter", "salt")
        assert not request.log_metrics


async def test_one_slice_loads_what_the_host_has_however_much() -> None:
    manager, one = Manager(Tree(256, cached=100, on_host=9_900)), job(tokens=10_000)
    prefiller = Prefiller(manager, ARGS, 256)
    prefiller.put(one)
    await worked(prefiller, one)
    assert manager.ends() == [10_000]
    assert (one.cached_tokens, one.loaded_tokens, one.prefilled_tokens) == (100, 9_900, 0)
    assert (one.is_complete, one.reason) == (True, "")


async def test_what_follows_a_loaded_prefix_is_computed_in_slices() -> None:
    manager, one = Manager(Tree(256, cached=100, on_host=8_900)), job(tokens=10_000)
    prefiller = Prefiller(manager, ARGS, 256)
    prefiller.put(one)
    await worked(prefiller, one)
    assert manager.ends() == [10_000, 9_256, 9_512, 9_768, 10_000]
    assert (one.cached_tokens, one.loaded_tokens, one.prefilled_tokens) == (100, 8_900, 1_000)


async def test_a_load_that_finds_no_memory_has_reached_nothing() -> None:
    manager, one = Manager(lambda _: refused("memory", 100, 900)), job()
    prefiller = Prefiller(manager, ARGS, 256)
    prefiller.put(one)
    await worked(prefiller, one)
    assert (one.reached_tokens, one.loaded_tokens, one.reason) == (100, 0, "memory")


async def test_the_tokens_of_a_prompt_are_sent_once() -> None:
    """Not once for each slice, of which a prompt of a million tokens has hundreds."""
    manager = Manager(Tree(256))
    one = job(tokens=100_000)
    ids = one.ids
    prefiller = Prefiller(manager, ARGS, 256)
    prefiller.put(one)
    await worked(prefiller, one)
    whole, *others = manager.sent
    assert len(others) > 390
    assert whole.input_ids is ids
    assert [list(request.input_ids) for request in others] == [
        [ids[end - 1]] for end in manager.ends()[1:]
    ]
    assert len({part_of(request)[0] for request in manager.sent}) == 1


async def test_a_prompt_that_the_scheduler_does_not_hold_is_sent_again() -> None:
    tree, held = Tree(256), [True, True, False]

    def answer(request: Any) -> dict[str, Any]:
        is_whole = len(request.input_ids) == part_of(request)[1]
        is_held = held.pop(0) if held else True
        return tree(request) if is_whole or is_held else refused("unheld", 0)

    manager, one = Manager(answer), job()
    prefiller = Prefiller(manager, ARGS, 256)
    prefiller.put(one)
    await worked(prefiller, one)
    assert one.is_complete
    assert [len(request.input_ids) for request in manager.sent] == [1000, 1, 1, 1000, 1, 1, 1]
    assert manager.ends() == [1000, 256, 512, 1000, 512, 768, 1000]


async def test_what_sglang_logs_is_a_list() -> None:
    manager, one = Manager(Tree(256)), job()
    manager.request_logger.log_requests = True
    prefiller = Prefiller(manager, ARGS, 256)
    prefiller.put(one)
    await worked(prefiller, one)
    assert {type(request.input_ids) for request in manager.sent} == {list}


async def test_an_ended_job_holds_no_prompt() -> None:
    """Guesses are remembered for long after their job."""
    one = job()
    one.request.sampling_params = {"json_schema": "long"}
    prefiller = Prefiller(Manager(Tree(256)), ARGS, 256)
    prefiller.put(one)
    await worked(prefiller, one)
    assert (one.total, len(one.ids), one.request.input_ids) == (1000, 0, None)
    assert one.request.sampling_params is None
    assert one.context.body is None


@pytest.mark.parametrize("chunk", [-1, 128])
async def test_without_chunks_slices_are_as_long_as_the_setting_says(chunk: int) -> None:
    longest = chunk if chunk > 0 else 256
    manager, one = Manager(Tree(longest, cached=100)), job()
    args = SimpleNamespace(**vars(ARGS) | {"chunked_prefill_size": chunk})
    prefiller = Prefiller(manager, args, 256)
    prefiller.put(one)
    await worked(prefiller, one)
    assert one.is_complete
    ends = [100, *manager.ends()[1:]]
    assert max(end - begin for begin, end in pairwise(ends)) == longest


async def test_slices_end_with_the_pages_that_decode_context_parallelism_makes_longer() -> None:
    manager, one = Manager(Tree(256)), job()
    args = SimpleNamespace(**vars(ARGS) | {"page_size": 16, "dcp_size": 4})
    prefiller = Prefiller(manager, args, 200)
    prefiller.put(one)
    await worked(prefiller, one)
    assert [end % 64 for end in manager.ends()[1:-1]] == [0] * 5


async def test_slices_say_for_which_request_they_run() -> None:
    manager = Manager(Tree(256))
    one = job(purpose="standby")
    one.context.request_id = "req_1"
    prefiller = Prefiller(manager, ARGS, 256)
    prefiller.put(one)
    await worked(prefiller, one)
    names = [request.rid for request in manager.sent]
    assert all(name.endswith("~standby~req_1") for name in names)
    pairs = [(a, b) for a in names for b in names if a is not b]
    assert not any(b.startswith(a) for a, b in pairs)


async def test_slices_grow_to_take_a_fixed_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = SimpleNamespace(now_s=0.0)
    tree = Tree(2048)

    def slow(request: Any) -> dict[str, Any]:
        before = tree.cached
        meta = tree(request)
        clock.now_s += (tree.cached - before) / 4000  # so that 50 ms are 200 tokens
        return meta

    monkeypatch.setattr(time, "monotonic", lambda: clock.now_s)
    manager = Manager(slow)
    one = job(tokens=4000, deadline_s=1e9)
    prefiller = Prefiller(manager, ARGS, 2048)
    prefiller.put(one)
    await worked(prefiller, one)
    ends = manager.ends()[1:]
    lengths = [after - before for before, after in itertools.pairwise(ends)][:-1]
    assert lengths[0] < 256
    assert 199 <= lengths[-1] <= 201


async def test_a_cached_prompt_takes_one_request() -> None:
    manager = Manager(Tree(256, cached=5000))
    one = job()
    prefiller = Prefiller(manager, ARGS, 256)
    prefiller.put(one)
    await worked(prefiller, one)
    assert len(manager.sent) == 1
    assert (one.is_complete, one.prefilled_tokens) == (True, 0)


async def test_a_slice_is_sent_again_to_a_busy_scheduler() -> None:
    tree, refusals = Tree(2000), [refused("busy", 0)] * 2
    manager = Manager(lambda request: refusals.pop() if refusals else tree(request))
    one = job()
    prefiller = Prefiller(manager, ARGS, 2000)
    prefiller.put(one)
    await worked(prefiller, one)
    assert len(manager.sent) == 3
    assert one.is_complete


@pytest.mark.parametrize(
    ("meta", "why"),
    [
        (refused("memory", 300), "memory"),
        (refused("unheld", 0), "failed"),
        ({"finish_reason": {"type": "abort", "message": "too long"}}, "failed"),
        ({"finish_reason": None}, "failed"),
    ],
)
async def test_a_rejected_job_is_dropped(meta: dict[str, Any], why: str) -> None:
    manager = Manager(lambda _: meta)
    one, other = job("one"), job("other")
    prefiller = Prefiller(manager, ARGS, 256)
    prefiller.put(one)
    prefiller.put(other)
    await worked(prefiller, one, other)
    assert (one.reason, other.reason) == (why, why)
    assert not one.is_complete


async def test_no_slice_is_sent_while_a_real_request_runs() -> None:
    manager = Manager(Tree(2000))
    manager.rid_to_state["real"] = None
    prefiller = Prefiller(manager, ARGS, 2000)
    one = job()
    prefiller.put(one)
    working = asyncio.create_task(worked(prefiller, one))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not manager.sent
    manager.rid_to_state.clear()
    await working
    assert one.is_complete


async def test_a_newer_job_replaces_an_older_one() -> None:
    prefiller = Prefiller(Manager(Tree(2000)), ARGS, 2000)
    older, newer = job(), job()
    prefiller.put(older)
    prefiller.put(newer)
    assert (older.done.is_set(), older.reason) == (True, "replaced")
    assert prefiller.drop("one", "deleted")
    assert not prefiller.drop("one", "deleted")
    assert newer.reason == "deleted"


async def test_of_too_many_jobs_the_oldest_is_dropped() -> None:
    prefiller = Prefiller(Manager(Tree(2000)), ARGS, 2000)
    jobs = [job(f"{number}", 20) for number in range(MOST_JOBS + 1)]
    for one in jobs:
        prefiller.put(one)
    assert [one.reason for one in jobs[:2]] == ["crowded", ""]
    await worked(prefiller, *jobs)
    assert all(one.is_complete for one in jobs[1:])


async def test_a_late_job_is_dropped() -> None:
    prefiller = Prefiller(Manager(Tree(2000)), ARGS, 2000)
    late, other = job("late", deadline_s=time.monotonic() - 1), job("other")
    prefiller.put(late)
    prefiller.put(other)
    await worked(prefiller, late, other)
    assert (late.reason, other.is_complete) == ("late", True)


async def test_after_one_slice_that_can_never_run_no_other_is_sent() -> None:
    """With sliding windows or Mamba layers."""
    manager = Manager(lambda _: refused("unsupported", 0))
    prefiller, first, second = Prefiller(manager, ARGS, 256), job("one"), job("two")
    for one in (first, second):
        prefiller.put(one)
    assert prefiller.is_supported
    await worked(prefiller, first, second)
    third = job("three")
    prefiller.put(third)
    assert [one.reason for one in (first, second, third)] == ["unsupported"] * 3
    assert (prefiller.is_supported, len(manager.sent), len(prefiller)) == (False, 1, 0)
