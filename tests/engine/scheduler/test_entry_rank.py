"""Which process of an engine publishes for a data-parallel rank, and under which number."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sgl_ext.engine import sglang_api
from sgl_ext.engine.scheduler.state import data_parallel_rank, is_entry_rank


def publishing(monkeypatch: pytest.MonkeyPatch, **ranks: int | None) -> int | None:
    """The data-parallel rank that the process with these ranks publishes for, if it publishes."""
    own = {"attn_tp_rank": 0, "attn_cp_rank": 0, "pp_rank": 0, "dp_rank": None, **ranks}
    monkeypatch.setattr(sglang_api, "get_parallel", lambda: SimpleNamespace(**own), raising=False)
    return data_parallel_rank() if is_entry_rank() else None


def test_one_process_of_each_rank_publishes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert publishing(monkeypatch) == 0
    assert publishing(monkeypatch, attn_tp_rank=1) is None
    assert publishing(monkeypatch, attn_cp_rank=1) is None
    assert publishing(monkeypatch, pp_rank=1) is None


def test_replicas_and_groups_of_attention_publish_under_their_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # --tp-size 4 --attn-dp-size 2: two groups of two.
    found = [publishing(monkeypatch, attn_tp_rank=rank % 2, dp_rank=rank // 2) for rank in range(4)]
    assert found == [0, None, 1, None]
