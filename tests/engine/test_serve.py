"""Which radix cache an engine is started with."""

from __future__ import annotations

import pytest

from sgl_ext.engine.serve import cache_flags


@pytest.mark.parametrize("argv", [[], ["--port", "1"], ["--enable-hierarchical-cache"]])
def test_our_cache_is_selected(argv: list[str]) -> None:
    ours = ("--radix-cache-backend", "sgl_ext", "--radix-eviction-policy", "priority")
    assert cache_flags(argv) == ours


def test_another_policy_of_eviction_is_kept() -> None:
    argv = ["--radix-eviction-policy", "lfu"]
    assert cache_flags(argv) == ("--radix-cache-backend", "sgl_ext")


@pytest.mark.parametrize(
    "argv",
    [
        ["--radix-cache-backend", "another"],
        ["--radix-cache-backend=another"],
        ["--enable-kv-cache-sharding"],
        ["--enable-int8-mamba-checkpoint"],
        ["--enable-unified-cache-external-linker"],
    ],
)
def test_not_over_the_callers_choice_or_where_sglang_refuses_any(argv: list[str]) -> None:
    assert cache_flags(argv) == ()
