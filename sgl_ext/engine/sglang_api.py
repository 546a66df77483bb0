"""The only module that imports SGLang: every symbol of it that the extension uses.

An attribute of this module imports its symbol when it is read, for two reasons: plugins load
before most of SGLang may be imported, and hooks replace symbols after this module is imported.
A symbol is therefore looked up each time, and is never cached here.

Dotted paths of hooks stand in `sgl_ext.engine.hooks`. The objects behind these symbols have types
in `sgl_ext.engine.sglang_types`, or in its neighbour for HTTP.
"""

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

_OPENAI = "sglang.srt.entrypoints.openai"
_ANTHROPIC = "sglang.srt.entrypoints.anthropic"
_MANAGERS = "sglang.srt.managers"
_CACHE = "sglang.srt.mem_cache"
_CONTEXT = "sglang.srt.runtime_context"
_SPECULATIVE = "sglang.srt.speculative"
_ARGUMENTS = "sglang.srt.arg_groups.overrides"

ANY_PROCESS = (
    "sglang.srt.plugins.hook_registry:HookRegistry",
    "sglang.srt.plugins.hook_registry:HookType",
    f"{_CONTEXT}:get_context",
)
HTTP_PROCESS = (
    "sglang.srt.plugins:load_plugins",
    "sglang.launch_server:run_server",
    "sglang.srt.server_args:prepare_server_args",
    f"{_ARGUMENTS}:model_config_of",
    f"{_ARGUMENTS}:resolving_view",
    f"{_CACHE}.kv_cache_builder:uses_ssm_state",
    "sglang.srt.utils:kill_process_tree",
    "sglang.srt.utils.auth:AuthLevel",
    "sglang.srt.environ:envs",
    "sglang.srt.entrypoints.engine:logger",
    "sglang.srt.entrypoints.api_contract:generate_contract_error",
    "sglang.srt.entrypoints.http_server:app",
    "sglang.srt.entrypoints.http_server:available_models",
    "sglang.srt.entrypoints.http_server:get_global_state",
    f"{_ANTHROPIC}.protocol:AnthropicMessage",
    f"{_ANTHROPIC}.protocol:AnthropicMessagesRequest",
    f"{_ANTHROPIC}.serving:AnthropicServing",
    f"{_OPENAI}.protocol:ChatCompletionRequest",
    f"{_OPENAI}.protocol:ResponsesRequest",
    f"{_OPENAI}.protocol:ResponseToolState",
    f"{_OPENAI}.protocol:StructuralTag",
    f"{_OPENAI}.responses_adapters:decode_custom_tool_input_prefix",
    f"{_OPENAI}.serving_chat:FunctionCallParser",
    f"{_OPENAI}.serving_chat:ResponseTemplateReasoningDetector",
    f"{_OPENAI}.serving_chat:ResponseTemplateToolDetector",
    "sglang.srt.parser.jinja_template_utils:detect_jinja_template_content_format",
    f"{_OPENAI}.serving_chat:normalize_assistant_tool_call_arguments",
    f"{_OPENAI}.serving_chat:parallel_prompt_encode",
    "sglang.srt.parser.jinja_template_utils:process_content_for_template_format",
    "sglang.srt.function_call.core_types:ToolCallItem",
    "sglang.srt.constrained.json_schema_validation:validate_xgrammar_json_schema",
    f"{_MANAGERS}.io_struct:EmbeddingReqInput",
    f"{_MANAGERS}.io_struct:GenerateReqInput",
    f"{_MANAGERS}.io_struct:msgpack_decode",
    f"{_MANAGERS}.io_struct:msgpack_encode",
    f"{_MANAGERS}.kv_hints:KvHintAction",
    f"{_MANAGERS}.kv_hints:KvHintsEnvelope",
    f"{_MANAGERS}.kv_hints:decode_kv_hints_envelope",
)
SCHEDULER_PROCESS = (
    "sglang.srt.constrained.base_grammar_backend:InvalidGrammarObject",
    f"{_MANAGERS}.io_struct:AbortReq",
    f"{_MANAGERS}.schedule_policy:AddReqResult",
    f"{_MANAGERS}.schedule_policy:CLIP_MAX_NEW_TOKENS",
    f"{_MANAGERS}.schedule_batch:Req",
    f"{_MANAGERS}.schedule_batch:release_req",
    f"{_CACHE}.radix_cache:RadixKey",
    f"{_CACHE}.base_prefix_cache:EvictParams",
    f"{_CACHE}.base_prefix_cache:MatchPrefixParams",
    f"{_CACHE}.unified_cache.component_type:ComponentType",
    f"{_CACHE}.unified_radix_cache:UnifiedRadixCache",
    f"{_CACHE}.registry:register_radix_cache_backend",
    f"{_CACHE}.registry:create_unified_radix_cache",
    f"{_CACHE}.registry:default_radix_cache_factory",
    f"{_CACHE}.hicache_storage:HiCacheStorage",
    f"{_CACHE}.utils:get_hash_str",
    f"{_CONTEXT}:get_parallel",
    "sglang.srt.utils.rank_consensus_checker:assert_same",
)
DRAFTS = (
    f"{_SPECULATIVE}.spec_info:SpeculativeAlgorithm",
    f"{_SPECULATIVE}.spec_registry:CustomSpecAlgo",
    f"{_SPECULATIVE}.base_spec_worker:BaseSpecWorker",
    f"{_SPECULATIVE}.ngram_info:NgramVerifyInput",
    f"{_SPECULATIVE}.spec_utils:GrammarTree",
    f"{_SPECULATIVE}.spec_utils:build_grammar_vocab_mask",
    f"{_SPECULATIVE}.spec_utils:record_stream_for_v2_verify",
    "sglang.srt.model_executor.forward_batch_info:ForwardMode",
    f"{_MANAGERS}.utils:GenerationBatchResult",
    f"{_ARGUMENTS}:declare_resolution",
)
"""What drafts from context need; nothing of it is imported where they are off."""
WORKERS = (
    f"{_MANAGERS}.multi_tokenizer_mixin:get_main_process_id",
    f"{_MANAGERS}.multi_tokenizer_mixin:read_from_shared_memory",
    f"{_CONTEXT}:publish",
)
"""What a tokenizer worker needs; nothing of it is imported where there is one."""
_DECLARED = ANY_PROCESS + HTTP_PROCESS + SCHEDULER_PROCESS + DRAFTS + WORKERS
_PATHS = (path.split(":") for path in _DECLARED)
_MODULES = {name: module for module, name in _PATHS}

