"""Every SGLang symbol that the extension changes, in one table, and the check that it did.

SGLang only logs a hook that fails to apply. Here each process of an engine applies the hooks of its
role, looks at every symbol again, and stops the start if one is not changed. Each process that
passes acknowledges it, and the main process counts the acknowledgements before it serves.
"""

import multiprocessing
import pkgutil
import sys
from collections.abc import Callable, Mapping
from enum import StrEnum
from functools import partial
from types import FrameType, ModuleType
from typing import Any

from sgl_ext.compat import (
    anthropic_answers,
    errors,
    held_schemas,
    last_chunk,
    openai_answers,
    rendezvous,
    sampler,
    templates,
    text_logprobs,
    tool_calls,
    tool_choice,
    window,
)
from sgl_ext.engine import http_server, sglang_api, startup
from sgl_ext.engine.core import request_names, shared_prefixes
from sgl_ext.engine.host_cache import chat_templates
from sgl_ext.engine.http import (
    cache_hooks,
    field_ranges,
    generation_hook,
    pin_placement,
    rendering,
    request_hook,
    translation,
)
from sgl_ext.engine.http.secret import send_secret
from sgl_ext.engine.scheduler import admission, first_token, iteration, nodes, preemption, priority
from sgl_ext.engine.tiers import shared_pages

Hook = tuple[str, Callable[..., Any]]
"""How a symbol is changed, as SGLang's `HookType` names it, and the function that changes it."""


class Role(StrEnum):
    """The part that a process has in an engine."""

    MAIN = "main"
    SCHEDULER = "scheduler"
    DETOKENIZER = "detokenizer"
    OTHER = "other"


def _nested(outer: Callable[..., Any], inner: Callable[..., Any]) -> Callable[..., Any]:
    """Two hooks around one symbol as one."""

    def hook(original: Callable[..., Any], *args: Any, **kw: Any) -> Any:
        return outer(partial(inner, original), *args, **kw)

    return hook


def _followed(around: Callable[..., Any], after: Callable[..., Any]) -> Callable[..., Any]:
    """A hook around a symbol, and one after it that changes what it returns, as one."""

    def hook(original: Callable[..., Any], *args: Any, **kw: Any) -> Any:
        made = around(original, *args, **kw)
        after(made, *args, **kw)
        return made

    return hook


def _each(*hooks: Callable[..., None]) -> Callable[..., None]:
    """Hooks before one symbol as one, in this order."""

    def hook(*args: Any, **kw: Any) -> None:
        for each in hooks:
            each(*args, **kw)

    return hook


_MANAGERS = "sglang.srt.managers"
_SCHEDULER = f"{_MANAGERS}.scheduler.Scheduler"
_POLICY = f"{_MANAGERS}.schedule_policy"
_SAMPLING = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo"
_STREAMER = f"{_MANAGERS}.scheduler_components.output_streamer.SchedulerOutputStreamer"
_UPDATER = f"{_MANAGERS}.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_TOKENIZER = f"{_MANAGERS}.tokenizer_manager.TokenizerManager"
_GENERATION = f"{_MANAGERS}.io_struct.GenerateReqInput"
_EMBEDDING = f"{_MANAGERS}.io_struct.EmbeddingReqInput"
_ENTRY = "sglang.srt.entrypoints"
_ANTHROPIC = f"{_ENTRY}.anthropic.serving"
_MESSAGES = f"{_ANTHROPIC}.AnthropicServing"
_OPENAI = f"{_ENTRY}.openai"
_PROTOCOL = f"{_OPENAI}.protocol"
_MESSAGE = f"{_PROTOCOL}.ChatCompletionMessage"
_CHAT = f"{_OPENAI}.serving_chat.OpenAIServingChat"
_RESPONSES = f"{_OPENAI}.serving_responses.OpenAIServingResponses"
_CALLS = "sglang.srt.function_call"
_PARSER = f"{_CALLS}.function_call_parser.FunctionCallParser"
_DETECTOR = f"{_CALLS}.base_format_detector.BaseFormatDetector"
_VERSIONS = "build_endpoint_weight_version_metadata"
_RECIPE = "sglang.srt.parser.deepseek_recipe_renderer"
_TOKENIZERS = "transformers.tokenization_utils_base"
_TEMPLATES = "transformers.utils.chat_template_utils"

