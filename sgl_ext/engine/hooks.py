"""Every SGLang symbol that the extension changes, in one table, and the check that it did.

    python -m sgl_ext.engine.hooks    prints the table: symbol, process, function, group

SGLang only logs a hook that fails to apply. Here each process of an engine looks for what its hooks
need, applies them, looks at every symbol again, and stops the start if one is not changed. Each
process that passes acknowledges it, and the main process counts the acknowledgements before it
serves.

A hook belongs to a group: a promise of ours, or a fault of SGLang's. Without a needed group no
engine starts. Another one is off where SGLang has changed what it hooks; the start says so, and
what clients get instead.

Of a class, a subclass takes the place: SGLang's registry documents that for methods, and one seam
serves all of them.
"""

import json
import multiprocessing
import pkgutil
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from enum import StrEnum
from functools import partial, wraps
from importlib.metadata import version
from types import FrameType, ModuleType
from typing import Any, NamedTuple

from sgl_ext.compat import (
    anthropic_answers,
    errors,
    held_schemas,
    last_chunk,
    rendezvous,
    sampler,
    templates,
    text_logprobs,
    tool_calls,
    tool_choice,
    window,
)
from sgl_ext.engine import (
    http_server,
    sglang_api,
    sglang_check,
    sglang_http_types,
    sglang_types,
    sglang_versions,
    startup,
)
from sgl_ext.engine.core import request_names, shared_prefixes
from sgl_ext.engine.host_cache import chat_templates
from sgl_ext.engine.http import (
    cache_hooks,
    field_ranges,
    pin_placement,
    rendering,
    request_hook,
    translation,
)
from sgl_ext.engine.http.secret import send_secret
from sgl_ext.engine.scheduler import (
    admission,
    first_token,
    iteration,
    nodes,
    preemption,
    priority,
    slice_gate,
)
from sgl_ext.engine.sglang_check import Tested
from sgl_ext.engine.sglang_versions import OFF, TESTED
from sgl_ext.engine.tiers import shared_pages


class Role(StrEnum):
    """The part that a process has in an engine."""

    MAIN = "main"
    WORKER = "worker"
    SCHEDULER = "scheduler"
    DETOKENIZER = "detokenizer"
    OTHER = "other"


class Group(NamedTuple):
    """Hooks that serve one promise, or mend one fault of SGLang's.

    without: what clients get while it is off; "" if no engine serves without it.
    """

    name: str
    without: str = ""


START = Group("start")
HINTS = Group("strip and hints")
FIELDS = Group("ranges of fields")
PINS = Group("pins")
ORDER = Group("order and preemption")
EVENTS = Group("events")
AHEAD = Group("prefill ahead")
TIERS = Group("tiers")
SHARED = Group("shared prefixes")
CACHES = Group("host caches", "each turn tokenizes, converts and copies all of its messages")
ENCODERS = Group("encoders", "prompts that Python code writes, as GLM-5.3's, are tokenized whole")
FIRST_TOKEN = Group("first token", "a first token waits until its prompt is stored")
RENDEZVOUS = Group("rendezvous")
SAMPLER = Group("sampler")
SCHEMAS = Group("held schemas", "a grammar leaves a part of some schemas out, and nothing says so")
CHOICE = Group("tool choice", "a choice of tools changes the prompt, and calls or a schema is lost")
CALLS = Group("tool calls", "words between calls are lost, and cut calls look whole")
MESSAGES = Group("answers of messages", "answers of /v1/messages lack stop sequences and usage")
LOGPROBS = Group("log probabilities", "streams of /v1/responses have no log probabilities")
ERRORS = Group("errors", "errors of /v1/responses have other statuses")
WINDOW = Group("window", "prompts that memory does not hold are refused in other words")
TEMPLATES = Group("templates", "messages that the chat template cannot say are lost or refused")
ITEMS = Group(
    "items of responses",
    "whole answers of /v1/responses have all words before all calls, and cut calls look whole",
)
NAMESPACES = Group("namespaces", "namespaces and deferral of tools are lost on /v1/responses")
TRANSLATION = Group(
    "translation",
    "on /v1/messages a turn with thinking is rendered otherwise than it was generated; on "
    "/v1/responses an answer has two tokens less than it may",
)
LAST_CHUNK = Group("last chunk", "what was computed last for a client that left is computed again")


