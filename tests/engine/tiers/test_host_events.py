"""What real engines with a host tier publish, and where a balancer sends requests by that."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import requests
from sgl_ext_cpu.node import running_balancer
from sgl_ext_cpu.nursery import Nursery

from tests.engine.scheduler.test_event_publisher import (
    Engine,
    Watch,
    chain_of,
    running_engine,
    text,
)
from tests.kinds import slow_but_for
from tests.waiting import HANG_S, until

POOL, HOST_POOL = 4096, 4
CORES = {"rust": {}, "python": {"SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python"}}
FLAGS = ("--max-total-tokens", str(POOL), "--chunked-prefill-size", "512")
FLAGS += ("--enable-hierarchical-cache", "--hicache-ratio", str(HOST_POOL))
FLAGS += ("--hicache-write-policy", "write_through")


class HostWatch(Watch):
    """Also keeps what is on the host alone."""

    def __init__(self, engine: Engine) -> None:
        self.on_host: dict[str, tuple[str | None, int]] = {}
        super().__init__(engine)

    def note(self, line: dict[str, Any]) -> None:
        super().note(line)
        if line.get("cleared"):
            self.on_host.clear()
        for segment in line.get("host_removed", ()):
            self._forget_on_host(segment)
        for segment, parent, tokens in line.get("host", ()):
            assert parent is None or parent in self.held or parent in self.on_host
            self.on_host[segment] = (parent, tokens)
        for segment, *_ in line.get("stored", ()):
            self.on_host.pop(segment, None)

    def _forget_on_host(self, segment: str) -> None:
        self.on_host.pop(segment, None)
        for below in [s for s, (parent, _) in self.on_host.items() if parent == segment]:
            self._forget_on_host(below)

    def host_claim(self, chain: list[str]) -> int:
        """Tokens up to the deepest segment of a chain that is on the device or on the host."""
        found = [self.held.get(s) or self.on_host.get(s) for s in chain]
        return max((entry[1] for entry in found if entry), default=0)


class Agents(NamedTuple):
    """Conversations of an engine, and how it serves them."""

    engine: Engine
    watch: HostWatch

    def ask(self, prompt: str) -> dict[str, int]:
        """How many tokens of a prompt the engine read from where."""
        body = {"text": prompt, "sampling_params": {"max_new_tokens": 1}}
        meta = self.engine.post("/generate", body)["meta_info"]
        tiers: dict[str, int] = meta.get("cached_tokens_details") or {}
        return {"prompt": meta["prompt_tokens"], "host": tiers.get("host", 0)} | {
            "cached": meta["cached_tokens"]
        }

    def flood(self, tokens: int) -> None:
        """Other prompts of so many tokens."""
        while tokens > 0:
            tokens -= self.ask(text(300))["prompt"]
        self.watch.settle()


def chain(prompt: str) -> list[str]:
    return chain_of("/generate", {"text": prompt})


@pytest.fixture(scope="module", params=slow_but_for(["rust"], CORES))
def started(
    request: pytest.FixtureRequest,
    nursery: Nursery,
    tiny_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Engine]:
    log = tmp_path_factory.mktemp("events") / "engine.log"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in CORES[request.param].items():
            patch.setenv(name, value)
        with running_engine(nursery, tiny_model, log, *FLAGS) as engine:
            yield engine


@pytest.fixture
def agents(started: Engine) -> Agents:
    started.post("/flush_cache", {})
    watch = HostWatch(started)
    watch.settle()
    return Agents(started, watch)


def test_a_demoted_prefix_is_on_the_host_and_comes_back_when_it_is_read(agents: Agents) -> None:
    prompt = text(300)
    tokens, watch = agents.ask(prompt)["prompt"], agents.watch
    watch.settle()
    last = chain(prompt)[-1]
    assert watch.held[last][1] == tokens
    agents.flood(2 * POOL)
    assert last not in watch.held
    assert watch.on_host[last][1] == tokens
    read = agents.ask(prompt)
    assert read["cached"] >= tokens - 2
    digits = len(prompt.partition(" ")[0])  # others, on the device, begin with the same ones
    assert tokens - 2 - digits <= read["host"] <= tokens
    watch.settle()
    assert watch.held[last][1] == tokens
    assert last not in watch.on_host


def test_what_the_host_evicts_is_gone_from_the_events_too(agents: Agents) -> None:
    prompt = text(300)
    agents.ask(prompt)
    agents.flood((HOST_POOL + 2) * POOL)
    last = chain(prompt)[-1]
    assert last not in {**agents.watch.held, **agents.watch.on_host}
    assert agents.ask(prompt)["cached"] < 10


def test_a_flush_clears_the_host_too(agents: Agents) -> None:
    agents.ask(text(300))
    agents.flood(2 * POOL)
    assert agents.watch.on_host
    agents.engine.post("/flush_cache", {})
    until(lambda: not (agents.watch.on_host or agents.watch.held))


def test_under_pressure_on_both_tiers_claims_follow_them(agents: Agents) -> None:
    """A prompt that is sent again reads what was claimed: on the device, or loaded."""
    trunk, branches = text(200), [text(200) for _ in range(4)]
    prompts = [f"{trunk} {branches[at % 4]} {text(120)}" for at in range(60)]
    for prompt in prompts:
        agents.ask(prompt)
    loaded = exact = 0
    agents.watch.settle()
    for prompt in prompts[::3]:
        device = agents.watch.claim(chain(prompt)) if chain(prompt)[0] in agents.watch.held else 0
        claimed = max(device, agents.watch.host_claim(chain(prompt)))
        read = agents.ask(prompt)
        assert claimed <= read["cached"] + 2
        exact += 0 < claimed >= read["cached"] - 2
        loaded += device + 2 < read["host"] + device <= claimed + 2
        agents.watch.settle()
    assert loaded >= 3
    assert exact >= 5
    replay = HostWatch(agents.engine)
    until(lambda: len(replay.on_host) >= len(agents.watch.on_host))
    assert (replay.held, replay.on_host) == (agents.watch.held, agents.watch.on_host)


def test_a_balancer_sends_a_request_where_its_prefix_is_on_the_host(
    nursery: Nursery, tiny_model: Path, tmp_path: Path
) -> None:
    system = text(400)
    path, body = "/v1/messages", {"model": "tiny", "max_tokens": 4, "system": system}

    def messages(words: int) -> dict[str, Any]:
        return {**body, "messages": [{"role": "user", "content": text(words)}]}

    with (
        running_engine(nursery, tiny_model, tmp_path / "a.log", *FLAGS) as a,
        running_engine(nursery, tiny_model, tmp_path / "b.log", *FLAGS) as b,
        running_balancer([a.url, b.url], tmp_path / "balancer") as balancer,
    ):

        def explained() -> dict[str, dict[str, Any]]:
            answer = requests.post(
                f"{balancer.url}/sgl_ext/explain{path}", json=asked, timeout=HANG_S
            )
            return {row["name"]: row for row in answer.json()["workers"]}

        def workers() -> dict[str, dict[str, Any]]:
            answer = requests.get(f"{balancer.url}/sgl_ext/workers", timeout=HANG_S)
            return {row["url"]: row for row in answer.json()["workers"]}

        until(lambda: all(row["publishes_prefixes"] for row in workers().values()))
        asked = messages(20)
        # The prefix is computed at `b`, and then demoted there.
        b.post(path, asked)
        agents = Agents(b, HostWatch(b))
        agents.flood(2 * POOL)
        name = workers()[b.url]["id"]
        asked = messages(20)
        until(lambda: explained()[name]["host_tokens"] > 300)
        rows = explained()
        assert rows[name]["held_tokens"] < 100
        other = next(row for row in rows.values() if row["name"] != name)
        assert other["host_tokens"] == 0
        assert rows[name]["cost"] < other["cost"]
        answer = requests.post(balancer.url + path, json=asked, timeout=HANG_S)
        assert answer.json()["usage"]["cache_read_input_tokens"] > 300
        until(lambda: explained()[name]["held_tokens"] > 300)
