"""Spilled pins in real engines with HiCache: what was pinned is read back from the host, with the
answer that it had before, however much else was sent meanwhile.

A flood is longer than the host's memory, so what no lock holds is gone from the host, too. Each
engine checks its own memory in every step, and ends if any of it is lost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import requests
from sgl_ext_cpu.nursery import Nursery

from sgl_ext.pin_mirror import PATH
from sgl_ext.settings.schema import EngineSettings
from sgl_ext.wire.orders import SETTINGS_PATH
from tests.engine.scheduler.test_event_publisher import POOL, Engine, running_engine
from tests.engine.scheduler.test_pins import Kind
from tests.kinds import slow_but_for
from tests.waiting import HANG_S
from tests.waiting import until as until_within

RATIO = 3
PINNED = 0.25
LENGTH = 960  # one pin fits the device's budget, and no two
FLAGS = ("--enable-hierarchical-cache", "--hicache-ratio", str(RATIO))
FLAGS += ("--chunked-prefill-size", "512", "--hicache-write-policy")
PYTHON = ("SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND", "python")
PAGES = ("SGLEXT_CPU_PAGE_SIZE", "16")
TWO_RANKS = Kind((*FLAGS, "write_through", "--tp-size", "2"))
KINDS = {
    "write through": Kind((*FLAGS, "write_through")),
    "write back, python core": Kind((*FLAGS, "write_back"), (PYTHON,)),
    "selective, pages": Kind((*FLAGS, "write_through_selective"), (PAGES,), 16),
    "write back, pages": Kind((*FLAGS, "write_back"), (PAGES,), 16),
    "python core, pages": Kind((*FLAGS, "write_through"), (PYTHON, PAGES), 16),
    "two ranks": TWO_RANKS._replace(environ=(("SGLANG_CPU_OMP_THREADS_BIND", "0|1"),)),
}
_numbers = count(1)


def until(condition: Callable[[], bool]) -> None:
    until_within(condition, 30)


def prompt(length: int = LENGTH) -> list[int]:
    """A prompt that nobody sent before."""
    number = next(_numbers)
    return [20 + (n * n * number + n * 7 + number * 13) % 900 for n in range(length)]


def pin(ttl: str = "1h") -> dict[str, Any]:
    return _hint("kv.pin", {"ttl": ttl})


def _hint(kind: str, payload: dict[str, Any]) -> dict[str, Any]:
    action = {"action_id": "a", "action_type": kind, "action_version": "0.1", "payload": payload}
    return {"kv_hints": {"protocol_version": "0.1", "message_id": "m", "actions": [action]}}


class Spilling:
    """One engine, and what is asked of it here."""

    def __init__(self, engine: Engine, log: Path, kind: Kind) -> None:
        self.page = kind.page
        # Selective copies are made of what is read again.
        self._times = 2 if "write_through_selective" in kind.flags else 1
        self.url = engine.url
        self._engine = engine
        self._log = log

    def ask(self, ids: list[int], answer: int = 8, session: str = "", **more: Any) -> Any:
        sampling = {"max_new_tokens": answer, "temperature": 0, "ignore_eos": True}
        body = {"input_ids": ids, "sampling_params": sampling, **more}
        headers = {"x-sgl-ext-session-id": session} if session else {}
        got = requests.post(f"{self.url}/generate", json=body, headers=headers, timeout=HANG_S)
        assert got.ok, got.text
        return got.json()

    def pins(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = requests.get(self.url + PATH, timeout=HANG_S).json()["pins"]
        return rows

    def tiers(self) -> list[str]:
        return sorted(row["tier"] for row in self.pins())

    def counted(self, name: str) -> float:
        page = requests.get(f"{self.url}/metrics", timeout=HANG_S).text
        values = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
        return sum(float(values[key]) for key in values if key.startswith(f"sgl_ext_{name}"))

    def change(self, **values: float) -> None:
        version = {"number": time.time_ns(), "values": values}
        answer = requests.post(self.url + SETTINGS_PATH, json=version, timeout=HANG_S)
        assert answer.json() == {"applied": True, "why": ""}

    def flood(self, tokens: int = (RATIO + 2) * POOL) -> None:
        """So many tokens of prompts that have nothing in common."""

        def send(ids: list[int]) -> None:
            for _ in range(self._times):
                self.ask(ids, 1)

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(send, [prompt(1024) for _ in range(tokens // 1024)]))

    def read(self, ids: list[int]) -> tuple[int, int, list[int]]:
        """How much of a prompt came from the cache, how much of that from the host, and what was
        answered."""
        answer = self.ask(ids)
        meta = answer["meta_info"]
        details = meta["cached_tokens_details"] or {"host": 0}
        return meta["cached_tokens"], details["host"], answer["output_ids"]

    def flush(self) -> None:
        requests.post(f"{self.url}/flush_cache", timeout=HANG_S).raise_for_status()

    def assert_sound(self) -> None:
        assert self._engine.server.running()
        said = self._log.read_text().lower()
        assert "leak detected" not in said
        assert "hit an exception" not in said


@pytest.fixture(
    scope="module",
    params=slow_but_for(["write through"], KINDS),
)
def engine(
    request: pytest.FixtureRequest,
    nursery: Nursery,
    tiny_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Spilling]:
    kind = KINDS[request.param]
    settings = EngineSettings(pin_budget=PINNED).to_environment()
    checks = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"}
    log = tmp_path_factory.mktemp("spills") / "engine.log"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**settings, **checks, **dict(kind.environ)}.items():
            patch.setenv(name, value)
        with running_engine(nursery, tiny_model, log, *kind.flags) as started:
            yield Spilling(started, log, kind)


@pytest.fixture(autouse=True)
def _sound(engine: Spilling) -> Iterator[None]:
    engine.flush()
    until(lambda: engine.pins() == [])
    yield
    engine.assert_sound()


def test_pins_of_several_times_the_device_budget_are_read_back_with_the_same_answers(
    engine: Spilling,
) -> None:
    prompts = [prompt() for _ in range(5)]
    cold = [engine.ask(ids, **pin())["output_ids"] for ids in prompts]
    until(lambda: engine.tiers() == ["device"] + ["host"] * 4)
    spilled, loaded = engine.counted("pins_spilled"), engine.counted("pins_loaded")
    engine.flood()
    for _ in range(2):
        found = [engine.read(ids) for ids in prompts]
        assert [answer for _, _, answer in found] == cold
        assert min(cached for cached, _, _ in found) >= LENGTH - engine.page
        assert sum(host > LENGTH / 2 for _, host, _ in found) >= 4
        engine.flood(POOL)
    until(lambda: engine.tiers() == ["device"] + ["host"] * 4)
    for ids in prompts:
        engine.ask([*ids, 7])  # the last token of a prompt is never read
    until(lambda: [row["hits"] for row in engine.pins()] == [1] * 5)
    assert engine.counted("pins_spilled") >= spilled + 4
    assert engine.counted("pins_loaded") >= loaded + 4
    assert engine.counted("pins_ended_total{") == engine.counted(
        'pins_ended_total{reason="flushed"}'
    )


def test_a_pin_spills_for_a_live_request_and_comes_back(engine: Spilling) -> None:
    ids = prompt()
    cold = engine.ask(ids, **pin())["output_ids"]
    until(lambda: engine.tiers() == ["device"])
    engine.ask(prompt(POOL - LENGTH + 100))
    until(lambda: engine.tiers() == ["host"])
    cached, host, answer = engine.read(ids)
    assert (cached >= LENGTH - engine.page, host > 0, answer) == (True, True, cold)
    until(lambda: engine.tiers() == ["device"])
    assert engine.counted('pins_ended_total{reason="pressure"}') == 0


def test_answers_that_outgrow_the_memory_spill_pins(engine: Spilling) -> None:
    ids = prompt()
    cold = engine.ask(ids, **pin())["output_ids"]
    until(lambda: engine.tiers() == ["device"])
    size = int((POOL - LENGTH) * 0.54)
    with ThreadPoolExecutor(2) as pool:
        answers = pool.map(lambda _: engine.ask(prompt(40), size), range(2))
    assert [len(each["output_ids"]) for each in answers] == [size] * 2
    until(lambda: engine.tiers() == ["host"])
    assert engine.read(ids)[2] == cold
    assert engine.counted("pins_ended_total{") == engine.counted(
        'pins_ended_total{reason="flushed"}'
    )


def test_a_prompt_that_forks_from_a_spilled_pin_takes_nothing_of_it(engine: Spilling) -> None:
    first, second = prompt(), prompt()
    cold = engine.ask(first, **pin())["output_ids"]
    engine.ask(second, **pin())
    engine.flood()
    fork = first[: LENGTH // 2] + prompt(LENGTH // 2)
    assert engine.read(fork)[0] >= LENGTH // 2 - engine.page
    engine.flood()
    cached, _, answer = engine.read(first)
    assert (cached >= LENGTH - engine.page, answer) == (True, cold)


@pytest.mark.parametrize("ending", ["lease", "deletion", "session", "demotion", "budget"])
def test_what_ends_a_spilled_pin_frees_its_host_memory(engine: Spilling, ending: str) -> None:
    ids = prompt()
    engine.ask(ids, session="s", **pin("5s" if ending == "lease" else "1h"))
    engine.ask(prompt(), **pin())
    until(lambda: engine.tiers() == ["device", "host"] or ending == "lease")
    (spilled,) = [row for row in engine.pins() if row["session"] == "s"]
    if ending == "deletion":
        named = {"prefix": spilled["prefix"]}
        assert requests.delete(engine.url + PATH, params=named, timeout=HANG_S).json() == {
            "deleted": 1
        }
    elif ending == "session":
        body = {"input_ids": [7] * 40, "sampling_params": {"max_new_tokens": 1}}
        final = {"x-sgl-ext-session-id": "s", "x-sgl-ext-session-final": "true"}
        requests.post(f"{engine.url}/generate", json=body, headers=final, timeout=HANG_S)
    elif ending == "demotion":
        engine.ask(ids, session="s", **_hint("kv.demote", {}))
    elif ending == "budget":
        engine.change(host_pin_budget=0)
    until(lambda: engine.tiers() == ["device"])
    if ending == "budget":
        engine.change(host_pin_budget=0.5)
    engine.flood()
    assert engine.read(ids)[0] < LENGTH / 10


def test_a_flush_ends_spilled_pins(engine: Spilling) -> None:
    prompts = [prompt() for _ in range(3)]
    for _ in range(2):
        for ids in prompts:
            assert engine.ask(ids, **pin())["meta_info"]["cached_tokens"] == 0
        until(lambda: engine.tiers() == ["device", "host", "host"])
        engine.flush()
        until(lambda: engine.pins() == [])
    for ids in prompts:
        assert engine.read(ids)[0] == 0


def test_a_prefix_longer_than_the_device_budget_is_pinned_on_the_host(engine: Spilling) -> None:
    ids = prompt(int(1.5 * PINNED * POOL))
    cold = engine.ask(ids, **pin())["output_ids"]
    until(lambda: engine.tiers() == ["host"])
    engine.flood()
    cached, host, answer = engine.read(ids)
    assert (cached >= len(ids) - engine.page, host > 0, answer) == (True, True, cold)
    assert engine.tiers() == ["host"]