class Part(NamedTuple):
    """A function of ours at a function of SGLang's: before, around or after it."""

    group: Group
    function: Callable[..., Any]
    when: str = "around"


def before(group: Group, function: Callable[..., Any]) -> Part:
    """The function gets the arguments."""
    return Part(group, function, "before")


def after(group: Group, function: Callable[..., Any]) -> Part:
    """The function gets what SGLang's returned, and may return something else."""
    return Part(group, function, "after")


def around(group: Group, function: Callable[..., Any]) -> Part:
    """The function gets SGLang's, and calls it."""
    return Part(group, function)


class Seam(NamedTuple):
    """How a symbol is changed, as SGLang's `HookType` names it.

    parts: of a function, the outermost first. methods: of a class, the parts of each method.
    """

    kind: str
    parts: tuple[Part, ...] = ()
    methods: Mapping[str, tuple[Part, ...]] = {}

    def places(self) -> Iterator[tuple[str, Part]]:
        """Each part with the name of its method, "" for a function."""
        yield from (("", part) for part in self.parts)
        yield from ((name, part) for name, parts in self.methods.items() for part in parts)

    def without(self, off: Collection[Group]) -> "Seam | None":
        """The seam without the parts of these groups; None if nothing is left."""
        methods = {name: _kept(parts, off) for name, parts in self.methods.items()}
        methods = {name: parts for name, parts in methods.items() if parts}
        left = Seam(self.kind, _kept(self.parts, off), methods)
        return left if left.parts or left.methods else None


def _kept(parts: tuple[Part, ...], off: Collection[Group]) -> tuple[Part, ...]:
    return tuple(part for part in parts if part.group not in off)


_MANAGERS = "sglang.srt.managers"
_SCHEDULER = f"{_MANAGERS}.scheduler.Scheduler"
_POLICY = f"{_MANAGERS}.schedule_policy"
_SAMPLING = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo"
_RESULTS = f"{_MANAGERS}.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
_STREAMER = f"{_MANAGERS}.scheduler_components.output_streamer.SchedulerOutputStreamer"
_UPDATER = f"{_MANAGERS}.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_TOKENIZER = f"{_MANAGERS}.tokenizer_manager.TokenizerManager"
_TOKENIZER_WORKER = f"{_MANAGERS}.multi_tokenizer_mixin.TokenizerWorker"
_GENERATION = f"{_MANAGERS}.io_struct.GenerateReqInput"
_ENTRY = "sglang.srt.entrypoints"
_MESSAGES = f"{_ENTRY}.anthropic.serving.AnthropicServing"
_OPENAI = f"{_ENTRY}.openai"
_PROTOCOL = f"{_OPENAI}.protocol"
_MESSAGE = f"{_PROTOCOL}.ChatCompletionMessage"
_CHAT = f"{_OPENAI}.serving_chat.OpenAIServingChat"
_RESPONSES = f"{_OPENAI}.serving_responses.OpenAIServingResponses"
_CALLS = "sglang.srt.function_call"
_PARSER = f"{_CALLS}.function_call_parser.FunctionCallParser"
_DETECTOR = f"{_CALLS}.base_format_detector.BaseFormatDetector"
_TOKENIZERS = "transformers.tokenization_utils_base"
_TEMPLATES = "transformers.utils.chat_template_utils"
_KEY = "sglang.srt.mem_cache.radix_cache.RadixKey"
_GRAMMARS = "sglang.srt.constrained.base_grammar_backend"

