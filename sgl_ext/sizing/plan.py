"""How many tokens an engine's KV cache holds, and how many sessions and pins that is."""

from dataclasses import dataclass

from sgl_ext.sizing.kv_cost import KvCost
from sgl_ext.sizing.model_config import ModelShape, SizingError

GIB = 1 << 30
_MIB = 1 << 20
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
