"""The attributes of SGLang's scheduler, requests and radix cache that the extension uses, as types.

Strict mypy forbids every other attribute, and a start verifies that each of these exists on the
class that `stands_for` names (`sgl_ext.engine.sglang_check`).
"""

# mypy: disable-error-code="empty-body"

from array import array
from collections.abc import Callable, Sequence, Sized
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

Original = Callable[..., Any]
"""A function of SGLang's, as a hook around it gets it."""
_Class = TypeVar("_Class", bound=type)
_MANAGERS = "sglang.srt.managers"
_CACHE = "sglang.srt.mem_cache"


def stands_for(path: str) -> Callable[[_Class], _Class]:
    """Names the class of SGLang, as module:class, that has the attributes of the decorated one."""

    def note(described: _Class) -> _Class:
        described.__sglang__ = path  # type: ignore[attr-defined]
        return described

    return note


@stands_for("sglang.srt.server_args:ServerArgs")
class ServerArgs(Protocol):
    """SGLang's record of what the operator wrote. What is in effect, `sgl_ext.engine.arguments`
    says."""

    def resolve_once(self) -> None: ...
    def url(self) -> str: ...


@stands_for("sglang.srt.server_args:ServerArgs")
class ResolvedArgs(Protocol):
    """The same arguments as SGLang resolved them, by their names there."""

    admin_api_key: str | None
    api_key: str | None
    attention_backend: str | None
    attn_cp_size: int
    attn_dp_size: int
    chat_template: str | None
    chunked_prefill_size: int | None
    disable_overlap_schedule: bool
    disable_radix_cache: bool
    disable_priority_preemption: bool
    dcp_size: int
    decode_attention_backend: str | None
    decoupled_spec_role: str
    device: str
    disaggregation_bootstrap_port: int
    disaggregation_mode: str
    dist_init_addr: str | None
    dllm_algorithm: str | None
    dp_size: int
    dtype: str
    elastic_ep_backend: str | None
    enable_flexkv: bool
    enable_hierarchical_cache: bool
    enable_http2: bool
    enable_lmcache: bool
    enable_lora: bool | None
    enable_memory_saver: bool
    enable_pdmux: bool
    enable_priority_scheduling: bool
    enable_response_store: bool
    enable_streaming_session: bool
    enable_watermark: bool
    enable_prefill_delayer: bool
    sleep_on_idle: bool
    encoder_only: bool
    grammar_backend: str | None
    grpc_mode: bool
    grpc_port: int | None
    hicache_io_backend: str
    hicache_mem_layout: str
    hicache_ratio: float | None
    hicache_size: int
    hicache_storage_backend: str | None
    hicache_storage_backend_extra_config: str | None
    host: str
    incremental_streaming_output: bool
    kv_events_config: str | None
    json_model_override_args: str
    kv_cache_dtype: str
    language_only: bool
    load_format: str
    lora_paths: Any
    max_running_requests: int | None
    model_impl: str
    model_loader_extra_config: str
    model_path: str
    nnodes: int
    page_size: int
    pp_size: int
    prefill_attention_backend: str | None
    quantization: str | None
    quantization_param_path: str | None
    radix_cache_backend: str | None
    radix_eviction_policy: str
    reasoning_parser: str | None
    revision: str | None
    schedule_low_priority_values_first: bool
    schedule_policy: str
    skip_tokenizer_init: bool
    smg_grpc_mode: bool
    speculative_num_draft_tokens: int | None
    tokenizer_worker_num: int
    tool_call_parser: str | None
    use_ray: bool


@stands_for("sglang.srt.runtime_context:ParallelContext")
class ParallelContext(Protocol):
    """The ranks of this process."""

    attn_cp_rank: int
    attn_tp_rank: int
    dp_rank: int | None
    num_dp_ranks: int
    pp_rank: int
    tp_group: Any


@stands_for(f"{_MANAGERS}.schedule_batch:ReqKvInfo")
class ReqKvInfo(Protocol):
    cache_inserted_len: int
    cache_protected_len: int
    kv_committed_len: int
    kv_allocated_len: int


@stands_for("sglang.srt.sampling.sampling_params:SamplingParams")
class SamplingParams(Protocol):
    max_new_tokens: int


@stands_for("sglang.srt.sampling.sampling_batch_info:SamplingBatchInfo")
class SamplingBatchInfo(Protocol):
    grammars: list[Any] | None


@stands_for(f"{_MANAGERS}.schedule_batch:Req")
class Req(Protocol):
    rid: str
    priority: Any
    session: Any
    beam_group: Any
    return_logprob: bool
    skip_radix_cache_insert: bool
    input_embeds: Any
    extra_key: str | None
    cache_salt: str | None
    lora_id: str | None
    origin_input_ids: "array[int]"
    output_ids: "array[int]"
    full_untruncated_fill_ids: "array[int]"
    prefix_len: int
    extend_end: int | None
    num_matched_prefix_tokens: int
    cached_tokens: int
    cached_tokens_device: int
    cached_tokens_host: int
    cached_tokens_storage: int
    kv: ReqKvInfo
    lock: Any
    last_node: Any
    best_match_node: Any
    host_hit_length: int
    host_loaded_length: int
    kv_hints: Any
    to_finish: Any
    discard_output_reason: Any
    sampling_params: SamplingParams

    def finished(self) -> bool: ...
    def next_output_finishes_by_length(self) -> bool: ...
    def refresh_fill_ids(self) -> None: ...
    def owned_kv_len(self) -> int: ...
    def needs_host_load_back(self) -> bool: ...