_CHAT_METHODS = {
    "_convert_to_internal_request": (around(PINS, pin_placement.place_pins),),
    "_process_messages": (
        around(CHOICE, tool_choice.hold_choice),
        around(TEMPLATES, templates.place_instructions),
    ),
    "_apply_jinja_template": (
        around(FIELDS, field_ranges.check_variables),
        around(CHOICE, tool_choice.keep_tools),
        around(HINTS, rendering.leave_deferred_out),
        around(PINS, rendering.expect_text),
    ),
    "_render_and_encode_chat_template": (
        around(TEMPLATES, templates.fit_messages),
        around(CHOICE, rendering.keep_prompt),
        around(PINS, rendering.render_only),
    ),
    "_encode_messages": (around(PINS, rendering.render_tokens),),
    "_resolve_inline_system_support": (around(TEMPLATES, templates.leave_instructions),),
    "supports_native_reasoning_history": (around(TEMPLATES, templates.takes_thinking),),
    "_effective_tools": (around(CACHES, cache_hooks.find_tools),),
    "_build_chat_encoding_adapter": (after(ENCODERS, cache_hooks.use_pieces),),
    "_get_history_tool_calls_cnt": (around(CACHES, cache_hooks.count_calls),),
    "_generate_chat_stream": (around(MESSAGES, anthropic_answers.watch_stream),),
    "_process_tool_call_stream": (around(CALLS, tool_calls.stream_in_order),),
    "_process_tool_calls": (around(CALLS, tool_calls.process_whole),),
    "_check_for_unstreamed_tool_args": (around(CALLS, tool_calls.add_no_end),),
}
_MAIN_SEAMS: dict[str, Seam] = {
    # The start and the server
    "sglang.srt.server_args.prepare_server_args": Seam(
        "AFTER", (after(START, startup.check_arguments),)
    ),
    f"{_ENTRY}.http_server._setup_and_run_http_server": Seam(
        "BEFORE", (before(START, http_server.extend),)
    ),
    "requests.sessions.Session.request": Seam("AROUND", (around(START, send_secret),)),
    # Requests
    f"{_ENTRY}.http_server.ORJSONRequest.json": Seam(
        "AROUND", (around(HINTS, request_hook.read_body),)
    ),
    _TOKENIZER: Seam(
        "REPLACE",
        methods={
            "generate_request": (
                before(LOGPROBS, text_logprobs.ask),
                before(HINTS, request_hook.send_hints),
                before(FIELDS, field_ranges.check_batch),
            ),
            "_validate_one_request": (
                before(WINDOW, window.check_length),
                before(FIELDS, field_ranges.take),
                before(FIELDS, field_ranges.check_prompt),
                before(SCHEMAS, held_schemas.check_sent),
            ),
            "_create_tokenized_object": (
                after(SHARED, shared_prefixes.share),
                around(FIELDS, field_ranges.check_sent),
            ),
            "_handle_abort_finish_reason": (around(ERRORS, errors.note_abort),),
            "sigterm_watchdog": (around(START, http_server.await_sigterm),),
        },
    ),
    f"{_GENERATION}.regenerate_rid": Seam("AROUND", (around(HINTS, request_names.keep_id),)),
    _CHAT: Seam("REPLACE", methods=_CHAT_METHODS),
    _RESPONSES: Seam(
        "REPLACE",
        methods=_CHAT_METHODS
        | {
            "create_responses": (
                around(LOGPROBS, text_logprobs.allow_in_stream),
                around(NAMESPACES, translation.name_namespaces),
            ),
            "_make_request": (around(PINS, pin_placement.place_pins_of_response),),
            "_response_tools_to_chat_tools": (around(NAMESPACES, translation.keep_deferral),),
            "responses_full_generator": (
                around(ERRORS, errors.note_failure),
                around(LOGPROBS, text_logprobs.complete_response),
            ),
            "responses_stream_generator_non_harmony": (
                around(LOGPROBS, text_logprobs.stream_response),
                around(CALLS, tool_calls.stream_response),
            ),
            "_make_response_output_items": (around(ITEMS, tool_calls.order_items),),
        },
    ),
    _MESSAGES: Seam(
        "REPLACE",
        methods={
            "_convert_to_chat_completion_request": (
                around(TRANSLATION, translation.convert_messages),
            ),
            "_handle_non_streaming": (around(MESSAGES, anthropic_answers.complete_answer),),
            "_convert_response": (around(MESSAGES, anthropic_answers.note_finish_reason),),
            "_generate_anthropic_stream": (around(MESSAGES, anthropic_answers.complete_stream),),
        },
    ),
    f"{_PROTOCOL}.ChatCompletionRequest.to_sampling_params": Seam(
        "AROUND", (around(CHOICE, tool_choice.join_schema),)
    ),
    f"{_PROTOCOL}.ResponsesRequest.to_sampling_params": Seam(
        "AROUND",
        (around(TRANSLATION, translation.keep_budget), around(CHOICE, tool_choice.join_schema)),
    ),
    # Caches
    f"{_OPENAI}.serving_chat.parallel_prompt_encode": Seam(
        "AROUND", (around(CACHES, cache_hooks.encode_prompt),)
    ),
    f"{_OPENAI}.serving_chat.encode_prompt_segments": Seam(
        "AROUND", (around(ENCODERS, cache_hooks.encode_segments),)
    ),
    f"{_TOKENIZERS}.PreTrainedTokenizerBase.encode": Seam(
        "AROUND", (around(PINS, cache_hooks.encode_text),)
    ),
    "jsonschema.Draft202012Validator.check_schema": Seam(
        "AROUND", (around(CACHES, cache_hooks.check_schema),)
    ),
    f"{_MESSAGE}GenericParam.model_dump": Seam(
        "AROUND", (around(CACHES, cache_hooks.dump_message),)
    ),
    f"{_MESSAGE}UserParam.model_dump": Seam("AROUND", (around(CACHES, cache_hooks.dump_message),)),
    f"{_TEMPLATES}._compile_jinja_template": Seam(
        "AROUND", (around(CACHES, chat_templates.compile_template),)
    ),
    # Answers
    _PARSER: Seam(
        "REPLACE",
        methods={
            "get_structure_constraint": (around(CHOICE, tool_choice.constrain_calls),),
            "parse_stream_chunk": (around(CALLS, tool_calls.hold_space),),
            "parse_stream_end": (around(CALLS, tool_calls.release_space),),
            "parse_non_stream": (around(CALLS, tool_calls.parse_whole),),
            "has_tool_call": (around(CALLS, tool_calls.has_call),),
        },
    ),
    f"{_DETECTOR}.parse_streaming_increment": Seam(
        "AROUND", (around(CALLS, tool_calls.parse_chunk),)
    ),
}
_SCHEDULER_SEAMS: dict[str, Seam] = {
    _SCHEDULER: Seam(
        "REPLACE",
        methods={
            "init_all_cuda_graphs": (after(START, startup.freeze_again),),
            "get_next_batch_to_run": (after(EVENTS, iteration.note_plan),),
            "get_next_disagg_prefill_batch_to_run": (after(EVENTS, iteration.note_plan),),
            "get_next_disagg_decode_batch_to_run": (after(EVENTS, iteration.note_plan),),
            "_poll_timeout_aborts": (after(PINS, iteration.send_orders),),
            "process_input_requests": (
                around(PINS, iteration.take_orders),
                around(AHEAD, slice_gate.take_slices),
            ),
            "process_pending_chunked_abort": (before(LAST_CHUNK, last_chunk.keep_last_chunk),),
            "process_batch_result": (
                around(EVENTS, iteration.publish_events),
                around(FIRST_TOKEN, first_token.send_output_first),
            ),
            "publish_load_snapshot": (around(FIRST_TOKEN, first_token.publish_load_later),),
            "_should_defer_prefill": (around(ORDER, priority.defer_vain_try),),
            "can_schedule_lora_req": (around(ORDER, admission.count_admitted),),
        },
    ),
    f"{_POLICY}.PrefillAdder": Seam(
        "REPLACE",
        methods={
            "preempt_to_schedule": (around(ORDER, preemption.preempt_for_slot),),
            "add_one_req": (around(PINS, admission.add_one),),
            "add_chunked_req": (around(PINS, admission.add_chunk),),
        },
    ),
    f"{_POLICY}.SchedulePolicy.calc_priority": Seam(
        "AROUND", (around(ORDER, priority.order_queue),)
    ),
    f"{_STREAMER}.stream_output": Seam("AFTER", (after(FIRST_TOKEN, first_token.after_output),)),
    f"{_UPDATER}.flush_cache_after_weight_update": Seam(
        "BEFORE", (before(TIERS, shared_pages.retire),)
    ),
    f"{_KEY}.__init__": Seam("AROUND", (around(SHARED, shared_prefixes.make_key),)),
    f"{_SAMPLING}._apply_post_grammar_logits_transforms": Seam(
        "AFTER", (after(SAMPLER, sampler.allow_some_token),)
    ),
    f"{_GRAMMARS}.BaseGrammarBackend._init_value_dispatch": Seam(
        "AROUND", (around(SAMPLER, sampler.refuse_empty_grammars),)
    ),
    f"{_GRAMMARS}.BaseGrammarBackend.set_cache": Seam(
        "AFTER", (after(SAMPLER, sampler.forget_grammars),)
    ),
    "sglang.srt.distributed.bootstrap.init_parallel_runtime": Seam(
        "AFTER", (after(START, nodes.agree_with_nodes),)
    ),
    "torch.distributed.rendezvous._create_c10d_store": Seam(
        "AROUND", (around(RENDEZVOUS, rendezvous.listen_on_loopback),)
    ),
}
SEAMS = {Role.MAIN: _MAIN_SEAMS, Role.SCHEDULER: _SCHEDULER_SEAMS}
# A tokenizer worker has the hooks of the main process, and a manager that is a subclass.
_WORKER_SEAMS = {
    _TOKENIZER_WORKER if symbol == _TOKENIZER else symbol: seam
    for symbol, seam in _MAIN_SEAMS.items()
}
SOURCES: dict[str, tuple[Group, ...]] = {
    # The order in which requests are tried, and what a result of a try means
    f"{_SCHEDULER}._get_new_batch_prefill_raw": (PINS, ORDER),
    f"{_POLICY}.PrefillAdder.add_one_req": (PINS, ORDER),
    f"{_POLICY}.PrefillAdder.add_chunked_req": (PINS, ORDER),
    f"{_POLICY}.PrefillAdder.preempt_to_schedule": (ORDER,),
    # What entry ranks add reaches all ranks
    f"{_SCHEDULER}.ingest_requests": (PINS,),
    # What a step does after its output, and in which order
    f"{_RESULTS}.process_batch_result_prefill": (FIRST_TOKEN,),
    f"{_SCHEDULER}.process_pending_chunked_abort": (LAST_CHUNK,),
    f"{_MANAGERS}.schedule_batch.Req._check_str_based_finish": (SAMPLER,),
    # What runs in place of SGLang's, or changes a value that it makes
    f"{_CHAT}._resolve_inline_system_support": (TEMPLATES,),
    f"{_CHAT}._effective_tools": (CACHES,),
    f"{_CHAT}._get_history_tool_calls_cnt": (CACHES,),
    f"{_CHAT}._check_for_unstreamed_tool_args": (CALLS,),
    f"{_DETECTOR}.parse_streaming_increment": (CALLS,),
    f"{_PARSER}.get_structure_constraint": (CHOICE,),
    f"{_PROTOCOL}.ChatCompletionRequest.to_sampling_params": (CHOICE,),
    f"{_PROTOCOL}.ResponsesRequest.to_sampling_params": (CHOICE, TRANSLATION),
    # Events and variables that are read
    f"{_MESSAGES}._generate_anthropic_stream": (MESSAGES,),
    f"{_RESPONSES}._responses_stream_generator_non_harmony": (CALLS, LOGPROBS),
}
"""Functions of SGLang's whose code is relied on, hooked or not, with the groups that do."""

