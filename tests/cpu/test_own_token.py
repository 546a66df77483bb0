"""Attention to the own token alone: what it returns, and what it writes."""

from __future__ import annotations

import warnings
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch


def test_each_token_gets_its_own_value_and_its_keys_and_values_are_cached() -> None:
    written: list[Any] = []
    with warnings.catch_warnings(action="ignore"):  # SGLang's, while it is imported
        kind: Any = import_module("sgl_ext_cpu.own_token").OwnTokenBackend
    backend = kind.__new__(kind)
    backend.swa_out_cache_loc = None
    backend.token_to_kv_pool = SimpleNamespace(set_kv_buffer=lambda *args: written.append(args))
    layer = SimpleNamespace(tp_q_head_num=4, tp_k_head_num=2, v_head_dim=3)
    batch = SimpleNamespace(out_cache_loc=torch.tensor([7, 8]))
    keys, values = torch.rand(2, 6), torch.rand(2, 6)
    for forward in (backend.forward_extend, backend.forward_decode):
        output = forward(torch.rand(2, 12), keys, values, layer, batch)
        first, second = values[:, :3], values[:, 3:]
        assert torch.equal(output, torch.cat([first, first, second, second], dim=1))
    assert len(written) == 2
    (_, place, *both) = written[0]
    assert place.loc is batch.out_cache_loc
    assert (both[0] is keys, both[1] is values) == (True, True)
