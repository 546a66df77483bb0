"""The attributes of SGLang's scheduler that the extension uses, as types.

See `sgl_ext.engine.sglang_types`, which has those of requests and of the radix cache.
"""

# mypy: disable-error-code="empty-body"

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from sgl_ext.engine.sglang_types import KvAllocator, Req, TreeCache, stands_for

_MANAGERS = "sglang.srt.managers"
_PARTS = f"{_MANAGERS}.scheduler_components"
_CACHE = "sglang.srt.mem_cache"


@stands_for("sglang.srt.model_executor.forward_batch_info:ForwardMode")
class ForwardMode(Protocol):
    def is_extend(self) -> bool: ...


@stands_for(f"{_MANAGERS}.schedule_batch:ScheduleBatch")
class ScheduleBatch(Protocol):
    reqs: list[Req]
    extend_num_tokens: int | None
    forward_mode: ForwardMode

    def is_empty(self) -> bool: ...
    def is_dllm(self) -> bool: ...
    def batch_size(self) -> int: ...
    def release_req(self, idx: int, remaing_req_count: int) -> None: ...
    def filter_batch(self, *, keep_indices: list[int]) -> None: ...


@stands_for(f"{_MANAGERS}.schedule_batch:NextBatchPlan")
class NextBatchPlan(Protocol):
    batch_to_run: ScheduleBatch | None
    running_batch: ScheduleBatch


@stands_for(f"{_CACHE}.prefill_budget:PrefillBudget")
class PrefillBudget(Protocol):
    total_offset: int


@stands_for(f"{_MANAGERS}.schedule_policy:PrefillAdder")
class PrefillAdder(Protocol):
    tree_cache: TreeCache
    running_batch: ScheduleBatch | None
    can_run_list: list[Req]
    preempt_list: list[Req]
    rem_chunk_tokens: int | None
    per_req_token_overhead: int
    memory_budget: PrefillBudget

    @property
    def rem_total_tokens(self) -> int: ...
    def _get_running_request_total_token_offset(self, req: Req) -> int: ...
    def _lock_node(
        self, last_node: Any, *, lock_host: bool = False
    ) -> AbstractContextManager[None]: ...


@stands_for(f"{_MANAGERS}.schedule_policy:AddReqResult")
class AddReqResult(Protocol):
    CONTINUE: AddReqResult
    NO_TOKEN: AddReqResult
    OTHER: AddReqResult


@stands_for(f"{_MANAGERS}.schedule_policy:SchedulePolicy")
class SchedulePolicy(Protocol):
    tree_cache: TreeCache
    policy: Any
    enable_priority_scheduling: bool
    schedule_low_priority_values_first: bool


@stands_for(f"{_PARTS}.pool_stats_observer:PoolStats")
class PoolStats(Protocol):
    def get_kv_token_stats(self) -> tuple[int, float]: ...


@stands_for(f"{_PARTS}.pool_stats_observer:SchedulerPoolStatsObserver")
class PoolStatsObserver(Protocol):
    def get_pool_stats(self) -> PoolStats: ...


@stands_for(f"{_PARTS}.load_inquirer:SchedulerLoadInquirer")
class LoadInquirer(Protocol):
    pool_stats_observer: PoolStatsObserver
    max_total_num_tokens: int

    def get_num_waiting_uncached_tokens(self) -> int: ...


@stands_for(f"{_PARTS}.load_publisher:SchedulerLoadPublisher")
class LoadPublisher(Protocol):
    enable: bool


@stands_for(f"{_PARTS}.output_streamer:SchedulerOutputStreamer")
class OutputStreamer(Protocol):
    tree_cache: TreeCache


@stands_for("sglang.srt.constrained.grammar_manager:GrammarManager")
class GrammarManager(Protocol):
    def has_waiting_grammars(self) -> bool: ...


@stands_for(f"{_MANAGERS}.scheduler:Scheduler")
class Scheduler(Protocol):
    tree_cache: TreeCache
    token_to_kv_pool_allocator: KvAllocator
    waiting_queue: list[Req]
    running_batch: ScheduleBatch
    chunked_req: Req | None
    chunked_prefill_size: int | None
    max_running_requests: int
    grammar_manager: GrammarManager
    load_inquirer: LoadInquirer
    load_publisher: LoadPublisher
    disaggregation_mode: Any
    prefill_delayer: Any
    min_free_slots_delayer: Any
    enable_priority_preemption: bool
    enable_hicache_storage: bool
    enable_hisparse: bool
    enable_lmcache: bool
    enable_lora: bool
    require_mlp_sync: bool

    def collect_inflight_reqs(self) -> Sequence[Req]: ...
    def abort_request(self, recv_req: Any) -> None: ...
