"""How many tokens an engine's KV cache holds, and how many sessions and pins that is."""

from bisect import bisect_left
from dataclasses import asdict, dataclass

from sgl_ext.settings.schema import BalancerSettings, EngineSettings
from sgl_ext.sizing.model import KvCost, ModelShape, SizingError

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


def host_needs(engines: int, tokens: int, context: int) -> HostNeeds:
    """For a node with engines of `tokens` each, and sessions of `context` tokens."""
    balancer, engine = BalancerSettings(), EngineSettings()
    segments = engines * (tokens // _SEGMENT_TOKENS)
    store = balancer.store_limit_bytes
    return HostNeeds(
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