if TYPE_CHECKING:  # the other symbols are Any
    from sgl_ext.engine import sglang_http_types as http_types
    from sgl_ext.engine import sglang_types as types

    prepare_server_args: Callable[[Sequence[str]], types.ServerArgs]
    resolving_view: Callable[[types.ServerArgs], types.ResolvedArgs]
    get_global_state: Callable[[], http_types.GlobalState]
    AnthropicServing: Callable[[http_types.ServingChat], http_types.AnthropicServing]
    GenerateReqInput: Callable[..., http_types.GenerateReqInput]
    KvHintAction: Callable[..., http_types.KvHintAction]
    KvHintsEnvelope: Callable[..., http_types.KvHintsEnvelope]
    decode_kv_hints_envelope: Callable[[Any], http_types.KvHintsEnvelope]

    AddReqResult: types.AddReqResult
    RadixKey: Callable[..., types.RadixKey]
    EvictParams: Callable[..., types.EvictParams]
    ComponentType: types.ComponentType
    UnifiedRadixCache = types.TreeCache
    HiCacheStorage = types.Storage
    create_unified_radix_cache: Callable[..., types.TreeCache]
    default_radix_cache_factory: Callable[[types.TreeCacheBuildContext], types.TreeCache]
    get_parallel: Callable[[], types.ParallelContext]
    assert_same: Callable[..., None]


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"sglang_api declares no {name}")
    return getattr(sys.modules.get(module) or import_module(module), name)