_ENTRY_POINTS = {
    "run_scheduler_process": Role.SCHEDULER,
    "run_data_parallel_controller_process": Role.OTHER,
    "run_detokenizer_process": Role.DETOKENIZER,
    "begin_worker": Role.WORKER,
}


def current_role() -> Role:
    """This process's role, by the SGLang entry point on the stack that loads plugins."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if role := _ENTRY_POINTS.get(frame.f_code.co_name):
            return role
        frame = frame.f_back
    return Role.MAIN if multiprocessing.parent_process() is None else Role.OTHER


def changed(
    seams: Mapping[str, Seam], sources: Mapping[str, tuple[Group, ...]], tested: Tested
) -> dict[Group, list[str]]:
    """The groups that cannot work with the installed SGLang, each with what it lacks, takes or
    does otherwise."""
    lacking: dict[Group, list[str]] = {}
    for symbol, seam in seams.items():
        for method, part in seam.places():
            path = f"{symbol}.{method}" if method else symbol
            if problem := sglang_check.unlike(path, tested.signatures.get(path)):
                lacking.setdefault(part.group, []).append(f"{path} {problem}")
    for path, groups_of in sources.items():
        if sglang_check.is_rewritten(path, tested.sources.get(path)):
            for group in groups_of:
                lacking.setdefault(group, []).append(f"{path} has another body")
    return lacking


def verify(sglang_version: str) -> None:
    """Compares all that the extension hooks, relies on, calls and reads with the installed SGLang,
    and notes for all processes which groups are off. Raises RuntimeError with the whole list if
    this SGLang lacks what no engine serves without."""
    lacking = changed(dict(_all_seams()), SOURCES, sglang_check.tested_with(sglang_version))
    needed = [
        f"{group.name}: {', '.join(lacking[group])}" for group in lacking if not group.without
    ]
    symbols = sglang_api.HTTP_PROCESS + sglang_api.SCHEDULER_PROCESS
    missing = sglang_check.missing(symbols, [sglang_http_types, sglang_types])
    if missing := [*missing, *sglang_check.missing_variables(tool_calls.VARIABLES)]:
        needed.append(f"it has no {', '.join(missing)}")
    if needed:
        raise RuntimeError(f"what no engine serves without has changed: {'; '.join(needed)}")
    sglang_check.note_off(
        {
            group.name: f"SGLang's {', '.join(problems)}: {group.without}"
            for group, problems in lacking.items()
        }
    )


def used_seams(role: Role, *, shares_prefixes: bool) -> dict[str, Seam]:
    """The seams of a process, without those of groups that `verify` noted as off."""
    unused = () if shares_prefixes else (SHARED,)  # keys are made often
    off = sglang_check.groups_off()
    left = {
        symbol: seam.without([*unused, *(group for group in groups() if group.name in off)])
        for symbol, seam in (_WORKER_SEAMS if role is Role.WORKER else SEAMS.get(role, {})).items()
    }
    return {symbol: seam for symbol, seam in left.items() if seam is not None}


def groups() -> frozenset[Group]:
    """Every group."""
    return frozenset(part.group for _, seam in _all_seams() for _, part in seam.places())


def apply_hooks(role: Role, seams: Mapping[str, Seam]) -> None:
    """Applies seams through SGLang's registry. Raises RuntimeError naming every symbol that did not
    change."""
    registry, classes = sglang_api.HookRegistry, dict[str, type]()
    for symbol, seam in seams.items():
        if seam.methods:
            classes[symbol] = _subclass(pkgutil.resolve_name(symbol), seam.methods)
        function = classes.get(symbol) or _joined(seam)
        registry.register(symbol, function, sglang_api.HookType[seam.kind])
    _apply_at_once(registry)
    missing = [symbol for symbol in seams if not _is_hooked(symbol, classes.get(symbol))]
    if missing:
        raise RuntimeError(f"these hooks did not apply in the {role} process: {', '.join(missing)}")


def _subclass(base: type, methods: Mapping[str, tuple[Part, ...]]) -> type:
    """A class in place of `base`, in which our functions are before, around and after methods."""
    own: dict[str, Any] = {name: getattr(base, name) for name in ("__doc__", "__module__")}
    own |= {name: with_parts(getattr(base, name), parts) for name, parts in methods.items()}
    made: type = type(base)(base.__name__, (base,), own | {"__qualname__": base.__qualname__})
    return made


def with_parts(original: Callable[..., Any], parts: Sequence[Part]) -> Callable[..., Any]:
    """A function of SGLang's with ours before, around and after it."""
    made = original
    for part in reversed(parts):
        made = _with(made, part)
    return made


