"""Reads what a model's config.json says about its attention.

SGLang keeps a different amount for each kind of attention, so a config that is not understood is
an error that names its key, never an estimate.
"""

import json
import os
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sgl_ext.settings.schema import BalancerSettings, EngineSettings

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Layers whose sliding window SGLang 0.5.23 keeps in a pool of its own. In other models it keeps
# every token of such layers.
_WINDOW_POOL = {
    *("GptOssForCausalLM", "GraniteSWAForCausalLM", "GraniteMoeSWAForCausalLM"),
    *("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration", "LagunaForCausalLM"),
    *("MellumForCausalLM",),
}
# Each of these keys means a cache that this module does not know.
_UNKNOWN_KEYS = (
    *("hybrid_override_pattern", "hybrid_layer_pattern", "layers_block_type", "linear_attn_config"),
    *("mamba_d_state", "mamba_num_heads", "ssm_cfg", "ssm_state_size", "attn_layer_period"),
    *("attention_other_setting", "sparse_attention_config", "compress_ratios", "local_layer_ids"),
    *("swa_num_key_value_heads", "swa_head_dim", "cross_attention_layers", "num_kv_shared_layers"),
    *("block_configs", "global_head_dim", "num_global_key_value_heads", "attention_chunk_size"),
)
_LINEAR_KEYS = (
    *("linear_num_key_heads", "linear_num_value_heads"),
    *("linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim"),
)


class SizingError(Exception):
    """Something that is needed is missing or not known; the message names it."""


@dataclass(frozen=True)
class LinearAttention:
    """The layers that keep one state per sequence: a gated delta net, as in Qwen3-Next."""

    layers: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int
    state_bytes: int
    """Bytes of one number of the recurrent state."""


@dataclass(frozen=True)
class ModelShape:
    """What decides the size of a model's KV cache.

    Layers are disjoint: `full_layers` keep every token, `window_layers` a pool of their own,
    `linear` a state for each sequence.
    """

    architecture: str
    dtype: str
    full_layers: int
    window_layers: int = 0
    window: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    v_head_dim: int = 0
    latent_dim: int = 0
    """Of multi-head latent attention: numbers a token and layer, on each GPU. 0: not MLA."""
    rope_dim: int = 0
    index_dim: int = 0
    """Of DeepSeek's sparse attention: the index key of a token and layer. 0: none."""
    linear: LinearAttention | None = None
    context: int | None = None
    kv_dtype: str | None = None
    """What the checkpoint prescribes for the KV cache, where it does."""
    not_counted: tuple[str, ...] = ()


def model_folder(model: str) -> Path:
    """The folder of a model: a path, or a name whose files are in Hugging Face's cache.

    Raises SizingError if neither has a config.json.
    """
    if (Path(model) / "config.json").is_file():
        return Path(model)
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    hub = Path(os.environ.get("HF_HUB_CACHE", home / "hub"))
    found = hub.glob(f"models--{model.replace('/', '--')}/snapshots/*/config.json")
    newest = max(found, key=lambda path: path.stat().st_mtime, default=None)
    if newest is None:
        raise SizingError(
            f"model={model!r}: no config.json there, nor in {hub}; "
            f"`hf download {model} config.json model.safetensors.index.json` fetches what is needed"
        )
    return newest.parent


def read_config(folder: Path) -> dict[str, Any]:
    """The config.json of a model. Raises SizingError if it cannot be read."""
    path = folder / "config.json"
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise SizingError(f"{path}: {error}") from None
    if not isinstance(document, dict):
        raise SizingError(f"{path}: not an object")
    return document


def shape_of(config: Mapping[str, Any]) -> ModelShape:
    """What a config says. Raises SizingError, naming the key, if it is not understood."""
    text = config.get("text_config")
    text = {**config, **text} if isinstance(text, dict) else dict(config)
    names = config.get("architectures") or text.get("architectures")
    architecture = names[0] if isinstance(names, list) and names else "?"
    for key in _UNKNOWN_KEYS:
        if text.get(key):
            raise SizingError(f"{architecture}: {key}: this kind of cache is not known here")
    if set(text.get("attn_type_list") or ()) - {1}:
        raise SizingError(f"{architecture}: attn_type_list: only full attention (1) is known here")
    layers = _number(text, "num_hidden_layers", architecture)
    return ModelShape(
        architecture=architecture,
        dtype=_dtype(text, architecture),
        context=text.get("max_position_embeddings"),
        kv_dtype=_kv_dtype(config),
        not_counted=_not_counted(config, text),
        **_attention(text, architecture),
        **_layers(text, layers, architecture),
    )