@stands_for(f"{_CACHE}.unified_cache.unified_tree_core_interface:TreePathNodeInfo")
class TreePathNodeInfo(Protocol):
    node_id: int
    path_end: int


@stands_for(f"{_CACHE}.unified_cache.unified_tree_core_interface:UnifiedTreeCoreInterface")
class TreeCore(Protocol):
    is_eagle: bool

    def match_full_device_prefix(self, key: "RadixKey") -> tuple[int, int, int]: ...
    def is_full_device_evicted(self, node_id: int) -> bool: ...
    def is_backuped(self, node_id: int) -> bool: ...
    def get_prefix_hash_values(self, node_id: int) -> list[str]: ...
    def get_hash_values(self, node_id: int) -> list[str]: ...
    def collect_path_info(
        self, end_node_ids: Sequence[int]
    ) -> tuple[tuple[TreePathNodeInfo, ...], ...]: ...


@stands_for(f"{_CACHE}.radix_cache:RadixKey")
class RadixKey(Protocol):
    def page_aligned(self, page_size: int) -> "RadixKey": ...


@stands_for(f"{_CACHE}.base_prefix_cache:MatchResult")
class MatchResult(Protocol):
    device_prefix_len: int
    host_hit_length: int
    last_device_node: Any


@stands_for(f"{_CACHE}.base_prefix_cache:InsertParams")
class InsertParams(Protocol):
    priority: int


@stands_for(f"{_CACHE}.base_prefix_cache:InsertResult")
class InsertResult(Protocol):
    prefix_len: int


@stands_for(f"{_CACHE}.base_prefix_cache:EvictParams")
class EvictParams(Protocol):
    num_tokens: int
    swa_num_tokens: int
    mamba_num: int


@stands_for(f"{_CACHE}.base_prefix_cache:EvictResult")
class EvictResult(Protocol):
    num_tokens_evicted: int
    swa_num_tokens_evicted: int
    mamba_num_evicted: int


@stands_for(f"{_CACHE}.allocator.base:BaseTokenToKVPoolAllocator")
class KvAllocator(Protocol):
    size: int

    def available_size(self) -> int: ...


@stands_for(f"{_CACHE}.cache_init_params:CacheInitParams")
class CacheInitParams(Protocol):
    page_size: int
    is_eagle: bool
    token_to_kv_pool_allocator: KvAllocator


@stands_for(f"{_CACHE}.registry:TreeCacheBuildContext")
class TreeCacheBuildContext(Protocol):
    is_hybrid_swa: bool
    full_tokens_per_layer: int | None
    disable_radix_cache: bool


@stands_for(f"{_CACHE}.unified_cache.component_type:ComponentType")
class ComponentType(Protocol):
    FULL: "ComponentType"
    SWA: "ComponentType"
    MAMBA: "ComponentType"


@stands_for(f"{_MANAGERS}.cache_controller:HiCacheAck")
class HiCacheAck(Protocol):
    """A copy between device and host that was started."""

    num_tokens: int
    timing_enabled: bool
    start_event: Any
    finish_event: Any


@stands_for(f"{_MANAGERS}.cache_controller:HiCacheController")
class CacheController(Protocol):
    mem_pool_host: Any
    storage_backend: Any
    ack_load_queue: list[HiCacheAck]


@stands_for(f"{_CACHE}.unified_radix_cache:UnifiedRadixCache")
class TreeCache:
    """A class and not a Protocol, because the extension's cache inherits from it."""

    disable: bool
    page_size: int
    tree_core: TreeCore
    cache_controller: CacheController | None
    is_write_back: bool
    load_back_threshold: int
    ongoing_write_through: Sized
    ongoing_load_back: Sized
    ongoing_backup: Sized
    write_through_threshold: int
    req_to_token_pool: Any
    token_to_kv_pool_allocator: KvAllocator
    host_memory_mode: str

    def __init__(self, params: CacheInitParams) -> None: ...
    def init_hicache(self, server_args: Any, params: CacheInitParams) -> None: ...
    def supports_swa(self) -> bool: ...
    def supports_mamba(self) -> bool: ...
    def supports_fast_match_prefix(self) -> bool: ...
    def full_evictable_size(self) -> int: ...
    def swa_evictable_size(self) -> int: ...
    def mamba_evictable_size(self) -> int: ...
    def lock(self, node: Any) -> Any: ...
    def unlock(self, lock: Any) -> None: ...
    def inc_host_lock_ref(self, node_id: Any) -> Any: ...
    def dec_host_lock_ref(self, node_id: Any, params: Any) -> Any: ...
    def backup_node_for_write_back(self, node_id: Any) -> bool: ...
    def write_backup_storage(self, node_id: Any) -> None: ...
    def checkpoint(self, req: Req, *, up_to: int, **kwargs: Any) -> None: ...
    def match_prefix(self, params: Any) -> MatchResult: ...
    def insert(self, params: InsertParams) -> InsertResult: ...
    def evict(self, params: EvictParams) -> EvictResult: ...
    def evict_for_alloc(self, params: EvictParams, **kwargs: Any) -> EvictResult: ...
    def evict_host(self, num_tokens: int, *component_type: Any) -> int: ...
    def reset(self) -> None: ...
    def ready_to_load_host_cache(self) -> int: ...
    def loading_check(self, finish_count: int | None = None) -> None: ...
    def _component_available_size(self, component_type: ComponentType) -> int: ...