_MAIN_HOOKS: dict[str, Hook] = {
    # The start and the server
    "sglang.srt.server_args.prepare_server_args": ("AFTER", startup.check_arguments),
    f"{_ENTRY}.engine.Engine._launch_subprocesses": ("AFTER", startup.await_acknowledgements),
    f"{_ENTRY}.engine._server_args_for_logging": ("AFTER", startup.changed_args),
    f"{_ENTRY}.engine.resolve_auto_parsers": ("AROUND", startup.report_parsers),
    f"{_ENTRY}.http_server._freeze_gc_after_server_warmup": ("BEFORE", startup.await_listening),
    f"{_ENTRY}.http_server._setup_and_run_http_server": ("BEFORE", http_server.extend),
    "uvicorn.server.Server.shutdown": ("BEFORE", http_server.end_streams),
    f"{_TOKENIZER}.sigterm_watchdog": ("AROUND", http_server.await_sigterm),
    "requests.sessions.Session.request": ("AROUND", send_secret),
    # Requests
    f"{_ENTRY}.http_server.ORJSONRequest.json": ("AROUND", request_hook.read_body),
    f"{_TOKENIZER}.generate_request": (
        "BEFORE",
        _each(text_logprobs.ask, generation_hook.send_hints),
    ),
    f"{_GENERATION}.regenerate_rid": ("AROUND", request_names.keep_id),
    f"{_GENERATION}.normalize_batch_and_arguments": ("BEFORE", field_ranges.check_batch),
    f"{_EMBEDDING}.normalize_batch_and_arguments": ("BEFORE", field_ranges.check_batch),
    f"{_TOKENIZER}._validate_one_request": (
        "BEFORE",
        _each(
            window.check_length,
            field_ranges.take,
            field_ranges.check_prompt,
            held_schemas.check_sent,
        ),
    ),
    f"{_TOKENIZER}._create_tokenized_object": ("AROUND", field_ranges.check_sent),
    f"{_CHAT}._convert_to_internal_request": ("AROUND", pin_placement.place_pins),
    f"{_CHAT}._apply_jinja_template": (
        "AROUND",
        _nested(
            field_ranges.check_variables,
            _nested(tool_choice.keep_tools, rendering.leave_deferred_out),
        ),
    ),
    f"{_CHAT}._render_and_encode_chat_template": (
        "AROUND",
        _nested(templates.fit_messages, rendering.render_only),
    ),
    f"{_CHAT}._resolve_inline_system_support": ("AROUND", templates.leave_instructions),
    f"{_CHAT}.supports_native_reasoning_history": ("AROUND", templates.takes_thinking),
    f"{_CHAT}._encode_messages": ("AROUND", rendering.render_tokens),
    f"{_OPENAI}.encoding_dsv32.encode_messages": ("AROUND", rendering.note_text),
    f"{_CHAT}._process_messages": (
        "AROUND",
        _nested(tool_choice.hold_choice, templates.place_instructions),
    ),
    f"{_PARSER}.get_structure_constraint": ("AROUND", tool_choice.constrain_calls),
    f"{_MESSAGES}._convert_to_chat_completion_request": ("AROUND", translation.convert_messages),
    f"{_RESPONSES}._make_request": ("AROUND", pin_placement.place_pins_of_response),
    f"{_RESPONSES}.create_responses": (
        "AROUND",
        _nested(text_logprobs.allow_in_stream, translation.name_namespaces),
    ),
    f"{_RESPONSES}._response_tools_to_chat_tools": ("AROUND", translation.keep_deferral),
    f"{_PROTOCOL}.ChatCompletionRequest.to_sampling_params": ("AROUND", tool_choice.join_schema),
    f"{_PROTOCOL}.ResponsesRequest.to_sampling_params": (
        "AROUND",
        _nested(translation.keep_budget, tool_choice.join_schema),
    ),
    # Caches
    f"{_OPENAI}.serving_chat.parallel_prompt_encode": ("AROUND", cache_hooks.encode_prompt),
    f"{_OPENAI}.serving_chat.encode_prompt_segments": ("AROUND", cache_hooks.encode_segments),
    f"{_TOKENIZERS}.PreTrainedTokenizerBase.encode": ("AROUND", cache_hooks.encode_text),
    f"{_RECIPE}.DeepSeekRecipe.__init__": ("AFTER", cache_hooks.use_pieces),
    "jsonschema.Draft202012Validator.check_schema": ("AROUND", cache_hooks.check_schema),
    f"{_MESSAGE}GenericParam.model_dump": ("AROUND", cache_hooks.dump_message),
    f"{_MESSAGE}UserParam.model_dump": ("AROUND", cache_hooks.dump_message),
    f"{_CHAT}._effective_tools": ("AROUND", cache_hooks.find_tools),
    f"{_CHAT}._get_history_tool_calls_cnt": ("AROUND", cache_hooks.count_calls),
    f"{_TEMPLATES}._compile_jinja_template": ("AROUND", chat_templates.compile_template),
    # Answers
    f"{_MESSAGES}._handle_non_streaming": ("AROUND", anthropic_answers.complete_answer),
    f"{_ANTHROPIC}._wrap_sse_event": ("AROUND", anthropic_answers.complete_event),
    f"{_MESSAGES}._convert_response": ("AROUND", anthropic_answers.note_finish_reason),
    f"{_CHAT}._generate_chat_stream": ("AROUND", anthropic_answers.watch_stream),
    f"{_TOKENIZER}._handle_abort_finish_reason": ("AROUND", errors.note_abort),
    f"{_RESPONSES}.responses_full_generator": (
        "AROUND",
        _nested(errors.note_failure, text_logprobs.complete_response),
    ),
    f"{_RESPONSES}.responses_stream_generator_non_harmony": (
        "AROUND",
        _nested(text_logprobs.stream_response, tool_calls.stream_response),
    ),
    f"{_OPENAI}.serving_chat.{_VERSIONS}": ("AROUND", openai_answers.text_metadata),
    f"{_OPENAI}.serving_completions.{_VERSIONS}": ("AROUND", openai_answers.text_metadata),
    f"{_DETECTOR}.parse_streaming_increment": ("AROUND", tool_calls.parse_chunk),
    f"{_PARSER}.parse_stream_chunk": ("AROUND", tool_calls.hold_space),
    f"{_PARSER}.parse_stream_end": ("AROUND", tool_calls.release_space),
    f"{_PARSER}.parse_non_stream": ("AROUND", tool_calls.parse_whole),
    f"{_PARSER}.has_tool_call": ("AROUND", tool_calls.has_call),
    f"{_CHAT}._process_tool_call_stream": ("AROUND", tool_calls.stream_in_order),
    f"{_CHAT}._process_tool_calls": ("AROUND", tool_calls.process_whole),
    f"{_CHAT}._check_for_unstreamed_tool_args": ("AROUND", tool_calls.add_no_end),
    f"{_RESPONSES}._make_response_output_items": ("AROUND", tool_calls.order_items),
}
_SCHEDULER_HOOKS: dict[str, Hook] = {
    f"{_SCHEDULER}.init_all_cuda_graphs": ("AFTER", startup.freeze_again),
    f"{_SCHEDULER}.get_next_batch_to_run": ("AFTER", iteration.note_plan),
    f"{_SCHEDULER}.get_next_disagg_prefill_batch_to_run": ("AFTER", iteration.note_plan),
    f"{_SCHEDULER}.get_next_disagg_decode_batch_to_run": ("AFTER", iteration.note_plan),
    f"{_SCHEDULER}._poll_timeout_aborts": ("AFTER", iteration.send_orders),
    f"{_SCHEDULER}.process_pending_chunked_abort": ("BEFORE", last_chunk.keep_last_chunk),
    f"{_SCHEDULER}.process_input_requests": ("AROUND", iteration.take_orders),
    f"{_SCHEDULER}.process_batch_result": (
        "AROUND",
        _nested(iteration.publish_events, first_token.send_output_first),
    ),
    f"{_SCHEDULER}.publish_load_snapshot": ("AROUND", first_token.publish_load_later),
    f"{_STREAMER}.stream_output": ("AFTER", first_token.after_output),
    f"{_SCHEDULER}._should_defer_prefill": ("AROUND", priority.defer_vain_try),
    f"{_SAMPLING}._apply_post_grammar_logits_transforms": ("AFTER", sampler.allow_some_token),
    "sglang.srt.constrained.base_grammar_backend.BaseGrammarBackend.set_cache": (
        "AFTER",
        sampler.forget_grammars,
    ),
    f"{_SCHEDULER}.can_schedule_lora_req": ("AROUND", admission.count_admitted),
    f"{_UPDATER}.flush_cache_after_weight_update": ("BEFORE", shared_pages.retire),
    f"{_POLICY}.SchedulePolicy.calc_priority": ("AROUND", priority.order_queue),
    f"{_POLICY}.PrefillAdder.preempt_to_schedule": ("AROUND", preemption.preempt_for_slot),
    f"{_POLICY}.PrefillAdder.add_one_req": ("AROUND", admission.add_one),
    f"{_POLICY}.PrefillAdder.add_chunked_req": ("AROUND", admission.add_chunk),
    "sglang.srt.distributed.bootstrap.init_parallel_runtime": ("AFTER", nodes.agree_with_nodes),
    "torch.distributed.rendezvous._create_c10d_store": ("AROUND", rendezvous.listen_on_loopback),
}
HOOKS = {Role.MAIN: _MAIN_HOOKS, Role.SCHEDULER: _SCHEDULER_HOOKS}

