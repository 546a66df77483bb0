"""What an unforgiving engine does to freed memory and to tokens that are not copied yet. Pure."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sgl_ext_cpu import unforgiving


def pool(slots: int) -> tuple[SimpleNamespace, SimpleNamespace]:
    """An allocator's memory of two layers, and what it was asked to free."""
    layers = [torch.zeros(slots, 1, 2) for _ in range(2)]
    memory = SimpleNamespace(k_buffer=layers, v_buffer=[torch.zeros(slots, 1, 2)])
    return memory, SimpleNamespace(freed=None)


@pytest.mark.parametrize(("page", "poisoned"), [(1, [5, 6]), (4, [4, 5, 6, 7])])
def test_freed_slots_and_their_whole_pages_hold_nothing_that_can_be_read(
    page: int, poisoned: list[int]
) -> None:
    memory, asked = pool(12)
    allocator = SimpleNamespace(page_size=page, get_kvcache=lambda: memory)
    slots = torch.tensor([5, 6])
    unforgiving._poison_slots(lambda _, freed: setattr(asked, "freed", freed), allocator, slots)
    assert asked.freed is slots
    for layer in (*memory.k_buffer, *memory.v_buffer):
        assert layer.isnan().any(dim=(1, 2)).nonzero().flatten().tolist() == poisoned


def test_freed_pages_hold_nothing_that_can_be_read() -> None:
    memory, _ = pool(12)
    allocator = SimpleNamespace(page_size=4, get_kvcache=lambda: memory)
    unforgiving._poison_pages(lambda *_: None, allocator, torch.tensor([0, 2]))
    assert (
        memory.k_buffer[0].isnan().any(dim=(1, 2)).tolist() == [True] * 4 + [False] * 4 + [True] * 4
    )


def test_tokens_are_invalid_until_the_event_after_their_copy() -> None:
    result: Any = SimpleNamespace(next_token_ids=torch.tensor([3, 4]), copy_done=None)
    unforgiving._copy_late(lambda *_, **__: None, result, return_logprob=False)
    tokens = result.next_token_ids
    assert tokens.tolist() == [-1, -1]
    result.copy_done.synchronize()
    assert tokens.tolist() == [3, 4]
