"""The generation hook, and the hints on their way through SGLang's own types."""

from __future__ import annotations

import asyncio
import time
import warnings
from contextvars import copy_context
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import convert, to_builtins

from sgl_ext.engine.core.hints import decode_hints
from sgl_ext.engine.core.request_context import WHOLE_PROMPT, RequestContext, current, enter
from sgl_ext.engine.http.request_hook import send_hints
from sgl_ext.reading.cache_marks import NO_MARKS
from sgl_ext.reading.hints import Importance
from sgl_ext.reading.segments import Chain

CHAIN = Chain((1, 2**128 - 1), (10, 2**40))
OWN = {"action_id": "1", "action_type": "another", "action_version": "3", "payload": {"a": 1}}
ENVELOPE = {"protocol_version": "7", "message_id": "mine", "actions": [OWN]}


@pytest.fixture(autouse=True)
def _engine_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with warnings.catch_warnings(action="ignore"):  # SGLang's, while it is imported
        import_module("sglang.srt.managers.kv_hints")
    monkeypatch.setenv("SGLEXT_ENGINE_FOLDER", str(tmp_path / "secret"))


def request(kv_hints: Any = None, session_params: Any = None) -> SimpleNamespace:
    return SimpleNamespace(kv_hints=kv_hints, session_params=session_params)


def context_of(chain: Chain = CHAIN, **more: Any) -> RequestContext:
    return RequestContext("/v1/messages", {}, chain, NO_MARKS, **more)


def in_a_request(*generations: SimpleNamespace, chain: Chain = CHAIN, **more: Any) -> None:
    """What the hook does in one HTTP request's context."""

    def run() -> None:
        enter(context_of(chain, **more))
        for generation in generations:
            send_hints(None, generation)

    copy_context().run(run)


def chain_of(generation: SimpleNamespace) -> Chain:
    found = decode_hints(generation.kv_hints)
    assert found is not None
    return Chain(tuple(found.hashes), tuple(found.ends))


def test_only_the_first_generation_of_a_request_carries_the_chain() -> None:
    first, second = request(), request()
    in_a_request(first, second)
    assert chain_of(first) == CHAIN
    assert decode_hints(second.kv_hints) is None


async def test_a_task_that_the_request_starts_carries_its_chain() -> None:
    first, second = request(), request()

    async def generate(generation: SimpleNamespace) -> None:
        send_hints(None, generation)

    enter(context_of())
    await asyncio.create_task(generate(first))
    await generate(second)
    assert decode_hints(first.kv_hints) is not None
    assert decode_hints(second.kv_hints) is None


@pytest.mark.parametrize("own", [None, ENVELOPE])
def test_a_callers_own_hints_stay(own: Any) -> None:
    generation = request(own)
    in_a_request(generation)
    assert chain_of(generation) == CHAIN
    *others, _ours = generation.kv_hints.actions
    assert [action.action_type for action in others] == (["another"] if own else [])
    assert generation.kv_hints.message_id == ("mine" if own else "")
    if own:
        assert others[0].payload == {"a": 1}


@pytest.mark.parametrize("own", [[None, ENVELOPE], {"protocol_version": 1}, "text"])
def test_malformed_hints_are_left_unchanged(own: Any) -> None:
    generation = request(own)
    in_a_request(generation)
    assert generation.kv_hints is own


def test_an_sglang_session_carries_no_hints() -> None:
    generation = request(session_params={"id": "1"})
    in_a_request(generation)
    assert generation.kv_hints is None


@pytest.mark.parametrize(
    "generation",
    [
        SimpleNamespace(priority=10**6, kv_hints=None, session_params=None),
        SimpleNamespace(priority=10**6, kv_hints=None, session_params={"id": "1"}),
        SimpleNamespace(priority=10**6),  # for an embedding
    ],
)
def test_a_request_s_own_priority_is_replaced(generation: SimpleNamespace) -> None:
    manager = SimpleNamespace(enable_priority_scheduling=True, enable_lora=False)

    def run() -> None:
        enter(context_of(importance=Importance(5)))
        send_hints(manager, generation)

    copy_context().run(run)
    assert generation.priority == 5


def test_adapters_are_checked_where_sglang_has_read_them_of_any_protocol() -> None:
    """All of SGLang's front ends put them there, from `model` or `lora_path`."""

    def send(tenant: str, *, enable_lora: bool = True) -> None:
        manager = SimpleNamespace(enable_priority_scheduling=False, enable_lora=enable_lora)
        enter(context_of(owner=tenant))
        send_hints(manager, SimpleNamespace(lora_path="sql"))

    with pytest.raises(ValueError, match="model: this tenant may not use the adapter 'sql'"):
        copy_context().run(send, "team")
    copy_context().run(send, "")
    copy_context().run(send, "team", enable_lora=False)  # SGLang rejects it


def test_a_tenants_name_is_carried_also_without_a_chain() -> None:
    generation = request()
    in_a_request(generation, chain=Chain(), owner="a")
    found = decode_hints(generation.kv_hints)
    assert found is not None
    assert (found.owner, *found.hashes, *found.pins) == ("a",)


def test_a_wait_in_the_balancer_is_carried_also_without_a_chain() -> None:
    generation = request()
    in_a_request(generation, chain=Chain(), queued_s=12.5)
    found = decode_hints(generation.kv_hints)
    assert found is not None
    assert found.queued_s == 12.5


def test_an_empty_chain_is_not_carried() -> None:
    generation = request()
    in_a_request(generation, chain=Chain())
    assert generation.kv_hints is None


def test_pins_and_their_owner_are_carried_also_without_a_chain() -> None:
    generation = request()
    pins = ((7, 300.0), (WHOLE_PROMPT, 30.0))
    before_s = time.monotonic()
    in_a_request(generation, chain=Chain(), pins=pins, owner="a", session="s", is_last=True)
    found = decode_hints(convert(to_builtins(generation.kv_hints), type(generation.kv_hints)))
    assert found is not None
    assert (found.pins, found.owner, found.session) == (pins, "a", "s")
    assert (found.is_reusable, found.is_last, found.is_answer_reusable) == (True, True, True)
    assert before_s <= found.sent_s <= time.monotonic()


def test_there_is_no_context_outside_of_requests() -> None:
    assert copy_context().run(current) is None


def test_a_request_without_hints_passes() -> None:
    in_a_request(SimpleNamespace())


def test_a_forged_action_is_ignored() -> None:
    generation = request()
    in_a_request(generation)
    from msgspec.structs import replace

    forged = replace(generation.kv_hints.actions[0], action_id="guess", payload={"hashes": 5})
    assert decode_hints(request(replace(generation.kv_hints, actions=[forged])).kv_hints) is None
    both = replace(generation.kv_hints, actions=[forged, *generation.kv_hints.actions])
    assert decode_hints(request(both).kv_hints) is not None
