"""A request whose grammar allows nothing ends alone, and compiled grammars are forgotten."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from sgl_ext.compat.sampler import MAX_GRAMMARS, allow_some_token, forget_grammars

NONE = float("-inf")


def test_a_row_without_an_allowed_token_gets_all_and_others_stay() -> None:
    logits = torch.tensor([[NONE, NONE, NONE], [NONE, 1.0, 2.0], [0.5, 0.0, 3.0]])
    sampling: Any = SimpleNamespace(grammars=[object(), object(), None])
    allow_some_token(None, sampling, logits)
    assert logits.tolist() == [[0.0, 0.0, 0.0], [NONE, 1.0, 2.0], [0.5, 0.0, 3.0]]


def test_without_grammars_nothing_is_looked_at() -> None:
    logits = torch.tensor([[NONE, NONE]])
    sampling: Any = SimpleNamespace(grammars=None)
    allow_some_token(None, sampling, logits)
    assert logits.tolist() == [[NONE, NONE]]


class Backend:
    def __init__(self, inner: Backend | None = None) -> None:
        self.cache: dict[tuple[str, str], Any] = {}
        self.grammar_backend = inner

    def reset(self) -> None:
        self.cache.clear()


def test_too_many_grammars_are_forgotten_also_of_the_backend_inside() -> None:
    inner = Backend()
    inner.cache["regex", "a"] = object()
    backend = Backend(inner)
    for number in range(MAX_GRAMMARS):
        backend.cache["regex", str(number)] = object()
        forget_grammars(None, backend)
    assert len(backend.cache) == MAX_GRAMMARS
    backend.cache["regex", "one more"] = object()
    forget_grammars(None, backend)
    assert not backend.cache
    assert not inner.cache
