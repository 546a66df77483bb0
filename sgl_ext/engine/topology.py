"""What of SGLang the extension refuses at the start, and what it serves with some features off.

A rule looks at SGLang's resolved arguments, its model and our settings, and stands for a row of
docs/guide/models.md. The start of the engine raises, logs and counts what this finds.

Flags of the host cache that cannot work are refused with their values. SGLang takes some and fails
later: when it allocates the host pool, after it has loaded the weights, or when it makes the first
copy. Others have no effect.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from typing import NamedTuple

from sgl_ext.engine import sglang_api
from sgl_ext.engine.arguments import caches, resolved
from sgl_ext.engine.sglang_http_types import ModelConfig
from sgl_ext.engine.sglang_types import ResolvedArgs, ServerArgs
from sgl_ext.engine.sglang_versions import TESTED, WITHOUT_WORKERS, is_tested
from sgl_ext.settings.schema import EngineSettings
from sgl_ext.settings.shared_tier import is_shared_tier
from sgl_ext.settings.sources import USE_RAY

CACHE_BACKEND = "sgl_ext"
"""The name under which `--radix-cache-backend` selects our cache."""


@dataclass(frozen=True)
class Facts:
    """What a start decides by. args: as SGLang resolved them. model: None if there is none.
    has_states: whether the model has Mamba or other recurrent layers. sglang: its version."""

    args: ResolvedArgs
    model: ModelConfig | None
    settings: EngineSettings
    has_states: bool = False
    sglang: str = TESTED[-1]


def facts_of(server_args: ServerArgs) -> Facts:
    """The facts of a start with these arguments."""
    args = resolved(server_args)
    has_model = args.model_path.lower() not in ("none", "dummy")
    model = sglang_api.model_config_of(server_args) if has_model else None
    has_states = model is not None and sglang_api.uses_ssm_state(model)
    return Facts(args, model, EngineSettings.from_environment(), has_states, version("sglang"))


class Rule(NamedTuple):
    """feature: the row in docs/guide/models.md, and the label of the metric. flag: what to change.
    why: what is refused or lost, the reason, and what to do."""

    feature: str
    flag: str
    applies: Callable[[Facts], bool]
    why: str

    def __str__(self) -> str:
        return f"{self.flag}: {self.why}"


_BYPASS = (
    "the extension hooks SGLang's single Python HTTP process, and with this flag requests "
    "would bypass it; leave it out"
)
_UNSHAREABLE = "cannot be combined with --shared-prefixes; leave one out"
_UNTESTED = (
    "is not tested with the extension; leave it out, or serve without the extension "
    "(SGLANG_PLUGINS=none sglang serve)"
)
_NO_PREFIXES = "no prefixes are published and nothing is pinned"
_UNDRAFTABLE = "is not tested with drafts from context; leave it out, or draft-from-context off"
_OWN_CACHE = f"with its own radix cache {_NO_PREFIXES}; leave it out for both"


def _shares(applies: Callable[[ResolvedArgs], bool]) -> Callable[[Facts], bool]:
    return lambda facts: bool(facts.settings.shared_prefixes) and applies(facts.args)


def _drafts(applies: Callable[[Facts], bool]) -> Callable[[Facts], bool]:
    return lambda facts: facts.settings.draft_from_context != "off" and applies(facts)


def _is_pure_swa(model: ModelConfig | None) -> bool:
    return model is not None and model.is_hybrid_swa and model.full_attention_layer_ids == []


def _has_parts(facts: Facts) -> bool:
    """Whether a prefix of cached tokens is not usable by itself."""
    has_windows = facts.model is not None and facts.model.is_hybrid_swa
    return (has_windows and not _is_pure_swa(facts.model)) or facts.has_states


def _has_sparse_index(facts: Facts) -> bool:
    """Whether attention chooses what it reads by an index of its own, as DeepSeek's DSA does."""
    config = None if facts.model is None else facts.model.hf_config
    text = getattr(config, "text_config", None)
    return any(getattr(one, "index_topk", None) is not None for one in (config, text))


def _has_storage(facts: Facts) -> bool:
    args = facts.args
    return args.enable_hierarchical_cache and args.hicache_storage_backend is not None


def _has_shared_tier(facts: Facts) -> bool:
    return _has_storage(facts) and is_shared_tier(facts.args.hicache_storage_backend_extra_config)


def _orders_otherwise(facts: Facts) -> bool:
    args = facts.args
    return (
        not args.enable_priority_scheduling
        or args.schedule_policy != "fcfs"
        or args.disable_priority_preemption
        or args.schedule_low_priority_values_first
    )


