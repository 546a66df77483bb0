"""What the scheduler makes of prefill slices, which are sent without most of their tokens."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scheduler.prefill import Rejection
from sgl_ext.engine.core.folder import secret
from sgl_ext.engine.core.hints import conversation_of, digest, part_of, slice_name
from sgl_ext.engine.scheduler import slice_gate
from sgl_ext.engine.scheduler.slice_gate import slices_last
from sgl_ext.engine.scheduler.state import RequestState

PROMPT = array("q", range(1000, 2000))


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("SGLEXT_ENGINE_FOLDER", str(tmp_path))
    secret.cache_clear()
    yield
    secret.cache_clear()


@pytest.fixture
def extension() -> Any:
    return SimpleNamespace(prefilled_prompt=None, are_slices_expected=False, cache=object())


def sent(end: int, *, prompt: str = "one", whole: bool = False) -> Any:
    name = slice_name(
        is_guess=False, is_forced=False, conversation=digest("c"), prompt=digest(prompt), end=end
    )
    return SimpleNamespace(rid=name, input_ids=PROMPT[:end] if whole else PROMPT[end - 1 : end])


def test_a_name_says_which_part_of_which_prompt_a_slice_is() -> None:
    slice_ = sent(1_000_000)
    assert part_of(slice_) == (digest("one"), 1_000_000)
    assert conversation_of(slice_) == digest("c")


def test_slices_get_the_tokens_of_the_prompt_that_was_sent_whole(extension: Any) -> None:
    whole, real = sent(1000, whole=True), SimpleNamespace(rid="real", input_ids=PROMPT)
    assert slices_last(extension, [whole, real]) == [real, whole]
    later = sent(300)
    (found,) = slices_last(extension, [later])
    assert (found.rid, found.input_ids) == (later.rid, PROMPT[:300])
    assert len(later.input_ids) == 1, "what SGLang sends on stays as it came"


def test_the_prompt_is_held_as_it_came_and_only_one_is(extension: Any) -> None:
    first, second = sent(1000, whole=True), sent(500, prompt="two", whole=True)
    slices_last(extension, [first])
    assert extension.prefilled_prompt[1] is first.input_ids
    slices_last(extension, [second])
    assert extension.prefilled_prompt[1] is second.input_ids
    (unheld,) = slices_last(extension, [sent(300)])
    assert len(unheld.input_ids) == 1


def test_a_slice_without_its_prompt_never_runs(
    extension: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slice_gate, "is_plain", lambda _: True)
    (slice_,) = slices_last(extension, [sent(300)])
    req = SimpleNamespace(
        rid=slice_.rid, origin_input_ids=slice_.input_ids, sgl_ext=RequestState(None)
    )
    scheduler: Any = SimpleNamespace(tree_cache=None)
    assert slice_gate._decide(extension, scheduler, req) == (Rejection.UNHELD, (0, 0))
