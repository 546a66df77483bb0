"""Every SGLang symbol that the extension changes, in one table, and the check that it did.

SGLang only logs a hook that fails to apply. Here each process of an engine applies the hooks of its
role, looks at every symbol again, and stops the start if one is not changed. Each process that
passes acknowledges it, and the main process counts the acknowledgements before it serves.
"""

from __future__ import annotations

import multiprocessing
import pkgutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from types import FrameType
from typing import Any

from sgl_ext.engine import http_server, sglang_api, startup
from sgl_ext.engine.core import shared_prefixes
from sgl_ext.engine.host_cache import shortcuts
from sgl_ext.engine.http import (
    anthropic_answers,
    cache_hooks,
    generation_hook,
    pin_placement,
    rendering,
    request_hook,
    tool_calls,
    translation,
)
from sgl_ext.engine.scheduler import (
    admission,
    first_token,
    iteration,
    preemption,
    priority,
)


class Role(StrEnum):
    """The part that a process has in an engine."""

    MAIN = "main"
    SCHEDULER = "scheduler"
    DETOKENIZER = "detokenizer"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Hook:
    """One changed symbol: its dotted path, how it is changed, and in which processes."""

    symbol: str
    kind: str
    function: Callable[..., Any]
    roles: tuple[Role, ...] = (Role.MAIN,)


_MANAGERS = "sglang.srt.managers"
_CHAT = "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat"
_RESPONSES = "sglang.srt.entrypoints.openai.serving_responses.OpenAIServingResponses"
_MESSAGES = "sglang.srt.entrypoints.openai.protocol"
_CALLS = "sglang.srt.function_call.function_call_parser.FunctionCallParser"
_ANTHROPIC = "sglang.srt.entrypoints.anthropic.serving"

