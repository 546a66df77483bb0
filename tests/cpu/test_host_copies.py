"""Copies between device and host of a HiCache: by themselves, and in an engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sgl_ext_cpu import host_copies
from sgl_ext_cpu.nursery import Nursery

from tests.engine.scheduler.test_event_publisher import running_engine
from tests.kinds import slow_but_for

LAYERS, SLOTS = 3, 16
POOL, LENGTH = 4096, 1500


def layers() -> list[torch.Tensor]:
    """Keys or values of each layer: no two slots are equal."""
    return [torch.rand(SLOTS, 2, 4) for _ in range(LAYERS)]


@given(page=st.sampled_from([1, 2, 4]), data=st.data())
def test_slots_come_back_to_other_places_as_they_were(page: int, data: st.DataObject) -> None:
    pages = st.permutations(range(SLOTS // page)).map(lambda order: order[: SLOTS // page // 2])
    slots = [
        torch.tensor([p * page + n for p in data.draw(pages) for n in range(page)])
        for _ in range(3)
    ]
    here, on_host, back = slots
    keys, values = layers(), layers()
    by_layer = [torch.zeros(SLOTS, 2, 4) for _ in range(2 * LAYERS)]
    host_copies.transfer_kv_direct(keys + values, by_layer, here, on_host, page)
    by_page = [torch.zeros(SLOTS // page, LAYERS, page, 2, 4) for _ in range(2)]
    host_copies.transfer_kv_all_layer_direct_lf_pf(keys + values, by_page, here, on_host, page)
    for number, (key, value) in enumerate(zip(keys, values, strict=True)):
        first, second = torch.zeros(2, SLOTS, 2, 4), torch.zeros(2, SLOTS, 2, 4)
        sources = [by_layer[number], by_layer[LAYERS + number]]
        host_copies.transfer_kv_direct(sources, list(first), on_host, back, page)
        host_copies.transfer_kv_per_layer_direct_pf_lf(
            by_page, list(second), on_host, back, number, page
        )
        for found in (first, second):
            assert torch.equal(found[0][back], key[here])
            assert torch.equal(found[1][back], value[here])


@pytest.mark.parametrize(
    "layout", slow_but_for(["layer_first"], ["layer_first", "page_first_direct"])
)
def test_an_engine_reads_from_the_host_what_it_evicted(
    nursery: Nursery, tiny_model: Path, tmp_path: Path, layout: str
) -> None:
    flags = ("--max-total-tokens", str(POOL), "--enable-hierarchical-cache")
    flags += ("--hicache-ratio", "4", "--hicache-mem-layout", layout)
    with running_engine(nursery, tiny_model, tmp_path / "engine.log", *flags) as engine:
        prompts = [[20 + (n * k + k) % 900 for n in range(LENGTH)] for k in (7, 11, 13, 17, 19)]
        whole = {"sampling_params": {"max_new_tokens": 8, "temperature": 0}}
        answers = [engine.post("/generate", {"input_ids": prompt, **whole}) for prompt in prompts]
        again = engine.post("/generate", {"input_ids": prompts[0], **whole})
    assert again["meta_info"]["cached_tokens_details"]["host"] >= LENGTH - 64
    assert again["output_ids"] == answers[0]["output_ids"]
