"""Memory and copies that punish early reads and late ones, as a GPU's do.

On a CPU a freed slot keeps its keys and values, and a batch's tokens are there once it was
launched. So an engine that reads what it has freed, or tokens before their copy is done, answers
as if nothing were wrong. Here it does not: freed slots hold NaN until the next forward pass that
writes them, and tokens are invalid until the event after their copy.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from typing import Any

import torch

POISONED = "freed memory is poisoned"
COPIED_LATE = "tokens are copied late"
"""What the log says once, so that a test sees that it is so."""

_COPY_S = 0.002
_NOT_COPIED = -1
_ALLOCATORS = "sglang.srt.mem_cache.allocator"
_RESULT = "sglang.srt.managers.utils.GenerationBatchResult"
_logger = logging.getLogger(__name__)


@functools.cache
def _say(what: str) -> None:
    _logger.warning("sgl-ext-cpu: %s", what)


def install() -> None:
    """Registers the changes as hooks. Can be called again."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    hooks: dict[str, Callable[..., Any]] = {
        f"{_ALLOCATORS}.token.TokenToKVPoolAllocator.free": _poison_slots,
        f"{_ALLOCATORS}.paged.PagedTokenToKVPoolAllocator.free": _poison_slots,
        f"{_ALLOCATORS}.paged.PagedTokenToKVPoolAllocator.free_page_ids": _poison_pages,
        f"{_RESULT}.copy_to_cpu": _copy_late,
    }
    for symbol, hook in hooks.items():
        if symbol not in HookRegistry._hooks:
            HookRegistry.register(symbol, hook, HookType.AROUND)


def _poison_slots(original: Callable[..., Any], allocator: Any, slots: torch.Tensor) -> None:
    """Around the release of slots. An allocator of pages releases whole pages."""
    if len(slots):
        _poison(allocator, torch.unique(slots // allocator.page_size))
    original(allocator, slots)


def _poison_pages(original: Callable[..., Any], allocator: Any, pages: torch.Tensor) -> None:
    _poison(allocator, pages)
    original(allocator, pages)


def _poison(allocator: Any, pages: torch.Tensor) -> None:
    _say(POISONED)
    slots = pages[:, None] * allocator.page_size + torch.arange(allocator.page_size)
    pool = allocator.get_kvcache()
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer[slots.flatten()] = float("nan")


def _copy_late(original: Callable[..., Any], result: Any, *args: Any, **kw: Any) -> None:
    original(result, *args, **kw)
    if isinstance(result.next_token_ids, torch.Tensor):
        _say(COPIED_LATE)
        copied = result.next_token_ids
        result.next_token_ids = torch.full_like(copied, _NOT_COPIED)
        result.copy_done = _Copy(copied, result.next_token_ids)


class _Copy:
    """The event after a copy, which is not done before somebody waits for it."""

    def __init__(self, source: torch.Tensor, to: torch.Tensor) -> None:
        self._source = source.clone()
        self._to = to

    def synchronize(self) -> None:
        time.sleep(_COPY_S)
        self._to.copy_(self._source)