def _is_harmony(model: ModelConfig) -> bool:
    return bool(getattr(model.hf_config, "model_type", None) == "gpt_oss")


def _serves_grpc(facts: Facts) -> bool:
    # Each of these flags sets others of them.
    args = facts.args
    return args.grpc_mode or args.smg_grpc_mode or args.grpc_port is not None


def _needs_one_worker(args: ResolvedArgs) -> bool:
    keys = (args.api_key, args.admin_api_key)
    return any(keys) or bool(args.enable_lora) or args.enable_response_store


REFUSED = (
    Rule(
        "several tokenizer workers of an older SGLang",
        "--tokenizer-worker-num",
        lambda facts: facts.args.tokenizer_worker_num > 1 and facts.sglang in WITHOUT_WORKERS,
        f"its workers load no plugins; leave it out, or use SGLang {TESTED[-1]}",
    ),
    Rule(
        "what several tokenizer workers lack",
        "--api-key, --admin-api-key, --enable-lora, --enable-response-store",
        lambda facts: facts.args.tokenizer_worker_num > 1 and _needs_one_worker(facts.args),
        "each of SGLang's tokenizer workers has adapters and stored responses of its own, and "
        "checks no keys; leave these flags out, or --tokenizer-worker-num",
    ),
    Rule("gRPC", "--grpc-port, --grpc-mode, --smg-grpc-mode", _serves_grpc, _BYPASS),
    Rule("encoder server", "--encoder-only", lambda facts: facts.args.encoder_only, _BYPASS),
    Rule("Ray", "--use-ray", lambda facts: facts.args.use_ray, USE_RAY),
    Rule(
        "encoder disaggregation",
        "--language-only",
        lambda facts: facts.args.language_only,
        f"requests wait for encoders outside the queue, which {_UNTESTED}",
    ),
    Rule(
        "prefill context parallelism",
        "--attn-cp-size",
        lambda facts: facts.args.attn_cp_size > 1,
        f"that these ranks decide alike {_UNTESTED}",
    ),
    Rule(
        "HTTP/2",
        "--enable-http2",
        lambda facts: facts.args.enable_http2,
        "the extension ends its streams as uvicorn ends, and this flag serves with another "
        "server; leave it out: balancers speak HTTP/1.1",
    ),
    Rule(
        "PD multiplexing",
        "--enable-pdmux",
        lambda facts: facts.args.enable_pdmux,
        "it schedules prefill and decoding in a loop of its own, which the extension's "
        "preemption and slices do not know; leave it out",
    ),
    Rule(
        "decoupled speculation",
        "--decoupled-spec-role",
        lambda facts: facts.args.decoupled_spec_role != "null",
        "it is not tested with the extension; use a draft model in the same engine "
        "(--speculative-algorithm)",
    ),
    Rule(
        "elastic expert parallelism",
        "--elastic-ep-backend",
        lambda facts: facts.args.elastic_ep_backend is not None,
        "ranks that join or fail while the engine runs do not get the extension's clock and "
        "orders, so ranks would decide differently; leave it out",
    ),
    Rule(
        "diffusion language models",
        "--dllm-algorithm",
        lambda facts: facts.args.dllm_algorithm is not None,
        "they compute answers in blocks, which the extension's preemption and slices do not "
        "know; serve them without the extension (SGLANG_PLUGINS=none sglang serve)",
    ),
    Rule(
        "HiCache with another cache",
        "--enable-hierarchical-cache",
        lambda facts: (
            facts.args.enable_hierarchical_cache
            and (facts.args.enable_flexkv or _is_pure_swa(facts.model))
        ),
        "FlexKV, and SGLang's radix cache for models with sliding windows in all layers, have no "
        "host pool; leave it out",
    ),
    Rule(
        "HiCache of untested SGLang",
        "--enable-hierarchical-cache",
        lambda facts: (
            facts.args.enable_hierarchical_cache
            and not is_tested(facts.sglang)
            and (facts.has_states or _has_sparse_index(facts))
        ),
        "versions of SGLang have lost the index or the states of such a model on their way to host "
        "memory and back, which changes answers, and this version is not tested; leave it out",
    ),
    Rule(
        "shared tier of sliding windows or states",
        "--hicache-storage-backend",
        lambda facts: _has_shared_tier(facts) and _has_parts(facts),
        "engines share keys and values of whole prefixes, and this model needs more; leave it out",
    ),
    Rule(
        "PD disaggregation with data parallelism",
        "--disaggregation-mode",
        lambda facts: facts.args.disaggregation_mode != "null" and caches(facts.args) > 1,
        "the balancer hands KV over between engines, not between their ranks; use more engines in "
        "place of --dp-size and --attn-dp-size",
    ),
    *(
        Rule("shared prefixes", flag, _shares(applies), _UNSHAREABLE)
        for flag, applies in (
            ("--disable-radix-cache", lambda args: args.disable_radix_cache),
            ("--radix-cache-backend", lambda args: args.radix_cache_backend != CACHE_BACKEND),
            ("--enable-hierarchical-cache", lambda args: args.enable_hierarchical_cache),
            ("--enable-lmcache", lambda args: args.enable_lmcache),
            ("--enable-flexkv", lambda args: args.enable_flexkv),
            ("--kv-events-config", lambda args: args.kv_events_config is not None),
            ("--disaggregation-mode", lambda args: args.disaggregation_mode != "null"),
            ("--skip-tokenizer-init", lambda args: args.skip_tokenizer_init),
            ("--nnodes", lambda args: args.nnodes > 1),
        )
    ),
    *(
        Rule("drafts from context", flag, _drafts(applies), why)
        for flag, applies, why in (
            (
                "--disaggregation-mode",
                lambda facts: facts.args.disaggregation_mode != "null",
                _UNDRAFTABLE,
            ),
            ("--pp-size", lambda facts: facts.args.pp_size > 1, _UNDRAFTABLE),
            ("--enable-dp-attention", lambda facts: facts.args.attn_dp_size > 1, _UNDRAFTABLE),
            ("--enable-watermark", lambda facts: facts.args.enable_watermark, _UNDRAFTABLE),
            (
                "--model-path",
                lambda facts: facts.has_states,
                "drafts from context cannot take back what a recurrent layer has read, and this "
                "model has some; leave draft-from-context off",
            ),
        )
    ),
)
"""What ends a start."""

