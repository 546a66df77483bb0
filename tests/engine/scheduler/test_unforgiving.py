"""Engines whose memory and copies forgive as little as a GPU's, with the pages that attention
backends of GPUs choose: what is pinned, prefilled, preempted and evicted changes no answer.

The page size is the platform's default, so no flag says it. Freed memory is poisoned until it is
written again, and tokens are invalid until their copy is done. Stock SGLang's answers, to one
request after the other, are what each engine has to give.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import requests
from sgl_ext_cpu.nursery import Nursery
from sgl_ext_cpu.unforgiving import COPIED_LATE, POISONED

from sgl_ext.protocols.routes import PREFILL
from sgl_ext.settings.schema import EngineSettings
from tests.engine.scheduler.test_event_publisher import Engine, running_engine
from tests.engine.scheduler.test_pins import MESSAGES, Pinning, block, until
from tests.waiting import HANG_S

POOL, CHUNK = 9216, 512
PREFIX, NEW, HELD, ANSWER = 2048, 4500, 2400, 300
THRESHOLD = 10
FLAGS = ("--max-total-tokens", str(POOL), "--chunked-prefill-size", str(CHUNK))


class Kind(NamedTuple):
    """A way to run the engine."""

    page: int
    flags: tuple[str, ...] = ()

    @property
    def overlaps(self) -> bool:
        return "--disable-overlap-schedule" not in self.flags


class Unforgiving(Pinning):
    """An engine of such a kind."""

    def __init__(self, started: Engine, log: Path, kind: Kind) -> None:
        super().__init__(started, log, kind.page, None)
        self.log = log
        self.overlaps = kind.overlaps


KINDS = {
    "page 1": Kind(1),
    "page 64": Kind(64),
    "page 128": Kind(128),
    "page 256, no overlap": Kind(256, ("--disable-overlap-schedule",)),
}


def numbers(seed: int, tokens: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(8000) for _ in range(tokens)]


def generated(ids: list[int], tokens: int) -> dict[str, Any]:
    sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return {"input_ids": ids, "sampling_params": sampling}


def said(words: str, ttl: str | None = None) -> dict[str, Any]:
    turn = {"role": "user", "content": "What did it find?"}
    asked = {"model": "tiny", "max_tokens": 16, "temperature": 0, "messages": [turn]}
    return {**asked, "system": [block(words, ttl)]}


def words(seed: int, number: int) -> str:
    return " ".join(f"file{one}.py" for one in numbers(seed, number))


PREFIX_IDS = numbers(1, PREFIX)
REQUESTS = {
    "held": generated(numbers(2, HELD), ANSWER),
    "held too": generated(numbers(3, HELD), ANSWER),
    "wanted": generated([*PREFIX_IDS, *numbers(4, NEW)], 5),
    "pinned": said(words(5, 120), ttl="1h"),
    "prefilled": said(words(6, 150)),
}


def answer(url: str, name: str, priority: int = 0) -> tuple[Any, Any]:
    """What an engine answers to the request of this name, and its usage."""
    body = REQUESTS[name]
    path = MESSAGES if "messages" in body else "/generate"
    headers = {"x-sgl-ext-priority": str(priority)}
    response = requests.post(url + path, json=body, headers=headers, timeout=HANG_S)
    assert response.ok, response.text
    found = response.json()
    if path == MESSAGES:
        return found["content"], found["usage"]
    return found["output_ids"], found["meta_info"]


@pytest.fixture(scope="module")
def stock(
    nursery: Nursery, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """The answers of SGLang without the extension, each to the only request of its engine."""
    log = tmp_path_factory.mktemp("stock") / "engine.log"
    with running_engine(nursery, tiny_model, log, *FLAGS, is_stock=True) as started:
        return {name: answer(started.url, name)[0] for name in REQUESTS}


@pytest.fixture(
    params=[
        pytest.param(name, marks=[pytest.mark.slow] if name in ("page 64", "page 128") else [])
        for name in KINDS
    ]
)
def engine(
    request: pytest.FixtureRequest, nursery: Nursery, tiny_model: Path, tmp_path: Path
) -> Iterator[Unforgiving]:
    kind = KINDS[request.param]
    settings = EngineSettings(aging_s=3600.0, preemption_threshold=THRESHOLD)
    environ = {
        **settings.to_environment(),
        "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
        # A released request makes room for so many steps of decoding that others have to go.
        "SGLANG_RETRACT_DECODE_STEPS": "1000",
        "SGLEXT_CPU_PAGE_SIZE": str(kind.page),
        "SGLEXT_CPU_UNFORGIVING": "1",
    }
    log = tmp_path / "engine.log"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environ.items():
            patch.setenv(name, value)
        with running_engine(nursery, tiny_model, log, *FLAGS, *kind.flags) as started:
            yield Unforgiving(started, log, kind)


def test_no_answer_differs_from_stock_s_whatever_becomes_of_its_memory(
    engine: Unforgiving, stock: dict[str, Any]
) -> None:
    # Prefilled ahead, in slices, and reported as cached.
    prefill = engine.send(REQUESTS["prefilled"], PREFILL).json()
    assert prefill["complete"], prefill
    found, usage = answer(engine.url, "prefilled")
    assert found == stock["prefilled"]
    assert usage["cache_read_input_tokens"] >= prefill["prompt_tokens"] - engine.page > 200
    # Pinned.
    assert answer(engine.url, "pinned")[0] == stock["pinned"]
    [pin] = engine.has_pinned(1)
    assert pin["tokens"] % engine.page == 0
    assert POOL - 2 * HELD < NEW, "pins alone would be enough for the request"
    # Evicted and preempted, while a prefix is cached that another request continues.
    engine.send(generated(PREFIX_IDS, 1), "/generate")
    with ThreadPoolExecutor(3) as pool:
        gate = engine.gate
        with gate.closed():
            at, names = gate.mark(), ("held", "held too")
            running = [pool.submit(answer, engine.url, name) for name in names]
            gate.count(len(names), "arrived", at)
            gate.run_until(lambda step: len(step.requests) == 2 and not step.is_prefill)
            wanted = pool.submit(answer, engine.url, "wanted", THRESHOLD)
            gate.count(len(names) + 1, "arrived", at)
        found, meta = wanted.result()
        assert [one.result()[0] for one in running] == [stock["held"], stock["held too"]]
    assert found == stock["wanted"]
    assert engine.counted("sgl_ext_preempted_requests_total") >= 1
    assert meta["cached_tokens"] == engine.whole_pages(PREFIX)
    # The pin outlasted that, and what it holds is what was computed.
    found, usage = answer(engine.url, "pinned")
    assert found == stock["pinned"]
    assert usage["cache_read_input_tokens"] >= pin["tokens"]
    engine.flush()
    engine.has_pinned(0)
    found, usage = answer(engine.url, "pinned")
    assert (found, usage["cache_read_input_tokens"]) == (stock["pinned"], 0)
    until(engine.is_level)
    engine.assert_sound()
    log = engine.log.read_text()
    assert POISONED in log
    assert (COPIED_LATE in log) == engine.overlaps
