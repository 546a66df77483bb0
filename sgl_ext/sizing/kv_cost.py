"""What a token, and a sequence, takes of one GPU's memory, as SGLang 0.5.23 lays them out."""

from dataclasses import dataclass

from sgl_ext.sizing.model_config import DTYPE_BYTES, LinearAttention, ModelShape, SizingError

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