HOOKS = (
    Hook("sglang.srt.server_args.prepare_server_args", "AFTER", startup.reject_unsupported),
    Hook(
        "sglang.srt.entrypoints.engine.Engine._launch_subprocesses",
        "AFTER",
        startup.await_acknowledgements,
    ),
    Hook("sglang.srt.entrypoints.http_server.ORJSONRequest.json", "AROUND", request_hook.read_body),
    Hook(
        f"{_MANAGERS}.tokenizer_manager.TokenizerManager.generate_request",
        "BEFORE",
        generation_hook.send_hints,
    ),
    Hook(f"{_CHAT}._convert_to_internal_request", "AROUND", pin_placement.place_pins),
    Hook(f"{_CHAT}._render_and_encode_chat_template", "AROUND", rendering.render_only),
    Hook(
        "sglang.srt.entrypoints.openai.serving_chat.parallel_prompt_encode",
        "AROUND",
        cache_hooks.encode_prompt,
    ),
    Hook("jsonschema.Draft202012Validator.check_schema", "AROUND", cache_hooks.check_schema),
    Hook(
        f"{_MESSAGES}.ChatCompletionMessageGenericParam.model_dump",
        "AROUND",
        cache_hooks.dump_message,
    ),
    Hook(
        f"{_MESSAGES}.ChatCompletionMessageUserParam.model_dump", "AROUND", cache_hooks.dump_message
    ),
    Hook(
        "transformers.utils.chat_template_utils._compile_jinja_template",
        "AROUND",
        shortcuts.compile_template,
    ),
    Hook(
        f"{_ANTHROPIC}.AnthropicServing._handle_non_streaming",
        "AROUND",
        anthropic_answers.complete_answer,
    ),
    Hook(f"{_ANTHROPIC}._wrap_sse_event", "AROUND", anthropic_answers.complete_event),
    Hook(
        f"{_ANTHROPIC}.AnthropicServing._convert_response",
        "AROUND",
        anthropic_answers.note_finish_reason,
    ),
    Hook(
        f"{_ANTHROPIC}.AnthropicServing._convert_to_chat_completion_request",
        "AROUND",
        translation.convert_messages,
    ),
    Hook(
        "sglang.srt.function_call.base_format_detector.BaseFormatDetector"
        ".parse_streaming_increment",
        "AROUND",
        tool_calls.parse_chunk,
    ),
    Hook(f"{_CALLS}.parse_stream_chunk", "AROUND", tool_calls.hold_space),
    Hook(f"{_CALLS}.parse_stream_end", "AROUND", tool_calls.release_space),
    Hook(f"{_CHAT}._generate_chat_stream", "AROUND", anthropic_answers.watch_stream),
    Hook(f"{_RESPONSES}.create_responses", "AROUND", translation.name_namespaces),
    Hook(
        "sglang.srt.entrypoints.openai.protocol.ResponsesRequest.to_sampling_params",
        "AROUND",
        translation.keep_budget,
    ),
    Hook(
        "sglang.srt.entrypoints.http_server._setup_and_run_http_server",
        "BEFORE",
        http_server.extend,
    ),
    Hook("uvicorn.server.Server.shutdown", "BEFORE", http_server.end_streams),
    Hook(
        f"{_MANAGERS}.scheduler.Scheduler.get_next_batch_to_run",
        "AFTER",
        iteration.publish_events,
        (Role.SCHEDULER,),
    ),
    Hook(
        f"{_MANAGERS}.scheduler.Scheduler.process_batch_result",
        "AROUND",
        first_token.send_output_first,
        (Role.SCHEDULER,),
    ),
    Hook(
        f"{_MANAGERS}.scheduler.Scheduler.publish_load_snapshot",
        "AROUND",
        first_token.publish_load_later,
        (Role.SCHEDULER,),
    ),
    Hook(
        f"{_MANAGERS}.scheduler_components.output_streamer.SchedulerOutputStreamer.stream_output",
        "AFTER",
        first_token.after_output,
        (Role.SCHEDULER,),
    ),
    Hook(
        f"{_MANAGERS}.scheduler.Scheduler._poll_timeout_aborts",
        "AFTER",
        iteration.send_orders,
        (Role.SCHEDULER,),
    ),
    Hook(
        f"{_MANAGERS}.scheduler.Scheduler.process_input_requests",
        "AROUND",
        iteration.take_orders,
        (Role.SCHEDULER,),
    ),
    Hook(
        f"{_MANAGERS}.scheduler.Scheduler._should_defer_prefill",
        "AROUND",
        priority.defer_vain_try,
        (Role.SCHEDULER,),
    ),
    Hook(
        f"{_MANAGERS}.schedule_policy.SchedulePolicy.calc_priority",
        "AROUND",
        priority.order_queue,
        (Role.SCHEDULER,),
    ),
    Hook(
        f"{_MANAGERS}.schedule_policy.PrefillAdder.preempt_to_schedule",
        "AROUND",
        preemption.preempt_for_slot,
        (Role.SCHEDULER,),
    ),
    Hook(
        f"{_MANAGERS}.schedule_policy.PrefillAdder.add_one_req",
        "AROUND",
        admission.add_one,
        (Role.SCHEDULER,),
    ),
    Hook(
        f"{_MANAGERS}.schedule_policy.PrefillAdder.add_chunked_req",
        "AROUND",
        admission.add_chunk,
        (Role.SCHEDULER,),
    ),
)

SHARING_HOOKS = (
    Hook(
        f"{_MANAGERS}.tokenizer_manager.TokenizerManager._create_tokenized_object",
        "AFTER",
        shared_prefixes.share,
    ),
    Hook(
        "sglang.srt.mem_cache.radix_cache.RadixKey.__init__",
        "AROUND",
        shared_prefixes.make_key,
        (Role.SCHEDULER,),
    ),
)
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


def apply_hooks(role: Role, hooks: tuple[Hook, ...] = HOOKS) -> list[str]:
    """Applies this role's hooks through SGLang's registry and returns their symbols.

    Raises RuntimeError naming every symbol that did not change.
    """
    mine = [hook for hook in hooks if role in hook.roles]
    for hook in mine:
        sglang_api.HookRegistry.register(hook.symbol, hook.function, sglang_api.HookType[hook.kind])
    sglang_api.HookRegistry.apply_hooks()
    missing = [hook.symbol for hook in mine if not _is_hooked(hook.symbol)]
    if missing:
        raise RuntimeError(f"these hooks did not apply in the {role} process: {', '.join(missing)}")
    return [hook.symbol for hook in mine]


def _is_hooked(symbol: str) -> bool:
    """Whether `symbol` now is a wrapper that the registry made."""
    try:
        found = pkgutil.resolve_name(symbol)
    except (ImportError, AttributeError):
        return False
    return symbol in sglang_api.HookRegistry._patched and hasattr(found, "__wrapped__")