def _attention(text: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """What a token takes in one layer that keeps it."""
    if text.get("kv_lora_rank"):
        rope = _number(text, "qk_rope_head_dim", architecture)
        latent = _number(text, "kv_lora_rank", architecture)
        index = _number(text, "index_head_dim", architecture) if text.get("index_topk") else 0
        return {"latent_dim": latent, "rope_dim": rope, "index_dim": index}
    heads = _number(text, "num_attention_heads", architecture)
    head_dim = text.get("head_dim") or _number(text, "hidden_size", architecture) // heads
    kv_heads = text.get("num_key_value_heads") or heads
    return {
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "v_head_dim": text.get("v_head_dim") or head_dim,
    }


def _layers(text: Mapping[str, Any], layers: int, architecture: str) -> dict[str, Any]:
    """How many layers keep every token, a window, or a state."""
    if any(key in text for key in _LINEAR_KEYS):
        return _linear_layers(text, layers, architecture)
    types = list(text.get("layer_types") or ())[:layers]
    strange = set(types) - {"full_attention", "sliding_attention"}
    if strange:
        raise SizingError(f"{architecture}: layer_types: {min(strange)!r} is not known here")
    sliding = types.count("sliding_attention")
    if not sliding or architecture not in _WINDOW_POOL:
        return {"full_layers": layers}
    window = _number(text, "sliding_window", architecture)
    return {"full_layers": layers - sliding, "window_layers": sliding, "window": window}


def _linear_layers(text: Mapping[str, Any], layers: int, architecture: str) -> dict[str, Any]:
    every = text.get("full_attention_interval") or 4
    types = text.get("layer_types")
    full = types.count("full_attention") if types else layers // every
    heads = {key.removeprefix("linear_"): _number(text, key, architecture) for key in _LINEAR_KEYS}
    state = DTYPE_BYTES.get(text.get("mamba_ssm_dtype") or "float32")
    if state is None:
        raise SizingError(f"{architecture}: mamba_ssm_dtype={text['mamba_ssm_dtype']!r}: unknown")
    linear = LinearAttention(
        layers=layers - full,
        key_heads=heads["num_key_heads"],
        value_heads=heads["num_value_heads"],
        key_dim=heads["key_head_dim"],
        value_dim=heads["value_head_dim"],
        conv_kernel=heads["conv_kernel_dim"],
        state_bytes=state,
    )
    return {"full_layers": full, "linear": linear}


def _dtype(text: Mapping[str, Any], architecture: str) -> str:
    """What `--dtype auto` computes with. SGLang takes 16 bits, of one kind or the other, where a
    config states float32 or nothing."""
    dtype = str(text.get("dtype") or text.get("torch_dtype") or "float32").removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        raise SizingError(f"{architecture}: dtype={dtype!r}: not known here")
    return "16-bit" if dtype == "float32" else dtype


def _kv_dtype(config: Mapping[str, Any]) -> str | None:
    """A checkpoint of NVIDIA's ModelOpt can prescribe it."""
    quantization = config.get("quantization_config") or {}
    scheme = quantization.get("kv_cache_scheme") or {}
    algorithm = quantization.get("kv_cache_quant_algo")
    is_fp8 = str(algorithm).upper() == "FP8" or (
        quantization.get("quant_method") == "modelopt" and scheme.get("num_bits") == 8
    )
    return "fp8_e4m3" if is_fp8 else None


def _not_counted(config: Mapping[str, Any], text: Mapping[str, Any]) -> tuple[str, ...]:
    found = []
    if config.get("vision_config") or config.get("audio_config"):
        found.append("memory of the encoder for images or sound while it runs")
    if text.get("num_nextn_predict_layers"):
        found.append("the KV cache of next-token layers, if speculative decoding uses them")
    sliding = "sliding_attention" in (text.get("layer_types") or ())
    architectures = config.get("architectures") or ["?"]
    if sliding and architectures[0] not in _WINDOW_POOL:
        found.append(f"the sliding window of {architectures[0]}: SGLang keeps every token there")
    return tuple(found)


def _number(text: Mapping[str, Any], key: str, architecture: str) -> int:
    value = text.get(key)
    if not isinstance(value, int) or value <= 0:
        raise SizingError(f"{architecture}: {key}={value!r}: not a positive number in config.json")
    return value


KV_DTYPE_BYTES = {
    **DTYPE_BYTES,
    "16-bit": 2,
    "bf16": 2,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
}
_CONV_BYTES = 2
_INDEX_BLOCK = 128
"""A block of the index of sparse attention has one scale of 4 bytes."""


@dataclass(frozen=True)
class KvCost:
    """Bytes on each GPU of an engine."""

    dtype: str
    full_token: int
    """A token, in all layers that keep every token."""
    window_token: int = 0
    """A token, in all layers with a sliding window of their own pool."""
    sequence: int = 0
    """The state of one sequence, in all layers of linear attention."""

    def token_bytes(self, window_ratio: float) -> float:
        """A token of the engine's capacity; the windows' pool has `window_ratio` times as many."""
        return self.full_token + window_ratio * self.window_token


def kv_cost(shape: ModelShape, tp: int, dtype: str = "auto") -> KvCost:
    """The cost on each of `tp` GPUs. Raises SizingError if SGLang would not store it so."""
    name = (shape.kv_dtype or shape.dtype) if dtype == "auto" else dtype
    number = KV_DTYPE_BYTES.get(name)
    if number is None:
        known = ", ".join(each for each in KV_DTYPE_BYTES if each != "16-bit")
        raise SizingError(f"kv-cache-dtype={name!r}: not known here; known are {known}")
    layer = _latent_bytes(shape, name, number) if shape.latent_dim else _heads(shape, tp) * number
    state = 0 if shape.linear is None else _state_bytes(shape.linear, tp)
    return KvCost(name, shape.full_layers * layer, shape.window_layers * layer, state)


def _heads(shape: ModelShape, tp: int) -> int:
    """Numbers of one token and layer. Each GPU keeps at least one head."""
    return max(1, shape.kv_heads // tp) * (shape.head_dim + shape.v_head_dim)


def _latent_bytes(shape: ModelShape, name: str, number: int) -> int:
    """Multi-head latent attention: each GPU keeps the whole latent vector."""
    if not shape.index_dim:
        return (shape.latent_dim + shape.rope_dim) * number
    index = shape.index_dim + shape.index_dim // _INDEX_BLOCK * 4
    if name == "fp8_e4m3":
        # With the scales of its blocks, and the rotated part as bfloat16.
        return shape.latent_dim + shape.latent_dim // _INDEX_BLOCK * 4 + shape.rope_dim * 2 + index
    return (shape.latent_dim + shape.rope_dim) * number + index


def _state_bytes(linear: LinearAttention, tp: int) -> int:
    groups = linear.key_heads + (tp - linear.key_heads if linear.key_heads % tp else 0)
    channels = linear.value_heads * linear.value_dim + 2 * groups * linear.key_dim
    if channels % tp or linear.value_heads % tp:
        raise SizingError(f"tp={tp}: does not divide the {linear.value_heads} heads of the state")
    conv = channels // tp * (linear.conv_kernel - 1) * _CONV_BYTES
    state = linear.value_heads // tp * linear.value_dim * linear.key_dim * linear.state_bytes
    return linear.layers * (conv + state)


_INDEX = "model.safetensors.index.json"


def weight_bytes(folder: Path) -> int | None:
    """The bytes of all weights as they are stored, quantized or not; None if no file tells.

    Raises SizingError if the index cannot be read.
    """
    index = folder / _INDEX
    if index.is_file():
        try:
            return int(json.loads(index.read_text())["metadata"]["total_size"])
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise SizingError(f"{index}: metadata.total_size: {error!r}") from None
    sizes = [path.stat().st_size for path in folder.glob("*.safetensors")]
    return sum(sizes) or None


# How many tokens an engine's KV cache holds, and how many sessions and pins that is.

_MIB = 1 << 20
# docs/how/prefix-index.md and docs/reference/limits.md.
_SEGMENT_BYTES = 70
_SEGMENT_TOKENS = 1024
_TABLES_BYTES = (64 + 64) * _MIB
_LOG_BYTES = 256 * _MIB
# The balancer's estimate until requests show better.
_TEXT_BYTES_PER_TOKEN = 4
# Measured on 2 CPU cores without a GPU, by bench/warm_turn. Tokens of a warm turn, and the host
# time in milliseconds of plain SGLang and of an engine and a balancer of sgl-ext.
WARM_TURNS = ((6_100, 36, 11), (16_400, 40, 14), (50_900, 86, 19), (125_000, 171, 27))
# The balancer's processor time in milliseconds: for 2 KB (bench/proxy), and in the turn of
# 50.9K tokens.
_BALANCER_MS = ((500, 0.19), (50_900, 1.7))


@dataclass(frozen=True)
class HostNeeds:
    """Upper bounds in bytes, by the default settings."""

    hicache_bytes: int
    balancer_index_bytes: int
    balancer_bodies_bytes: int
    balancer_tables_bytes: int
    engine_token_cache_bytes: int
    store_bytes: int
    store_conversations: int
    request_log_bytes: int
    process_logs_bytes: int


@dataclass(frozen=True)
class Load:
    """What a warm turn of this length costs and saves. None: beyond what was measured."""

    balancer_ms: float
    requests_per_s_and_process: float
    host_ms_stock: float | None
    host_ms: float | None


HOST_RATIO = 2
"""HiCache's memory on the host over the KV cache on the device, as recommended."""


def host_needs(engines: int, tokens: int, context: int, kv_bytes: int) -> HostNeeds:
    """For a node with engines of `tokens` in `kv_bytes` each, and sessions of `context` tokens."""
    balancer, engine = BalancerSettings(), EngineSettings()
    segments = engines * (tokens // _SEGMENT_TOKENS)
    store = balancer.store_limit_bytes
    return HostNeeds(
        hicache_bytes=engines * HOST_RATIO * kv_bytes,
        balancer_index_bytes=min(segments * _SEGMENT_BYTES, balancer.index_limit_bytes),
        balancer_bodies_bytes=balancer.account_bytes,
        balancer_tables_bytes=_TABLES_BYTES,
        engine_token_cache_bytes=engine.token_cache_bytes,
        store_bytes=store,
        store_conversations=store // (context * _TEXT_BYTES_PER_TOKEN),
        request_log_bytes=balancer.request_log_limit_bytes,
        process_logs_bytes=(engines + 1) * _LOG_BYTES,
    )


def load_of(context: int) -> Load:
    """Between measured lengths, in proportion."""
    (first, least), (last, most) = _BALANCER_MS
    balancer = least + (most - least) * max(0, context - first) / (last - first)
    stock, ours = _between(context, 1), _between(context, 2)
    return Load(round(balancer, 2), round(1000 / balancer), stock, ours)


def as_json(part: HostNeeds | Load) -> dict[str, float | None]:
    return asdict(part)


def _between(context: int, column: int) -> float | None:
    lengths = [row[0] for row in WARM_TURNS]
    at = bisect_left(lengths, context)
    if at == len(lengths):
        return None
    if at == 0:
        return float(WARM_TURNS[0][column]) if context == lengths[0] else None
    low, high = WARM_TURNS[at - 1], WARM_TURNS[at]
    part = (context - low[0]) / (high[0] - low[0])
    return round(low[column] + part * (high[column] - low[column]), 1)


GIB = 1 << 30
MAX_PINS = 4096
"""Of one engine: docs/guide/pins.md."""
# By SGLang's rule (0.5.23) for --mem-fraction-static: the GPU's memory in GiB below which a row
# holds, tokens of a prefill chunk, and the largest batch of decode graphs with tp < 4 and from 4.
_RESERVES = (
    (20, 2048, 8, 8),
    (35, 4096, 48, 160),
    (60, 4096, 32, 160),
    (90, 8192, 256, 512),
    (160, 8192, 256, 512),
    (float("inf"), 16384, 512, 512),
)


@dataclass(frozen=True)
class Wish:
    """What somebody wants to serve, and with what. Times are in seconds, sizes in bytes."""

    gpu_bytes: int | None = None
    tp: int = 1
    engines: int = 1
    max_total_tokens: int | None = None
    mem_fraction: float | None = None
    weights_bytes: int | None = None
    sessions: int | None = None
    context: int = 50_000
    shared: int = 0
    pin_budget: float = 1 / 3
    window_ratio: float = 0.8
    state_ratio: float = 0.9
    """Memory for states, divided by memory for tokens (--mamba-full-memory-ratio)."""


@dataclass(frozen=True)
class EngineRoom:
    """What one engine holds. None: not known, or not used by this model."""

    mem_fraction: float | None
    weights_bytes_per_gpu: int | None
    kv_bytes_per_gpu: int
    tokens: int
    state_slots: int | None
    resident_sessions: int
    pinned_tokens: int
    pinned_prefixes: int


def engine_room(shape: ModelShape, cost: KvCost, wish: Wish) -> EngineRoom:
    """Raises SizingError, naming it, if something is missing or nothing fits."""
    if wish.shared >= wish.context:
        raise SizingError(f"shared={wish.shared}: must be less than context={wish.context}")
    token = cost.token_bytes(wish.window_ratio)
    fraction, weights, slots = None, None, None
    if wish.max_total_tokens is not None:
        tokens = wish.max_total_tokens
        room = int(tokens * token)
    else:
        fraction, weights, room = _room(shape, wish)
        if cost.sequence:
            share = wish.state_ratio / (1 + wish.state_ratio)
            slots = max(0, int(room * share) // cost.sequence - 1)
            room -= (slots + 1) * cost.sequence
        tokens = int(room / token)
    if tokens < wish.context:
        raise SizingError(
            f"tp={wish.tp}: the KV cache holds {tokens:,} tokens, less than one session of "
            f"{wish.context:,}; give more GPUs (tp) or another kv-cache-dtype"
        )
    # The budget is a share of the smaller pool.
    smaller = tokens * min(1, wish.window_ratio) if cost.window_token else tokens
    pinned = int(smaller * wish.pin_budget)
    return EngineRoom(
        fraction,
        weights,
        room,
        tokens,
        slots,
        _sessions(tokens, wish, slots),
        pinned,
        min(MAX_PINS, _own(pinned, wish)),
    )


def engines_for(sessions: int, room: EngineRoom) -> int:
    """Engines whose caches hold all sessions at the same time."""
    return -(-sessions // max(1, room.resident_sessions))


def reserved_fraction(gpu_bytes: int, tp: int, *, is_mla: bool) -> float:
    """SGLang's default of --mem-fraction-static, without speculation and DP attention."""
    gpu_mib = gpu_bytes / _MIB
    _, chunk, few, many = next(row for row in _RESERVES if gpu_mib < row[0] * 1024)
    reserved = 512 + chunk * 1.5 + tp / 8 * 1024 + (few if tp < 4 else many) * 2
    if is_mla:
        reserved += 1.5 * 1024
    if gpu_mib > 60 * 1024:
        reserved = max(reserved, 10 * 1024)
    return round((gpu_mib - reserved) / gpu_mib, 3)


def _room(shape: ModelShape, wish: Wish) -> tuple[float, int, int]:
    """The fraction of each GPU, the weights on it, and the bytes that are left for the cache."""
    if wish.gpu_bytes is None:
        raise SizingError("gpu: missing; give --gpu SIZE, or --max-total-tokens")
    if wish.weights_bytes is None:
        raise SizingError(
            "weights: not known, as the model has neither model.safetensors.index.json nor "
            "*.safetensors; give --weights SIZE"
        )
    fraction = wish.mem_fraction
    if fraction is None:
        is_mla = bool(shape.latent_dim)
        fraction = reserved_fraction(wish.gpu_bytes, wish.tp, is_mla=is_mla)
    weights = -(-wish.weights_bytes // wish.tp)
    room = int(wish.gpu_bytes * fraction) - weights
    if room <= 0:
        needed = wish.weights_bytes / (wish.gpu_bytes * fraction)
        raise SizingError(
            f"tp={wish.tp}: {weights / GIB:.1f} GiB of weights on each GPU leave no room in "
            f"{wish.gpu_bytes * fraction / GIB:.1f} GiB; tp must be more than {needed:.1f}"
        )
    return fraction, weights, room


def _sessions(tokens: int, wish: Wish, slots: int | None) -> int:
    found = _own(tokens, wish)
    return found if slots is None else min(found, slots)


def _own(tokens: int, wish: Wish) -> int:
    """Sessions whose prompts fit: the part that all share is there once."""
    return max(0, (tokens - wish.shared) // (wish.context - wish.shared))
