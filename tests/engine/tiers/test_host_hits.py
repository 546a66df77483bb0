"""Prompts that the host has, in real engines: they are loaded, and cost less than cold ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import requests
from sgl_ext_cpu.nursery import Nursery

from scheduler.load_cost import LEAST, MOST
from sgl_ext.protocols.routes import PREFILL
from sgl_ext.settings.schema import EngineSettings
from tests.engine.scheduler.test_event_publisher import Engine, Watch, running_engine, text
from tests.waiting import HANG_S
from tests.waiting import until as until_within

POOL, LENGTH, SLICE = 6000, 1500, 128
CHAT = "/v1/chat/completions"
SLACK = 64  # what pages and the last token cost
FLAGS = ("--max-total-tokens", str(POOL), "--max-running-requests", "1")
FLAGS += ("--enable-hierarchical-cache", "--hicache-ratio", "8")
FLAGS += ("--hicache-write-policy", "write_through", "--chunked-prefill-size", "512")
_names = count(1)


def until(condition: Callable[[], bool]) -> None:
    until_within(condition)


class Serving:
    """One engine that serves one request at a time, and the requests of these tests."""

    def __init__(self, engine: Engine, log: Path) -> None:
        self.url = engine.url
        self.gate = engine.gate
        self.watch = Watch(engine)
        self._engine = engine
        self._log = log

    def post(self, path: str, body: Any) -> dict[str, Any]:
        answer = requests.post(self.url + path, json=body, timeout=HANG_S)
        assert answer.ok, answer.text
        result: dict[str, Any] = answer.json()
        return result

    def ask(self, prompt: list[int], tokens: int = 8, name: str | None = None) -> dict[str, Any]:
        sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": sampling, "rid": name}
        return self.post("/generate", body)

    def tiers(self, prompt: list[int]) -> tuple[int, int]:
        """How many tokens of a prompt a request reads on the device, and how many it loads."""
        details = self.ask(prompt)["meta_info"].get("cached_tokens_details") or {}
        return details.get("device", 0), details.get("host", 0)

    def spill(self) -> None:
        """Other prompts take the device's memory."""
        for _ in range(1 + POOL // LENGTH):
            self.ask(cold())

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Inside the block a request has the only slot, before a closed gate."""
        name = f"busy {next(_names)}"
        sampling = {"max_new_tokens": 4000, "temperature": 0, "ignore_eos": True}
        body = {"input_ids": [7] * 16, "rid": name, "sampling_params": sampling}
        with ThreadPoolExecutor(1) as pool, self.gate.closed():
            pool.submit(requests.post, f"{self.url}/generate", json=body, timeout=HANG_S)
            self.gate.answer(name)
            try:
                yield
            finally:
                requests.post(f"{self.url}/abort_request", json={"rid": name}, timeout=HANG_S)
                self.gate.open()

    def metric(self, name: str) -> float:
        page = requests.get(f"{self.url}/metrics", timeout=HANG_S).text
        (line,) = [one for one in page.splitlines() if one.startswith(f"sgl_ext_{name}")]
        return float(line.split()[-1])


def cold() -> list[int]:
    """A prompt that the engine has not seen."""
    k = next(_names)
    return [20 + (n * k + k * k) % 900 for n in range(LENGTH)]


@pytest.fixture(scope="module", params=["rust", "python"])
def serving(
    request: pytest.FixtureRequest,
    nursery: Nursery,
    tiny_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Serving]:
    log = tmp_path_factory.mktemp("host") / "engine.log"
    settings = EngineSettings(prefill_ahead_slice_tokens=SLICE)
    with pytest.MonkeyPatch.context() as patch:
        core = {"SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": request.param}
        for name, value in {**settings.to_environment(), **core}.items():
            patch.setenv(name, value)
        with running_engine(nursery, tiny_model, log, *FLAGS) as engine:
            yield Serving(engine, log)
            said = log.read_text().lower()
            assert "leak detected" not in said
            assert "hit an exception" not in said


def body(*texts: str) -> dict[str, Any]:
    """A chat whose turns have these texts."""
    roles = ["user", "assistant"] * len(texts)
    turns = [{"role": role, "content": one} for role, one in zip(roles, texts, strict=False)]
    return {"model": "tiny", "max_tokens": 3, "messages": turns}


def test_a_spilled_prompt_is_loaded_ahead_however_long_it_is(serving: Serving) -> None:
    prompt = body(text(1200))
    first = serving.post(PREFILL, prompt)
    assert first["complete"], first
    assert first["prefilled_tokens"] > 1200 > 8 * SLICE
    assert first["loaded_tokens"] == 0
    serving.spill()
    before = serving.metric("loaded_ahead_tokens_total")
    again = serving.post(PREFILL, prompt)
    assert again["complete"], again
    tokens = again["prompt_tokens"]
    assert again["loaded_tokens"] >= tokens - again["cached_tokens"] - SLACK
    assert again["cached_tokens"] + again["loaded_tokens"] + again["prefilled_tokens"] == tokens
    assert again["cached_tokens"] < tokens / 2, "it was spilled"
    assert again["prefilled_tokens"] < SLACK
    assert serving.metric("loaded_ahead_tokens_total") == before + again["loaded_tokens"]
    third = serving.post(PREFILL, prompt)
    assert (third["complete"], third["loaded_tokens"]) == (True, 0)
    assert third["cached_tokens"] >= tokens - SLACK


def test_what_follows_a_spilled_prefix_is_computed(serving: Serving) -> None:
    begin, end = text(1000), text(400)
    serving.post(CHAT, body(begin))
    serving.spill()
    answer = serving.post(PREFILL, body(begin, "Well.", end))
    assert answer["complete"], answer
    assert answer["loaded_tokens"] + answer["cached_tokens"] >= 1000
    assert 400 <= answer["prefilled_tokens"] <= 400 + 2 * SLACK + SLICE


def test_nothing_is_loaded_ahead_while_a_request_runs(serving: Serving) -> None:
    prompt = body(text(1200))
    serving.post(CHAT, prompt)
    serving.spill()
    before = serving.metric("loaded_ahead_tokens_total")
    with serving.busy():
        requests.post(f"{serving.url}{PREFILL}?wait=false", json=prompt, timeout=HANG_S)
        assert serving.metric("loaded_ahead_tokens_total") == before
    until(lambda: serving.metric("loaded_ahead_tokens_total") > before)


def test_a_spilled_prompt_is_served_before_a_cold_one_that_came_first(serving: Serving) -> None:
    spilled, new = cold(), cold()
    answer = serving.ask(spilled)
    serving.spill()

    def order() -> list[str]:
        left = [event.rid for event in serving.gate.events if event.kind == "left"]
        return [rid for rid in left if rid in ("cold", "spilled")]

    with ThreadPoolExecutor(2) as pool:
        with serving.busy():
            first = pool.submit(serving.ask, new, 8, "cold")
            serving.gate.arrived("cold")
            second = pool.submit(serving.ask, spilled, 8, "spilled")
            serving.gate.arrived("spilled")
        again = second.result()
        first.result()
    until(lambda: len(order()) == 2)
    assert order() == ["spilled", "cold"]
    assert again["meta_info"]["cached_tokens_details"]["host"] >= LENGTH - SLACK
    assert again["output_ids"] == answer["output_ids"]


def test_the_share_is_published_and_changes_seldom(serving: Serving) -> None:
    for _ in range(4):
        prompt = cold()
        serving.ask(prompt)
        serving.spill()
        assert serving.tiers(prompt)[1] >= LENGTH - SLACK
    shares = shares_of(serving)
    assert shares
    assert all(LEAST <= share <= MOST for share in shares)
    assert len(shares) < len(serving.watch.lines) / 4
    until(lambda: serving.metric("load_share") == shares_of(serving)[-1])


def shares_of(serving: Serving) -> list[float]:
    return [line["load_share"] for line in serving.watch.lines if "load_share" in line]