DEGRADED = (
    Rule(
        "untested SGLang",
        "--untested-sglang",
        lambda facts: not is_tested(facts.sglang),
        "nobody has tested this version of SGLang with the extension; what the extension hooks and "
        "reads has the form that it was written for",
    ),
    Rule(
        "PD disaggregation",
        "--disaggregation-mode",
        lambda facts: facts.args.disaggregation_mode != "null",
        "nothing is prefilled ahead, priorities order the balancer's queue alone, and a decode "
        "engine pins nothing",
    ),
    Rule(
        "no radix cache",
        "--disable-radix-cache",
        lambda facts: facts.args.disable_radix_cache,
        f"{_NO_PREFIXES}; leave it out for both",
    ),
    Rule("LMCache", "--enable-lmcache", lambda facts: facts.args.enable_lmcache, _OWN_CACHE),
    Rule("FlexKV", "--enable-flexkv", lambda facts: facts.args.enable_flexkv, _OWN_CACHE),
    Rule(
        "another radix cache",
        "--radix-cache-backend",
        lambda facts: facts.args.radix_cache_backend != CACHE_BACKEND,
        f"with another radix cache than {CACHE_BACKEND} {_NO_PREFIXES}",
    ),
    Rule(
        "sliding windows in all layers",
        "--model-path",
        lambda facts: _is_pure_swa(facts.model),
        f"with this model SGLang uses another radix cache, so {_NO_PREFIXES}",
    ),
    Rule(
        "pipeline parallelism",
        "--pp-size",
        lambda facts: facts.args.pp_size > 1,
        "a prompt that is computed in chunks is not interrupted for a more important request, and "
        "a request preempts only those of its own micro-batch",
    ),
    Rule(
        "data-parallel attention on several machines",
        "--nnodes",
        lambda facts: facts.args.nnodes > 1 and facts.args.attn_dp_size > 1,
        "data-parallel ranks on other machines than the first publish neither prefixes nor load, "
        "and their pins and settings cannot be changed",
    ),
    Rule(
        "sliding windows and recurrent layers",
        "--model-path",
        _has_parts,
        "with this model a part of a cached prefix is not usable by itself: nothing is prefilled "
        "ahead, prefills are not interrupted, what a preempted request has computed is not kept, "
        "and with HiCache pins do not spill to host memory",
    ),
    Rule(
        "storage of HiCache",
        "--hicache-storage-backend",
        lambda facts: _has_storage(facts) and not _has_shared_tier(facts),
        "requests are not routed to prefixes that are in storage alone",
    ),
    Rule(
        "another schedule policy",
        "--schedule-policy, --enable-priority-scheduling, --disable-priority-preemption, "
        "--schedule-low-priority-values-first",
        _orders_otherwise,
        "the queue is in SGLang's order, and priorities, aging and shares of tenants have no "
        "effect or less; leave these flags out for all",
    ),
    Rule(
        "another eviction policy",
        "--radix-eviction-policy",
        lambda facts: facts.args.radix_eviction_policy != "priority",
        "what no request will read again is not evicted first; leave it out for that",
    ),
    Rule(
        "no tokenizer",
        "--skip-tokenizer-init",
        lambda facts: facts.args.skip_tokenizer_init,
        "blocks of prompts get no pins, and nothing is prefilled ahead",
    ),
    Rule(
        "embedding and reward models",
        "--is-embedding",
        lambda facts: facts.model is not None and not facts.model.is_generation,
        "requests that generate nothing are neither pinned, published nor prefilled ahead",
    ),
    Rule(
        "streaming sessions",
        "--enable-streaming-session",
        lambda facts: facts.args.enable_streaming_session,
        "requests of SGLang's sessions are neither pinned nor published, and share no prefill",
    ),
    Rule(
        "delayed prefills of sleeping ranks",
        "--enable-prefill-delayer, --sleep-on-idle",
        lambda facts: facts.args.enable_prefill_delayer and facts.args.sleep_on_idle,
        "a prefill waits until all ranks have taken part --prefill-delayer-max-delay-passes times, "
        "and an idle rank that sleeps does so once a second: 30 s by SGLang's default; leave one "
        "of them out",
    ),
    Rule(
        "memory saver",
        "--enable-memory-saver",
        lambda facts: facts.args.enable_memory_saver,
        "nothing is prefilled ahead, as memory can be released only while nothing runs",
    ),
    Rule(
        "multimodal models",
        "--model-path",
        lambda facts: facts.model is not None and facts.model.is_multimodal,
        "in prompts with images, video or sound, marked blocks get no pins of their own, and no "
        "such prompt is prefilled ahead",
    ),
    Rule(
        "gpt-oss on /v1/responses",
        "--model-path",
        lambda facts: facts.model is not None and _is_harmony(facts.model),
        "on /v1/responses, marked blocks get no pins of their own, and no turn is prefilled ahead",
    ),
)
"""What takes something away, and is said once."""


