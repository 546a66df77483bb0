"""SGLang's host cache (HiCache) where device and host are the same memory: plain torch copies.

SGLang copies KV between device and host by kernels of CUDA, and registers host memory with CUDA.
Here the direct copies (`--hicache-io-backend direct`) are index copies, which are done when they
return. A layer's KV is a tensor [slot, ...] on the device. On the host it is the same in the layout
`layer_first`, and a tensor [page, layer, slot in the page, ...] of all layers in
`page_first_direct`.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch

RESERVE_BYTES = 1 << 30
"""Memory that a host cache leaves free. SGLang leaves 10 GiB, more than small machines have."""

_POOLS = "sglang.srt.mem_cache.pool_host"
_USERS = ("mha", "mla", "mamba", "dsa")


def install() -> None:
    """Give SGLang's host pools these copies, and memory that is not registered."""
    base: Any = import_module(f"{_POOLS}.base")
    common: Any = import_module(f"{_POOLS}.common")
    common.ALLOC_MEMORY_FUNCS["cpu"] = _allocate
    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = RESERVE_BYTES
    # Only memory for an accelerator is pinned, and SGLang's file storage asks for such a page.
    base.HostKVCache.pin_memory = property(lambda self: False, lambda self, _: None)
    # torch's stream of the CPU has all of an accelerator's but this.
    torch.cpu.Stream.synchronize = lambda self: None
    copies = (
        transfer_kv_direct,
        transfer_kv_per_layer_direct_pf_lf,
        transfer_kv_all_layer_direct_lf_pf,
    )
    for user in _USERS:
        module = import_module(f"{_POOLS}.{user}")
        for copy in copies:
            setattr(module, copy.__name__, copy)


def _allocate(
    dims: tuple[int, ...], dtype: torch.dtype, device: str, *_: Any, allocator: Any, **__: Any
) -> torch.Tensor:
    memory: torch.Tensor = allocator.allocate(dims, dtype=dtype, device=device)
    return memory


def transfer_kv_direct(
    src_layers: Sequence[torch.Tensor],
    dst_layers: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Copies slots of each layer."""
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """Copies slots of one layer from host tensors of all layers to the device."""
    pages, offsets = src_indices // page_size, src_indices % page_size
    for source, target in zip(src_ptrs, dst_ptrs, strict=True):
        target[dst_indices] = source[pages, layer_id, offsets]


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Copies slots of all layers to host tensors. src_ptrs: the layers of the first host tensor
    (keys), then those of the second (values)."""
    pages, offsets = dst_indices // page_size, dst_indices % page_size
    layers = len(src_ptrs) // len(dst_ptrs)
    for number, source in enumerate(src_ptrs):
        dst_ptrs[number // layers][pages, number % layers, offsets] = source[src_indices]
