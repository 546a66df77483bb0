"""The gate before each step of an engine: what tests of engines make their states with."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests
from sgl_ext_cpu.nursery import Nursery

from tests.engine.scheduler.test_event_publisher import Engine, running_engine, text
from tests.waiting import HANG_S


@pytest.fixture(scope="module")
def engine(
    nursery: Nursery, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    log = tmp_path_factory.mktemp("gate") / "engine.log"
    flags = ("--chunked-prefill-size", "256")
    with running_engine(nursery, tiny_model, log, *flags) as started:
        yield started


def body(rid: str, words: int, tokens: int) -> dict[str, Any]:
    sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return {"text": text(words), "rid": rid, "sampling_params": sampling}


def test_nothing_is_computed_before_a_closed_gate_and_each_step_is_told(engine: Engine) -> None:
    gate = engine.gate
    with ThreadPoolExecutor(1) as pool:
        with gate.closed():
            at = gate.mark()
            answer = pool.submit(engine.post, "/generate", body("one", 340, 20))
            gate.arrived("one")
            # A probe of the engine's own may arrive, too.
            assert {event.kind for event in gate.events[at:]} == {"arrived"}
            (first,) = gate.step()
            assert first.is_prefill
            assert first.computed("one") == 256
            assert not answer.done()
            gate.answer("one", tokens=5)
            gate.finish("one")
        meta = answer.result()["meta_info"]
    chunks = [event.computed("one") for event in gate.events[at:] if event.is_prefill]
    assert chunks == [*range(256, meta["prompt_tokens"], 256), meta["prompt_tokens"]]
    assert meta["completion_tokens"] == 20


def test_what_arrives_between_two_chunks_is_in_the_queue_at_the_next_step(engine: Engine) -> None:
    gate = engine.gate
    with ThreadPoolExecutor(2) as pool, gate.closed():
        pool.submit(engine.post, "/generate", body("long", 600, 1))
        gate.arrived("long")
        gate.step()
        pool.submit(engine.post, "/generate", body("late", 5, 1))
        gate.arrived("late")
        (step,) = gate.step()
        assert "late" in {*step.waiting, *step.requests}


def test_a_request_that_is_aborted_has_left(engine: Engine) -> None:
    gate = engine.gate
    with ThreadPoolExecutor(1) as pool:
        with gate.closed():
            pool.submit(requests.post, f"{engine.url}/generate", json=body("gone", 20, 500))
            gate.answer("gone", tokens=5)
            requests.post(f"{engine.url}/abort_request", json={"rid": "gone"}, timeout=HANG_S)
            gate.arrived("AbortReq")
            at = gate.mark()
            gate.finish("gone")
        gate.until(lambda event: event.kind == "idle", at)


def test_what_never_happens_is_an_error_that_shows_the_last_events(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sgl_ext_cpu.gate._HANG_S", 0.05)
    with pytest.raises(AssertionError, match="never came to happen"):
        engine.gate.arrived("nobody")


def test_a_slower_engine_answers_alike(
    engine: Engine, nursery: Nursery, tiny_model: Path, tmp_path: Path
) -> None:
    asked = body("same", 40, 8)
    expected = engine.post("/generate", asked)["output_ids"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLEXT_CPU_SLOWER", "3")
        with running_engine(nursery, tiny_model, tmp_path / "engine.log") as slower:
            assert slower.post("/generate", asked)["output_ids"] == expected