def refused(facts: Facts) -> list[Rule]:
    """The rules that end this start."""
    return [rule for rule in REFUSED if rule.applies(facts)]


def degraded(facts: Facts) -> list[Rule]:
    """The rules that take something away from this engine."""
    return [rule for rule in DEGRADED if rule.applies(facts)]


def features(rules: Iterable[Rule]) -> tuple[str, ...]:
    """The features of these rules, each once."""
    return tuple(dict.fromkeys(rule.feature for rule in rules))


_LAYOUTS = {
    "direct": ("layer_first", "page_first_direct"),
    "kernel": ("layer_first", "page_first", "page_head"),
    "kernel_ascend": ("page_first_direct", "page_first_kv_split"),
}
"""What each backend copies. SGLang itself turns `page_first` into `page_first_direct` for the
direct one."""


def problems(args: ResolvedArgs) -> Iterator[str]:
    """What is wrong, one flag in a line; nothing if there is no host cache."""
    backend = args.hicache_storage_backend
    if not args.enable_hierarchical_cache:
        # A decode engine can offload to storage by itself.
        if backend is not None and args.disaggregation_mode == "null":
            need = "has no effect without --enable-hierarchical-cache; add it, or leave this out"
            yield f"--hicache-storage-backend={backend}: {need}"
        return
    size, ratio = args.hicache_size, args.hicache_ratio
    if size < 0:
        yield f"--hicache-size={size}: must be a number of GB, or 0 for --hicache-ratio to count"
    if ratio is not None and size <= 0 and not 0 < ratio < math.inf:
        what = "the host pool has so many times the tokens of the device's"
        yield f"--hicache-ratio={ratio:g}: must be above 0: {what}"
    copies, layout = args.hicache_io_backend, args.hicache_mem_layout
    if layout not in (fit := _LAYOUTS.get(copies, (layout,))):
        reason = f"--hicache-io-backend {copies} does not copy this layout; it copies"
        yield f"--hicache-mem-layout={layout}: {reason} {', '.join(fit)}"
