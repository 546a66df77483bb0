"""The attributes of SGLang's HTTP process that the extension uses, as types.

See `sgl_ext.engine.sglang_types`, which has those of the scheduler.
"""

# mypy: disable-error-code="empty-body"

from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

from sgl_ext.engine.sglang_types import stands_for

_OPENAI = "sglang.srt.entrypoints.openai"
_MANAGERS = "sglang.srt.managers"


@stands_for("sglang.srt.configs.model_config:ModelConfig")
class ModelConfig(Protocol):
    hf_config: Any
    is_generation: bool
    is_hybrid_swa: bool
    full_attention_layer_ids: list[int] | None
    is_multimodal: bool
    context_len: int
    vocab_size: int
    hidden_size: int


@stands_for("sglang.srt.utils.request_logger:RequestLogger")
class RequestLogger(Protocol):
    log_requests: bool


@stands_for("sglang.srt.observability.request_metrics_exporter:RequestMetricsExporterManager")
class RequestMetricsExporterManager(Protocol):
    def exporter_enabled(self) -> bool: ...


@stands_for(f"{_MANAGERS}.io_struct:FlushCacheReqOutput")
class FlushCacheReqOutput(Protocol):
    success: bool
    message: str


@stands_for(f"{_MANAGERS}.tokenizer_manager:TokenizerManager")
class TokenizerManager(Protocol):
    model_config: ModelConfig
    served_model_name: str
    tokenizer: Any
    mm_processor: Any
    is_generation: bool
    max_req_input_len: int
    allow_auto_truncate: bool
    enable_lora: bool
    enable_priority_scheduling: bool
    gracefully_exit: bool
    server_status: Any
    rid_to_state: dict[str, Any]
    request_logger: RequestLogger
    dump_requests_folder: str
    crash_dump_folder: str | None
    request_metrics_exporter_manager: RequestMetricsExporterManager

    def generate_request(self, obj: Any, request: Any) -> AsyncIterator[dict[str, Any]]: ...
    def is_ready(self) -> bool: ...
    def set_server_stop_hook(self, hook: Callable[[], None]) -> None: ...
    async def flush_cache(self, timeout_s: float | None = None) -> FlushCacheReqOutput: ...


@stands_for("sglang.srt.entrypoints.http_server:_GlobalState")
class GlobalState(Protocol):
    tokenizer_manager: TokenizerManager
    template_manager: Any


@stands_for("sglang.srt.parser.template_manager:TemplateManager")
class TemplateManager(Protocol):
    python_chat_template: Any
    chat_template_name: str | None


@stands_for(f"{_OPENAI}.serving_chat:OpenAIServingChat")
class ServingChat(Protocol):
    tokenizer_manager: TokenizerManager
    template_manager: TemplateManager
    tool_call_parser: str | None
    reasoning_parser: str | None
    encoding_adapter: Any
    chat_encoding_spec: Any
    _reasoning_detector: Any
    _prompt_text_round_trip_is_lossy: bool

    def _process_messages(self, request: Any, is_multimodal: bool) -> Any: ...
    def _resolve_inline_system_support(self) -> bool: ...
    def apply_reasoning_enabled(self, request: Any, enabled: bool) -> None: ...
    def wrap_reasoning_history(self, reasoning_text: str) -> str: ...


@stands_for(f"{_OPENAI}.serving_responses:OpenAIServingResponses")
class ServingResponses(ServingChat, Protocol):
    enable_response_store: bool

    def _responses_stream_generator_non_harmony(self, *args: Any, **kw: Any) -> Any: ...


@stands_for("sglang.srt.entrypoints.anthropic.serving:AnthropicServing")
class AnthropicServing(Protocol):
    openai_serving_chat: ServingChat

    def _convert_to_chat_completion_request(self, anthropic_request: Any) -> Any: ...


@stands_for(f"{_MANAGERS}.kv_hints:KvHintAction")
class KvHintAction(Protocol):
    action_id: str
    action_type: str
    payload: dict[str, Any]


@stands_for(f"{_MANAGERS}.kv_hints:KvHintsEnvelope")
class KvHintsEnvelope(Protocol):
    protocol_version: str
    message_id: str
    actions: list[KvHintAction]


@stands_for(f"{_MANAGERS}.io_struct:GenerateReqInput")
class GenerateReqInput(Protocol):
    rid: Any
    text: Any
    input_ids: Any
    sampling_params: Any
    extra_key: Any
    cache_salt: Any
    lora_path: Any
    kv_hints: Any
    priority: int | None
    session_params: Any
    require_reasoning: bool

    def contains_mm_input(self) -> bool: ...


@stands_for(f"{_MANAGERS}.io_struct:TokenizedGenerateReqInput")
class TokenizedGenerateReqInput(Protocol):
    rid: Any
    input_ids: Any
    extra_key: str | None
    cache_salt: str | None
    need_wait_for_mm_inputs: bool


@stands_for("sglang.srt.function_call.function_call_parser:FunctionCallParser")
class FunctionCallParser(Protocol):
    tools: list[Any]
    detector: Any

    def structural_tag_tools(self) -> list[Any]: ...
    def get_legacy_structural_tag(self) -> Any: ...


@stands_for("sglang.srt.function_call.base_format_detector:BaseFormatDetector")
class FormatDetector(Protocol):
    bot_token: str
    eot_token: str
    current_tool_id: int
    current_tool_name_sent: bool
    _buffer: str
    _tool_indices: dict[str, int]

    def _get_tool_indices(self, tools: Any) -> dict[str, int]: ...
