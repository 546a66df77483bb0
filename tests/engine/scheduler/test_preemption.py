"""Preemption for memory in a real engine, while the request's own prefix could be evicted."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sgl_ext_cpu.nursery import Nursery

from sgl_ext.settings.schema import EngineSettings
from tests.engine.scheduler.test_event_publisher import POOL
from tests.engine.scheduler.test_priority import HEADER, THRESHOLD, Serving, serving, sound

PREFIX, NEW, HELD, ANSWER = 1000, 1150, 1200, 300


@pytest.fixture(scope="module")
def started(
    nursery: Nursery, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Serving]:
    """A released request makes room for so many steps of decoding that the prefix has to go."""
    settings = EngineSettings(aging_s=3600.0, preemption_threshold=THRESHOLD)
    folder = tmp_path_factory.mktemp("preemption")
    room = {"SGLANG_RETRACT_DECODE_STEPS": "1000"}
    with serving(nursery, tiny_model, folder, settings, **room) as engine:
        yield engine


@pytest.fixture
def engine(started: Serving) -> Iterator[Serving]:
    yield from sound(started)


def ask(
    engine: Serving, ids: list[int], tokens: int, priority: int = 0, name: str | None = None
) -> Any:
    sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": ids, "sampling_params": sampling, "rid": name}
    answer = engine.post("/generate", body, {HEADER: str(priority)})
    assert answer.ok, answer.text
    return answer.json()


def test_a_request_keeps_its_prefix_while_others_are_preempted_for_it(engine: Serving) -> None:
    source = random.Random(5)
    prefix, *held = ([source.randrange(8000) for _ in range(n)] for n in (PREFIX, HELD, HELD))
    wanted = [*prefix, *(source.randrange(8000) for _ in range(NEW))]
    assert POOL - PREFIX - 2 * (HELD + ANSWER) > 0, "running requests need not evict the prefix"
    undisturbed = [ask(engine, ids, ANSWER)["output_ids"] for ids in held]
    expected = ask(engine, wanted, 5)["output_ids"]
    engine.flush()
    ask(engine, prefix, 1)
    with ThreadPoolExecutor(3) as pool:
        with engine.gate.closed():
            names = ["one", "other"]
            running = [
                pool.submit(ask, engine, ids, ANSWER, 0, name)
                for ids, name in zip(held, names, strict=True)
            ]
            engine.gate.arrived(*names)
            # Both decode: a prefill that is not complete is interrupted, not preempted.
            engine.gate.answer(*names)
            asked = pool.submit(ask, engine, wanted, 5, THRESHOLD, "wanted")
            engine.gate.arrived("wanted")
        answer = asked.result()
        assert [one.result()["output_ids"] for one in running] == undisturbed
    assert engine.counted("sgl_ext_preempted_requests_total") == 1
    assert answer["meta_info"]["cached_tokens"] == PREFIX
    assert answer["output_ids"] == expected
