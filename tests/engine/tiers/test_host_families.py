"""What the host copies of a model beside keys and values, and what waits for it. SGLang's own code:
versions of it lost an index or a state on the way, and answers changed. Without an engine."""

from __future__ import annotations

import warnings
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest


@pytest.fixture(scope="module")
def pools() -> Any:
    with warnings.catch_warnings(action="ignore"):
        return import_module("sglang.srt.mem_cache.memory_pool")


def names_of(decls: Any) -> list[str]:
    return [decl.pool_name.value for decl in decls]


def sparse_pool(pools: Any, kpool: int) -> Any:
    """A device pool of sparse attention whose index has a key for each `kpool` tokens."""
    pool = object.__new__(pools.DSATokenToKVPool)
    buffers = [SimpleNamespace(numel=lambda: 1, shape=(1,))] * 2
    pool.__dict__ |= {
        "page_size": 64,
        "index_page_size": 64 // kpool,
        "index_head_dim": 128,
        "skip_topk_layers": [False, False],
        "index_k_with_scale_buffer": buffers,
        "dtype": None,
    }
    return pool


@pytest.mark.parametrize("kpool", [1, 4])
def test_the_index_of_sparse_attention_is_copied_page_by_page_with_its_keys_and_values(
    pools: Any, kpool: int
) -> None:
    with warnings.catch_warnings(action="ignore"):
        dsa = import_module("sglang.srt.mem_cache.pool_host.dsa")
    pool = sparse_pool(pools, kpool)
    decl = dsa.make_dsa_indexer_pool_decl(pool)
    assert decl.pool_name.value == "indexer"
    assert decl.indices_from_pool.value == "kv", "one page of the index belongs to one of the cache"
    # So no two prefixes that part at the end of a page share a row of the index.
    assert decl.storage_info.page_bytes(64) == 64 // kpool * (128 + 4)


def test_a_model_with_states_copies_what_its_attention_declares(pools: Any) -> None:
    hybrid = object.__new__(pools.HybridLinearKVPool)
    declared = ("kv", "indexer")
    hybrid.full_kv_pool = SimpleNamespace(host_pool_decls=lambda: declared)
    assert hybrid.host_pool_decls() == declared


def test_states_are_copied_within_the_device_only_after_they_came_back(pools: Any) -> None:
    log: list[str] = []
    loading = SimpleNamespace(
        consumer_index=0, wait_until=lambda layer: log.append(f"layer {layer} is loaded")
    )
    pool = object.__new__(pools.HybridReqToTokenPool)
    pool.mamba_map, pool.start_layer = {3: 0, 7: 1}, 0
    pool.layer_transfer_counter = loading
    pool.mamba_pool = SimpleNamespace(copy_from=lambda *_: log.append("copied"))
    pool.copy_mamba_state(SimpleNamespace(numel=lambda: 1), None)
    assert log == ["layer 7 is loaded", "copied"]


def test_the_compressed_keys_of_sparse_attention_beside_states_go_with_their_page(
    pools: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    host_pools = import_module("sglang.srt.mem_cache.memory_pool_host")
    monkeypatch.setattr(host_pools, "host_memory_budget_bytes", lambda: 1 << 30)
    with warnings.catch_warnings(action="ignore"):
        qsa = import_module("sglang.srt.mem_cache.pool_host.qsa")
    torch = import_module("torch")
    ratio, page, pages = 4, 64, 3
    keys = [torch.arange(pages * page // ratio * 8, dtype=torch.bfloat16).view(-1, 8)] * 2
    device = SimpleNamespace(qsa_compress_ratio=ratio, qsa_compressed_k_buffer_pool=keys)
    anchor = SimpleNamespace(
        page_size=page, page_num=pages, layout="layer_first", device="cpu", pin_memory=False
    )
    host = qsa.QSAIndexerPoolHost(device, anchor)
    rows = page // ratio * 8 * 2
    assert [tuple(buffer.shape) for buffer in host.device_buffers] == [(pages, rows)] * 2
    assert host.page_aligned_only, "no page is copied in part"