def _with(inner: Callable[..., Any], part: Part) -> Callable[..., Any]:
    """A function with one of ours before, around or after it."""
    function = part.function

    @wraps(inner)
    def run_around(*args: Any, **kw: Any) -> Any:
        return function(inner, *args, **kw)

    @wraps(inner)
    def run_before(*args: Any, **kw: Any) -> Any:
        function(*args, **kw)
        return inner(*args, **kw)

    @wraps(inner)
    def run_after(*args: Any, **kw: Any) -> Any:
        made = inner(*args, **kw)
        other = function(made, *args, **kw)
        return made if other is None else other

    return {"around": run_around, "before": run_before, "after": run_after}[part.when]


def _joined(seam: Seam) -> Callable[..., Any]:
    """The functions of a seam as one, as the registry takes it. Only hooks around a function may
    be several."""
    *outer, last = (part.function for part in seam.parts)
    assert not outer or {part.when for part in seam.parts} == {"around"}
    for function in reversed(outer):
        last = _nested(function, last)
    return last


def _nested(outer: Callable[..., Any], inner: Callable[..., Any]) -> Callable[..., Any]:
    def hook(original: Callable[..., Any], *args: Any, **kw: Any) -> Any:
        return outer(partial(inner, original), *args, **kw)

    return hook


