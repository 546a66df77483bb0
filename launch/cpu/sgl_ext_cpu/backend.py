"""The attention backend: SGLang's torch_native without recomputing the prefix.

The plan of a batch is made once before the first layer, and every layer reads it. torch_native
still computes cross attention, encoders, and models whose keys and values differ in width, which
is correct but slow.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch import Tensor

from sgl_ext_cpu.attention import Decode, Extend, Slots

_CACHE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class CpuAttentionBackend(TorchNativeAttnBackend):  # type: ignore[misc]  # sglang is untyped
    """Attends with the new queries only, reading the cache in place."""

    def __init__(self, model_runner: Any) -> None:
        super().__init__(model_runner)
        if self.use_sliding_window_kv_pool:
            raise NotImplementedError(
                "the sgl_ext_cpu attention backend keeps one pool for all layers: "
                "pass --disable-hybrid-swa-memory"
            )
        if self.token_to_kv_pool.dtype not in _CACHE_DTYPES:
            raise NotImplementedError(
                "the sgl_ext_cpu attention backend cannot read a cache of "
                f"{self.token_to_kv_pool.dtype}: leave --kv-cache-dtype out"
            )
        self._sequences: list[Slots] = []
        self._extends: list[Extend] = []
        self._decodes: dict[tuple[int | None, torch.dtype], Decode] = {}

    def init_forward_metadata(self, forward_batch: Any) -> None:
        super().init_forward_metadata(forward_batch)
        self._sequences, self._extends, self._decodes = [], [], {}
        mode = forward_batch.forward_mode
        if mode.is_idle() or forward_batch.encoder_lens is not None:
            return
        verified = 0
        if mode.is_target_verify():
            verified = _chain_of(forward_batch)
        elif forward_batch.spec_info is not None and not mode.is_extend():
            raise NotImplementedError(
                "the sgl_ext_cpu attention backend computes no drafts of --speculative-algorithm"
            )
        table = self.req_to_token_pool.req_to_token
        self._sequences = [
            Slots(table[row, : length + verified])
            for row, length in zip(
                forward_batch.req_pool_indices.tolist(),
                forward_batch.seq_lens.tolist(),
                strict=True,
            )
        ]
        if verified:
            self._extends = [Extend(slots, verified) for slots in self._sequences]
        elif not mode.is_decode():
            new = forward_batch.extend_seq_lens.tolist()
            self._extends = [
                Extend(slots, count) for slots, count in zip(self._sequences, new, strict=True)
            ]

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """The length of a sequence that data-parallel attention adds to a batch, so that all ranks
        have as many."""
        return 1

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
    ) -> Tensor:
        if _left_to_torch_native(layer, forward_batch):
            return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache)
        keys, values = self._write(k, v, layer, forward_batch, save_kv_cache)
        query = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        output = torch.empty_like(query)
        end = 0
        for sequence in self._extends:
            start, end = end, end + sequence.new
            output[start:end] = sequence.attend(
                query[start:end], keys, values, layer.scaling, _window(layer)
            )
        output[end:] = 0  # what data-parallel attention adds
        return output.view(q.shape)

    def forward_decode(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
    ) -> Tensor:
        if _left_to_torch_native(layer, forward_batch):
            return super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache)
        keys, values = self._write(k, v, layer, forward_batch, save_kv_cache)
        query = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        plan = (_window(layer), query.dtype)
        if plan not in self._decodes:
            self._decodes[plan] = Decode.of(self._sequences, *plan)
        output = self._decodes[plan].attend(query, keys, values, layer.scaling)
        return output.view(-1, layer.tp_q_head_num * layer.v_head_dim)

    def _write(
        self, k: Tensor | None, v: Tensor | None, layer: Any, forward_batch: Any, save: bool
    ) -> tuple[Tensor, Tensor]:
        """Put the new keys and values into the cache; return the layer's whole cache."""
        pool = self.token_to_kv_pool
        if save and k is not None and v is not None:
            pool.set_kv_buffer(
                layer, KVWriteLoc(forward_batch.out_cache_loc, self.swa_out_cache_loc), k, v
            )
        return pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)


def _chain_of(forward_batch: Any) -> int:
    """How many tokens a pass of verification adds to each sequence. They are a chain: each token
    sees those before it, as in a prompt."""
    drafts = forward_batch.spec_info
    width = int(drafts.draft_token_num)
    following = drafts.retrieve_next_token
    if following is not None and width > 1 and bool((following[:, :-1] < 0).any()):
        raise NotImplementedError(
            "the sgl_ext_cpu attention backend verifies chains of tokens, and no trees: pass "
            "--speculative-ngram-max-bfs-breadth 1"
        )
    return width


def _left_to_torch_native(layer: Any, forward_batch: Any) -> bool:
    if layer.logit_cap > 0:
        raise NotImplementedError(
            f"the sgl_ext_cpu attention backend does not cap logits (logit_cap={layer.logit_cap})"
        )
    return (
        layer.is_cross_attention
        or forward_batch.encoder_lens is not None
        or layer.attn_type != AttentionType.DECODER
        or layer.qk_head_dim != layer.v_head_dim
    )


def _window(layer: Any) -> int | None:
    size = layer.sliding_window_size
    return size if size is not None and size > -1 else None