class Tensor(Protocol):
    """A tensor of torch's in host memory."""

    def __getitem__(self, index: Any) -> "Tensor": ...
    def tolist(self) -> list[int]: ...


@stands_for(f"{_CACHE}.pool_host.mha:MHATokenToKVPoolHost")
class HostPool(Protocol):
    """A pool of host memory. Only some kinds state where a page's bytes lie."""

    dtype: Any
    end_layer: int
    layout: str
    page_size: int
    start_layer: int
    storage_format_tag: str | None

    def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]: ...


@stands_for(f"{_CACHE}.hicache_storage:HiCacheStorageConfig")
class StorageConfig(Protocol):
    attn_cp_rank: int
    attn_cp_size: int
    extra_config: dict[str, Any] | None
    is_mla_model: bool
    model_name: str | None
    pp_rank: int
    pp_size: int
    tp_rank: int
    tp_size: int


@stands_for(f"{_CACHE}.hicache_storage:HiCacheStorageExtraInfo")
class StorageExtraInfo(Protocol):
    prefix_keys: list[str] | None


@stands_for(f"{_CACHE}.hicache_storage:HiCacheStorage")
class Storage:
    """A class and not a Protocol, because the shared tier inherits from it."""

    def register_mem_pool_host(self, mem_pool_host: HostPool) -> None: ...
    def register_mem_host_pool_v2(self, host_pool: HostPool, host_pool_name: str) -> None: ...


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
    new_chunked_req: Req | None
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
    CONTINUE: "AddReqResult"
    NO_TOKEN: "AddReqResult"
    OTHER: "AddReqResult"


@stands_for(f"{_MANAGERS}.schedule_policy:SchedulePolicy")
class SchedulePolicy(Protocol):
    tree_cache: TreeCache
    policy: Any
    enable_priority_scheduling: bool
    schedule_low_priority_values_first: bool


@stands_for(f"{_MANAGERS}.scheduler_components.pool_stats_observer:PoolStats")
class PoolStats(Protocol):
    def get_kv_token_stats(self) -> tuple[int, float]: ...


@stands_for(f"{_MANAGERS}.scheduler_components.pool_stats_observer:SchedulerPoolStatsObserver")
class PoolStatsObserver(Protocol):
    def get_pool_stats(self) -> PoolStats: ...


@stands_for(f"{_MANAGERS}.scheduler_components.load_inquirer:SchedulerLoadInquirer")
class LoadInquirer(Protocol):
    pool_stats_observer: PoolStatsObserver
    max_total_num_tokens: int

    def get_num_waiting_uncached_tokens(self) -> int: ...


@stands_for(f"{_MANAGERS}.scheduler_components.load_publisher:SchedulerLoadPublisher")
class LoadPublisher(Protocol):
    enable: bool


@stands_for(f"{_MANAGERS}.scheduler_components.output_streamer:SchedulerOutputStreamer")
class OutputStreamer(Protocol):
    tree_cache: TreeCache


@stands_for("sglang.srt.constrained.base_grammar_backend:BaseGrammarBackend")
class GrammarBackend(Protocol):
    cache: dict[tuple[str, str], Any]

    def reset(self) -> None: ...


@stands_for("sglang.srt.constrained.grammar_manager:GrammarManager")
class GrammarManager(Protocol):
    def has_waiting_grammars(self) -> bool: ...


@stands_for(f"{_MANAGERS}.scheduler:Scheduler")
class Scheduler(Protocol):
    tree_cache: TreeCache
    token_to_kv_pool_allocator: KvAllocator
    waiting_queue: list[Req]
    running_batch: ScheduleBatch
    last_batch: ScheduleBatch | None
    chunked_req: Req | None
    _pending_chunked_abort_req: Req | None
    chunked_prefill_size: int | None
    max_running_requests: int
    max_req_len: int
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
    total_prefill_busy_us: int
    total_prefill_uncached_tokens: int

    def collect_inflight_reqs(self) -> Sequence[Req]: ...
    def abort_request(self, recv_req: Any) -> None: ...
    def stash_chunked_request(self, req: Req) -> None: ...
