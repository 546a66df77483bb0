"""The bytes of host pools' pages, in SGLang's own pools."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sgl_ext.engine.sglang_types import HostPool
from sgl_ext.engine.tiers.shared_pages import HostPages
from sgl_ext.settings.schema import SettingsError

pytestmark = pytest.mark.filterwarnings("ignore")  # SGLang warns while it is imported

LAYERS, PAGES, HEADS, WIDTH = 3, 6, 2, 4


def mha(layout: str, page_size: int, kind: str = "MHATokenToKVPoolHost") -> HostPool:
    """A pool with random contents."""
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    pool: Any = type(kind, (MHATokenToKVPoolHost,), {}).__new__(MHATokenToKVPoolHost)
    pool.__class__ = type(kind, (MHATokenToKVPoolHost,), {})
    shapes = {
        "layer_first": (2, LAYERS, PAGES * page_size, HEADS, WIDTH),
        "page_first": (2, PAGES * page_size, LAYERS, HEADS, WIDTH),
        "page_first_direct": (2, PAGES, LAYERS, page_size, HEADS, WIDTH),
    }
    pool.head_num, pool.head_dim = HEADS, WIDTH
    return filled(pool, layout, page_size, shapes[layout])


def mla(layout: str, page_size: int) -> HostPool:
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

    pool: Any = MLATokenToKVPoolHost.__new__(MLATokenToKVPoolHost)
    shapes = {
        "layer_first": (LAYERS, PAGES * page_size, 1, WIDTH),
        "page_first": (PAGES * page_size, LAYERS, 1, WIDTH),
        "page_first_direct": (PAGES, LAYERS, page_size, 1, WIDTH),
    }
    pool.kv_cache_dim = WIDTH
    return filled(pool, layout, page_size, shapes[layout])


def filled(pool: Any, layout: str, page_size: int, shape: tuple[int, ...]) -> HostPool:
    pool.layout, pool.page_size, pool.layer_num = layout, page_size, LAYERS
    pool.size, pool.start_layer, pool.end_layer = PAGES * page_size, 0, LAYERS
    pool.dtype, pool.device, pool.pin_memory = torch.bfloat16, "cpu", False
    pool.dcp_size, pool.dcp_rank = 1, 0
    pool.kv_buffer = torch.rand(shape).to(torch.bfloat16)
    return pool  # type: ignore[no-any-return]


def page_of(pool: Any, number: int) -> torch.Tensor:
    page: torch.Tensor = pool.get_data_page(number * pool.page_size, flat=True)
    return page.clone()


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
@pytest.mark.parametrize("make", [mha, mla])
@given(page_size=st.sampled_from([1, 2, 4]), data=st.data())
def test_pages_come_to_other_places_of_another_pool(
    make: Any, layout: str, page_size: int, data: st.DataObject
) -> None:
    source, target = make(layout, page_size), make(layout, page_size)
    numbers = data.draw(st.permutations(range(PAGES)))[:3]
    places = data.draw(st.permutations(range(PAGES)))[:3]
    before = {n: page_of(target, n) for n in range(PAGES)}
    here, there = HostPages(source), HostPages(target)
    assert here.form == there.form
    stored = [b"".join(parts) for parts in here.parts(slots_of(numbers, page_size))]
    assert {len(page) for page in stored} == {here.bytes}
    for page, parts in zip(stored, there.parts(slots_of(places, page_size)), strict=True):
        at = 0
        for part in parts:
            part[:] = page[at : at + len(part)]
            at += len(part)
        assert at == len(page)
    for number, place in zip(numbers, places, strict=True):
        assert torch.equal(page_of(target, place), page_of(source, number))
    for other in {*range(PAGES)} - {*places}:
        assert torch.equal(page_of(target, other), before[other])


def slots_of(pages: list[int], page_size: int) -> Any:
    return torch.tensor([page * page_size + slot for page in pages for slot in range(page_size)])


def test_pools_that_order_bytes_differently_have_other_forms() -> None:
    pools = [mha("layer_first", 2), mha("page_first", 2), mla("layer_first", 2)]
    pools += [mha("layer_first", 4)]
    forms = [str(HostPages(pool).form) for pool in pools]
    assert len({*forms}) == len(forms)


@pytest.mark.parametrize("kind", ["layout", "pool"])
def test_a_pool_whose_pages_lie_in_an_unknown_way_is_refused(kind: str) -> None:
    pool: Any = mha("layer_first", 2, "AnotherPool" if kind == "pool" else "MHATokenToKVPoolHost")
    if kind == "layout":
        pool.layout = "page_head"
    with pytest.raises(SettingsError, match=rf"^--hicache-mem-layout={pool.layout} of a "):
        HostPages(pool)
