"""The attention function against a full softmax, with no engine.

The reference builds the whole score matrix and its mask, one sequence and one head at
a time, in float64.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from sgl_ext_cpu import attention
from sgl_ext_cpu.attention import Decode, Extend, Slots
from torch import Tensor

HEADS = {"a key head each": (4, 4), "grouped": (6, 2), "one key head": (4, 1)}
DIM = 16
SCALE = 0.31
CAPACITY = 6000

heads = pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS.keys())


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """The same numbers each time, and no waiting for threads on work as small as this."""
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def softmax_attention(
    query: Tensor, keys: Tensor, values: Tensor, window: int | None = None
) -> Tensor:
    """`query [E, heads, dim]` over `keys [S, key heads, dim]`; the last `E` keys are its own."""
    new, total = query.shape[0], keys.shape[0]
    group = query.shape[1] // keys.shape[1]
    rows = torch.arange(total - new, total).unsqueeze(1)
    columns = torch.arange(total).unsqueeze(0)
    seen = columns <= rows
    if window is not None:
        seen &= columns >= rows - window
    output = torch.empty_like(query)
    for head in range(query.shape[1]):
        k, v = keys[:, head // group].double(), values[:, head // group].double()
        scores = (query[:, head].double() @ k.T * SCALE).masked_fill(~seen, float("-inf"))
        output[:, head] = (scores.softmax(dim=-1) @ v).to(query.dtype)
    return output


def cache(key_heads: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    shape = (CAPACITY, key_heads, DIM)
    return torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)


LAYOUTS = {
    "in one run": lambda n: torch.arange(1, n + 1),
    "scattered": lambda n: torch.randperm(CAPACITY - 1)[:n] + 1,
    "two long runs": lambda n: torch.cat(
        [torch.arange(3000, 3000 + n // 2), torch.arange(7, 7 + n - n // 2)]
    ),
    "a long run, then short ones": lambda n: torch.cat(
        [torch.arange(1, n - n // 4 + 1), torch.arange(2500, 2500 + 2 * (n // 4), 2)]
    ),
    "descending": lambda n: torch.arange(CAPACITY - 1, CAPACITY - 1 - n, -1),
}
layouts = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())


@heads
@layouts
@pytest.mark.parametrize(
    ("total", "new"), [(1, 1), (2, 1), (9, 9), (700, 700), (1300, 1), (1300, 300)]
)
def test_new_tokens_after_a_prefix(heads, layout, total: int, new: int) -> None:
    keys, values = cache(heads[1])
    slots = layout(total)
    query = torch.randn(new, heads[0], DIM)
    got = Extend(Slots(slots), new).attend(query, keys, values, SCALE, None)
    torch.testing.assert_close(
        got, softmax_attention(query, keys[slots], values[slots]), rtol=1e-4, atol=1e-5
    )


@heads
@layouts
@pytest.mark.parametrize("window", [0, 63, 700, 5000])
@pytest.mark.parametrize(("total", "new"), [(1, 1), (80, 80), (1100, 40)])
def test_a_sliding_window(heads, layout, window: int, total: int, new: int) -> None:
    keys, values = cache(heads[1])
    slots = layout(total)
    query = torch.randn(new, heads[0], DIM)
    got = Extend(Slots(slots), new).attend(query, keys, values, SCALE, window)
    torch.testing.assert_close(
        got, softmax_attention(query, keys[slots], values[slots], window), rtol=1e-4, atol=1e-5
    )


def test_a_window_over_several_blocks_of_queries() -> None:
    keys, values = cache(2)
    slots = LAYOUTS["two long runs"](2 * attention.QUERY_BLOCK + 500)
    query = torch.randn(2 * attention.QUERY_BLOCK + 100, 4, DIM)
    got = Extend(Slots(slots), len(query)).attend(query, keys, values, SCALE, 300)
    torch.testing.assert_close(
        got, softmax_attention(query, keys[slots], values[slots], 300), rtol=1e-4, atol=1e-5
    )


@heads
@layouts
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(
    "lengths",
    [(1,), (1300,), (3, 1, 2), (200, 190, 260, 240), (1, 1400), (2100, 2000)],
    ids=str,
)
def test_one_token_each(heads, layout, window: int | None, lengths: tuple[int, ...]) -> None:
    keys, values = cache(heads[1])
    sequences = [layout(length) for length in lengths]
    query = torch.randn(len(lengths), heads[0], DIM)
    plan = Decode.of([Slots(slots) for slots in sequences], window, query.dtype)
    got = plan.attend(query, keys, values, SCALE)
    expected = torch.cat(
        [
            softmax_attention(query[row : row + 1], keys[slots], values[slots], window)
            for row, slots in enumerate(sequences)
        ]
    )
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_short_sequences_of_like_length_are_one_batch() -> None:
    alike = [Slots(torch.arange(1, n)) for n in (100, 120, 90)]
    assert Decode.of(alike, None, torch.float32).index is not None
    unlike = [Slots(torch.arange(1, n)) for n in (1900, 3, 3, 3, 3, 3)]
    assert Decode.of(unlike, None, torch.float32).index is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_cache_of_another_dtype(dtype: torch.dtype) -> None:
    keys, values = cache(2, dtype)
    slots = torch.arange(1, 1001)
    query = torch.randn(300, 4, DIM)
    got = Extend(Slots(slots), 300).attend(query, keys, values, SCALE, None)
    expected = softmax_attention(query, keys[slots].float(), values[slots].float())
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    keys, values = cache(2, dtype)
    slots = torch.arange(1, 1501)
    query = torch.randn(300, 4, DIM).to(dtype)
    got = Extend(Slots(slots), 300).attend(query, keys, values, SCALE, None)
    expected = softmax_attention(query, keys[slots], values[slots])
    torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)


def test_large_scores_do_not_overflow() -> None:
    keys, values = cache(1)
    slots = torch.arange(1, 1201)
    query = torch.randn(100, 2, DIM) * 300
    got = Extend(Slots(slots), 100).attend(query, keys, values, SCALE, None)
    torch.testing.assert_close(
        got, softmax_attention(query, keys[slots], values[slots]), rtol=1e-3, atol=1e-3
    )


@layouts
def test_segments_are_the_slots(layout) -> None:
    slots = layout(1777)
    named = Slots(slots)
    for start, stop in itertools.pairwise([0, 1, 2, 600, 1500, 1777]):
        everything = torch.arange(CAPACITY)
        ordered = everything[named.ordered(start, stop)]
        assert ordered.tolist() == slots[start:stop].tolist()
        parts = [everything[segment] for segment in named.unordered(start, stop)]
        assert sorted(torch.cat(parts).tolist()) == sorted(slots[start:stop].tolist())


def test_a_long_run_is_read_in_place() -> None:
    keys, _ = cache(2)
    (segment,) = Slots(torch.arange(5, 4000)).unordered(0, 3995)
    assert segment == slice(5, 4000)
    assert attention._read(keys, segment, keys).data_ptr() == keys[5].data_ptr()


@pytest.mark.parametrize("new", [0, 6])
def test_new_tokens_are_part_of_the_sequence(new: int) -> None:
    with pytest.raises(ValueError, match=f"{new} new tokens in a sequence of 5"):
        Extend(Slots(torch.arange(1, 6)), new)