SHARING_HOOKS: dict[Role, dict[str, Hook]] = {
    Role.MAIN: {
        f"{_TOKENIZER}._create_tokenized_object": (
            "AROUND",
            _followed(field_ranges.check_sent, shared_prefixes.share),
        )
    },
    Role.SCHEDULER: {
        "sglang.srt.mem_cache.radix_cache.RadixKey.__init__": ("AROUND", shared_prefixes.make_key)
    },
}
"""Further hooks of an engine whose cache groups share prefixes. Others go without: keys are made
often."""

_ENTRY_POINTS = {
    "run_scheduler_process": Role.SCHEDULER,
    "run_data_parallel_controller_process": Role.OTHER,
    "run_detokenizer_process": Role.DETOKENIZER,
}


def current_role() -> Role:
    """This process's role, by the SGLang entry point on the stack that loads plugins."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if role := _ENTRY_POINTS.get(frame.f_code.co_name):
            return role
        frame = frame.f_back
    return Role.MAIN if multiprocessing.parent_process() is None else Role.OTHER


def apply_hooks(role: Role, hooks: Mapping[str, Hook]) -> None:
    """Applies hooks through SGLang's registry. Raises RuntimeError naming every symbol that did not
    change."""
    registry = sglang_api.HookRegistry
    for symbol, (kind, function) in hooks.items():
        registry.register(symbol, function, sglang_api.HookType[kind])
    _apply_at_once(registry)
    missing = [symbol for symbol in hooks if not _is_hooked(symbol)]
    if missing:
        raise RuntimeError(f"these hooks did not apply in the {role} process: {', '.join(missing)}")


def _apply_at_once(registry: Any) -> None:
    """`HookRegistry.apply_hooks`, which looks through all names of all modules for each symbol.

    Here they are looked through once for all symbols, which saves a second of every start.
    """
    module, changed = sys.modules[registry.__module__], dict[int, tuple[object, object]]()

    def note(original: object, wrapped: object, owner: object) -> int:
        changed[id(original)] = original, wrapped
        return 0

    propagate = module._propagate_patch
    module._propagate_patch = note  # type: ignore[attr-defined]
    try:
        registry.apply_hooks()
    finally:
        module._propagate_patch = propagate  # type: ignore[attr-defined]
    for found in list(sys.modules.values()):
        if isinstance(found, ModuleType):
            for name, value in list(vars(found).items()):
                if id(value) in changed:
                    setattr(found, name, changed[id(value)][1])


def _is_hooked(symbol: str) -> bool:
    """Whether `symbol` now is a wrapper that the registry made."""
    try:
        found = pkgutil.resolve_name(symbol)
    except (ImportError, AttributeError):
        return False
    return symbol in sglang_api.HookRegistry._patched and hasattr(found, "__wrapped__")