# Packages that import nothing of SGLang's, and have most names of a process. To look at a name
# counts a reference to it, so a forked process would copy the memory of all that they hold.
_WITHOUT_SGLANG = sys.stdlib_module_names | {
    *("IPython", "aiohttp", "compressed_tensors", "fastapi", "huggingface_hub", "mpmath"),
    *("networkx", "numpy", "openai", "opentelemetry", "pydantic", "pynvml", "redis", "requests"),
    *("rich", "scipy", "sympy", "tokenizers", "torch", "transformers", "triton", "zmq"),
}


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
    for path, found in list(sys.modules.items()):
        if isinstance(found, ModuleType) and path.partition(".")[0] not in _WITHOUT_SGLANG:
            for name, value in list(vars(found).items()):
                if id(value) in changed:
                    setattr(found, name, changed[id(value)][1])


def _is_hooked(symbol: str, made: type | None) -> bool:
    """Whether `symbol` now is a wrapper that the registry made, or the class that was made."""
    try:
        found = pkgutil.resolve_name(symbol)
    except (ImportError, AttributeError):
        return False
    is_ours = hasattr(found, "__wrapped__") if made is None else found is made
    return symbol in sglang_api.HookRegistry._patched and is_ours


def rows() -> Iterator[tuple[str, str, str, str, str]]:
    """Of every hook: process, symbol, when our function runs, the function, and its group."""
    for role in Role:
        for symbol, seam in SEAMS.get(role, {}).items():
            for method, part in seam.places():
                path = f"{symbol}.{method}" if method else symbol
                module = part.function.__module__.removeprefix("sgl_ext.")
                yield role, path, part.when, f"{module}.{part.function.__name__}", part.group.name


