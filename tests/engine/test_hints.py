"""A chain on its way through SGLang's own hints, with SGLang's own types."""

from __future__ import annotations

import asyncio
import warnings
from contextvars import copy_context
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sgl_ext.engine import chain
from sgl_ext.engine.chain import attach, carried, keep
from sgl_ext.engine.counters import counter
from sgl_ext.requests.segments import Chain

pytestmark = pytest.mark.engine

CHAIN = Chain((1, 2**128 - 1), (10, 2**40))
OWN = {"action_id": "1", "action_type": "another", "action_version": "3", "payload": {"a": 1}}
ENVELOPE = {"protocol_version": "7", "message_id": "mine", "actions": [OWN]}


@pytest.fixture(autouse=True)
def _receipts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with warnings.catch_warnings(action="ignore"):  # SGLang's, while it is imported
        import_module("sglang.srt.managers.kv_hints")
    monkeypatch.setenv("SGL_EXT_RECEIPTS", str(tmp_path / "secret"))
    chain._secret.cache_clear()


def request(kv_hints: Any = None, session_params: Any = None) -> SimpleNamespace:
    return SimpleNamespace(kv_hints=kv_hints, session_params=session_params)


def in_a_request(*generations: SimpleNamespace, kept: Chain = CHAIN) -> None:
    """What the hooks do in one HTTP request's context."""

    def run() -> None:
        keep(kept)
        for generation in generations:
            attach(None, generation)

    copy_context().run(run)


def test_the_first_generation_of_a_request_carries_the_chain_and_no_later_one() -> None:
    first, second = request(), request()
    in_a_request(first, second)
    assert carried(first) == (CHAIN.hashes, CHAIN.ends)
    assert carried(second) is None


async def test_a_task_that_the_request_starts_takes_the_chain_from_it() -> None:
    first, second = request(), request()

    async def generate(generation: SimpleNamespace) -> None:
        attach(None, generation)

    keep(CHAIN)
    await asyncio.create_task(generate(first))
    await generate(second)
    assert carried(first) is not None
    assert carried(second) is None


@pytest.mark.parametrize("own", [None, ENVELOPE])
def test_a_callers_own_hints_stay(own: Any) -> None:
    generation = request(own)
    in_a_request(generation)
    assert carried(generation) == (CHAIN.hashes, CHAIN.ends)
    *others, _ours = generation.kv_hints.actions
    assert [action.action_type for action in others] == (["another"] if own else [])
    assert generation.kv_hints.message_id == ("mine" if own else "")
    if own:
        assert others[0].payload == {"a": 1}


@pytest.mark.parametrize("own", [[None, ENVELOPE], {"protocol_version": 1}, "text"])
def test_hints_that_cannot_be_joined_are_left_as_they_are(own: Any) -> None:
    generation = request(own)
    in_a_request(generation)
    assert generation.kv_hints is own


def test_a_session_carries_none_as_its_prompt_is_more_than_the_body() -> None:
    generation = request(session_params={"id": "1"})
    in_a_request(generation)
    assert generation.kv_hints is None


def test_an_empty_chain_and_one_that_is_too_long_are_not_carried() -> None:
    generation = request()
    before = counter("chains_left_out")._value.get()
    in_a_request(generation, kept=Chain())
    assert counter("chains_left_out")._value.get() == before
    long = tuple(range(1, chain.MAX_SEGMENTS + 2))
    in_a_request(generation, kept=Chain(long, long))
    assert generation.kv_hints is None
    assert counter("chains_left_out")._value.get() == before + 1


def test_what_is_no_request_for_text_is_let_pass() -> None:
    in_a_request(SimpleNamespace())


def test_an_action_that_a_client_made_up_is_not_read() -> None:
    generation = request()
    in_a_request(generation)
    from msgspec.structs import replace

    forged = replace(generation.kv_hints.actions[0], action_id="guess", payload={"hashes": 5})
    assert carried(request(replace(generation.kv_hints, actions=[forged]))) is None
    both = replace(generation.kv_hints, actions=[forged, *generation.kv_hints.actions])
    assert carried(request(both)) is not None
