"""Attention in which a token sees only itself: its output is its own value.

A token at the end of a prompt then costs no more than one at its beginning, so that a CPU computes
a million tokens in seconds. All else is as with attention: keys and values are written into the
cache, and SGLang matches, allocates, chunks and stores as ever. Answers depend on the last token
alone.
"""

from __future__ import annotations

import logging
from typing import Any

from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch import Tensor

_logger = logging.getLogger(__name__)


class OwnTokenBackend(TorchNativeAttnBackend):  # type: ignore[misc]  # sglang is untyped
    """Writes keys and values, and reads none."""

    def __init__(self, model_runner: Any) -> None:
        super().__init__(model_runner)
        _logger.warning("sgl-ext-cpu: no token attends to another one: answers mean nothing")

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """There is nothing to plan."""

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
    ) -> Tensor:
        if save_kv_cache:
            self.token_to_kv_pool.set_kv_buffer(
                layer, KVWriteLoc(forward_batch.out_cache_loc, self.swa_out_cache_loc), k, v
            )
        heads = layer.tp_q_head_num // layer.tp_k_head_num
        values = v.view(-1, layer.tp_k_head_num, layer.v_head_dim)
        return values.repeat_interleave(heads, dim=1).flatten(1)

    forward_decode = forward_extend
