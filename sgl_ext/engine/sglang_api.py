"""The only module that imports SGLang: every symbol of it that the extension uses.

An attribute of this module imports its symbol when it is read, for two reasons: plugins load
before most of SGLang may be imported, and hooks replace symbols after this module is imported.
A symbol is therefore looked up each time, and is never cached here.

Dotted paths of hooks stand in `sgl_ext.engine.hooks`. The objects behind these symbols have types
in `sgl_ext.engine.sglang_types` and its neighbours for the scheduler and for HTTP.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

_CHAT = "sglang.srt.entrypoints.openai.serving_chat"
_OPENAI = "sglang.srt.entrypoints.openai.protocol"
_ANTHROPIC = "sglang.srt.entrypoints.anthropic"
_MANAGERS = "sglang.srt.managers"
_CACHE = "sglang.srt.mem_cache"
_CONTEXT = "sglang.srt.runtime_context"

ANY_PROCESS = {
    "HookRegistry": "sglang.srt.plugins.hook_registry:HookRegistry",
    "HookType": "sglang.srt.plugins.hook_registry:HookType",
}
HTTP_PROCESS = {
    "load_plugins": "sglang.srt.plugins:load_plugins",
    "run_server": "sglang.launch_server:run_server",
    "prepare_server_args": "sglang.srt.server_args:prepare_server_args",
    "kill_process_tree": "sglang.srt.utils:kill_process_tree",
    "envs": "sglang.srt.environ:envs",
    "http_app": "sglang.srt.entrypoints.http_server:app",
    "get_global_state": "sglang.srt.entrypoints.http_server:get_global_state",
    "AnthropicMessage": f"{_ANTHROPIC}.protocol:AnthropicMessage",
    "AnthropicMessagesRequest": f"{_ANTHROPIC}.protocol:AnthropicMessagesRequest",
    "AnthropicServing": f"{_ANTHROPIC}.serving:AnthropicServing",
    "ChatCompletionRequest": f"{_OPENAI}:ChatCompletionRequest",
    "ResponseToolState": f"{_OPENAI}:ResponseToolState",
    "FunctionCallParser": f"{_CHAT}:FunctionCallParser",
    "ResponseTemplateReasoningDetector": f"{_CHAT}:ResponseTemplateReasoningDetector",
    "ResponseTemplateToolDetector": f"{_CHAT}:ResponseTemplateToolDetector",
    "normalize_assistant_tool_call_arguments": (f"{_CHAT}:normalize_assistant_tool_call_arguments"),
    "parallel_prompt_encode": f"{_CHAT}:parallel_prompt_encode",
    "GenerateReqInput": f"{_MANAGERS}.io_struct:GenerateReqInput",
    "KvHintAction": f"{_MANAGERS}.kv_hints:KvHintAction",
    "KvHintsEnvelope": f"{_MANAGERS}.kv_hints:KvHintsEnvelope",
    "decode_kv_hints_envelope": f"{_MANAGERS}.kv_hints:decode_kv_hints_envelope",
}
SCHEDULER_PROCESS = {
    "AbortReq": f"{_MANAGERS}.io_struct:AbortReq",
    "AddReqResult": f"{_MANAGERS}.schedule_policy:AddReqResult",
    "CLIP_MAX_NEW_TOKENS": f"{_MANAGERS}.schedule_policy:CLIP_MAX_NEW_TOKENS",
    "release_req": f"{_MANAGERS}.schedule_batch:release_req",
    "RadixKey": f"{_CACHE}.radix_cache:RadixKey",
    "EvictParams": f"{_CACHE}.base_prefix_cache:EvictParams",
    "MatchPrefixParams": f"{_CACHE}.base_prefix_cache:MatchPrefixParams",
    "ComponentType": f"{_CACHE}.unified_cache.component_type:ComponentType",
    "UnifiedRadixCache": f"{_CACHE}.unified_radix_cache:UnifiedRadixCache",
    "register_radix_cache_backend": f"{_CACHE}.registry:register_radix_cache_backend",
    "create_unified_radix_cache": f"{_CACHE}.registry:create_unified_radix_cache",
    "default_radix_cache_factory": f"{_CACHE}.registry:default_radix_cache_factory",
    "get_memory": f"{_CONTEXT}:get_memory",
    "get_parallel": f"{_CONTEXT}:get_parallel",
    "get_schedule": f"{_CONTEXT}:get_schedule",
}
_SYMBOLS = {
    name: path.split(":") for name, path in (ANY_PROCESS | HTTP_PROCESS | SCHEDULER_PROCESS).items()
}

if TYPE_CHECKING:
    from sgl_ext.engine import sglang_http_types as http_types
    from sgl_ext.engine import sglang_scheduler_types as scheduler_types
    from sgl_ext.engine import sglang_types as types

    HookRegistry: Any
    HookType: Any

    load_plugins: Callable[[], None]
    run_server: Callable[[Any], None]
    prepare_server_args: Callable[[list[str]], http_types.ServerArgs]
    kill_process_tree: Callable[..., None]
    envs: Any
    http_app: Any
    get_global_state: Callable[[], http_types.GlobalState]
    AnthropicMessage: Any
    AnthropicMessagesRequest: Callable[..., Any]
    AnthropicServing: Callable[[http_types.ServingChat], http_types.AnthropicServing]
    ChatCompletionRequest: Callable[..., Any]
    ResponseToolState: Callable[..., Any]
    FunctionCallParser: Any
    ResponseTemplateReasoningDetector: type[Any]
    ResponseTemplateToolDetector: type[Any]
    normalize_assistant_tool_call_arguments: Callable[[dict[str, Any]], None]
    parallel_prompt_encode: Callable[..., list[int]]
    GenerateReqInput: Callable[..., http_types.GenerateReqInput]
    KvHintAction: Callable[..., http_types.KvHintAction]
    KvHintsEnvelope: Callable[..., http_types.KvHintsEnvelope]
    decode_kv_hints_envelope: Callable[[Any], http_types.KvHintsEnvelope]

    AbortReq: Callable[..., Any]
    AddReqResult: scheduler_types.AddReqResult
    CLIP_MAX_NEW_TOKENS: int
    release_req: Callable[..., None]
    RadixKey: Callable[..., types.RadixKey]
    EvictParams: Callable[..., types.EvictParams]
    MatchPrefixParams: Callable[..., Any]
    ComponentType: types.ComponentType
    UnifiedRadixCache = types.TreeCache
    register_radix_cache_backend: Callable[[str, Callable[[Any], types.TreeCache]], None]
    create_unified_radix_cache: Callable[..., types.TreeCache]
    default_radix_cache_factory: Callable[[types.TreeCacheBuildContext], types.TreeCache]
    get_memory: Callable[[], scheduler_types.Memory]
    get_parallel: Callable[[], scheduler_types.ParallelContext]
    get_schedule: Callable[[], scheduler_types.Schedule]
else:

    def __getattr__(name: str) -> Any:
        try:
            module, symbol = _SYMBOLS[name]
        except KeyError:
            raise AttributeError(f"sglang_api declares no {name}") from None
        return getattr(sys.modules.get(module) or import_module(module), symbol)