def tested_now(installed: str) -> dict[str, dict[str, str]]:
    """What `tested.json` has of the installed SGLang. Of an older version than the last, signatures
    that differ from the last one's, and not those of groups that are off in it."""
    is_last = installed == TESTED[-1]
    last = {} if is_last else sglang_check.tested_with(TESTED[-1]).signatures
    off = OFF.get(installed, frozenset())
    paths = {
        path for _, path, _, _, group in rows() if path.startswith("sglang.") and group not in off
    }
    found = sglang_check.signatures_of(sorted(paths))
    sources = {
        path: sglang_check.fingerprint_of(pkgutil.resolve_name(path)) for path in sorted(SOURCES)
    }
    signatures = {path: one for path, one in found.items() if one != last.get(path)}
    return {"signatures": signatures, "sources": sources}


def main(argv: Sequence[str]) -> None:
    """Prints every hook and every group; with --tested, what `tested.json` has of the installed
    SGLang."""
    if "--tested" in argv:
        sglang_versions.put_stand_ins(installed := version("sglang"))
        print(json.dumps({installed: tested_now(installed)}, indent=1))
        return
    for row in rows():
        print("  ".join(row))
    for group in sorted(groups()):
        print(f"{group.name}: " + (f"may be off: {group.without}" if group.without else "needed"))
    for role, seams in SEAMS.items():
        functions = sum(1 for seam in seams.values() for _ in seam.places())
        print(f"{role}: {len(seams)} hooks, {functions} functions")


def _all_seams() -> Iterator[tuple[str, Seam]]:
    for seams in SEAMS.values():
        yield from seams.items()


if __name__ == "__main__":
    main(sys.argv[1:])
