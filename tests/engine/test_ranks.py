"""Real engines with two data-parallel ranks, behind a balancer: each rank is a worker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import requests
from sgl_ext_cpu.node import running_balancer
from sgl_ext_cpu.nursery import Nursery

from tests.engine.scheduler.test_event_publisher import Engine, running_engine
from tests.kinds import slow_but_for
from tests.waiting import HANG_S, until

ATTENTION = ("--tp-size", "2", "--attn-dp-size", "2")
KINDS = {
    "replicas": ("--dp-size", "2"),
    "attention": ATTENTION,
    "local control": (*ATTENTION, "--enable-dp-attention-local-control-broadcast"),
    # Tests' engines sleep while they are idle.
    "delayed": (*ATTENTION, "--enable-prefill-delayer", "--prefill-delayer-max-delay-passes", "1"),
}
TEXT = "The agent reads a file and then writes what it found. " * 20


class Ranked(NamedTuple):
    url: str
    engine: Engine

    def get(self, path: str) -> Any:
        return requests.get(self.url + path, timeout=HANG_S).json()

    def workers(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.get("/sgl_ext/workers")["workers"]
        return found


@pytest.fixture(scope="module", params=slow_but_for(["attention"], KINDS))
def ranked(
    request: pytest.FixtureRequest,
    nursery: Nursery,
    tiny_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Ranked]:
    folder = tmp_path_factory.mktemp("ranks")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")
        with (
            running_engine(nursery, tiny_model, folder / "engine", *KINDS[request.param]) as engine,
            running_balancer([engine.url], folder / "balancer") as balancer,
        ):
            found = Ranked(balancer.url, engine)
            until(lambda: [row["publishes_prefixes"] for row in found.workers()] == [True] * 2)
            yield found


def ask(url: str, session: str, turn: int, **headers: str) -> int:
    """The cached tokens of a turn of a conversation."""
    first = {"type": "text", "text": session + TEXT, "cache_control": {"type": "ephemeral"}}
    messages: list[dict[str, Any]] = [{"role": "user", "content": [first]}]
    for number in range(turn):
        messages += [{"role": "assistant", "content": "ok"}]
        messages += [{"role": "user", "content": f"go on {number}"}]
    body = {"model": "tiny", "max_tokens": 4, "messages": messages}
    headers = {"x-session-id": session, **headers}
    answer = requests.post(f"{url}/v1/messages", json=body, headers=headers, timeout=HANG_S)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["cache_read_input_tokens"])


def test_conversations_are_spread_over_the_ranks_and_stay(ranked: Ranked) -> None:
    for turn in range(3):
        for session in ("a", "b"):
            read = ask(ranked.url, session, turn)
            assert (read > 200) is (turn > 0), (session, turn)
    until(lambda: len(ranked.get("/v1/pins")["pins"]) == 2)
    pins = {pin["session"]: pin for pin in ranked.get("/v1/pins")["pins"]}
    assert {pin["rank"] for pin in pins.values()} == {0, 1}
    ids = {row["rank"]: row["id"] for row in ranked.workers()}
    assert all(pin["worker"] == ids[pin["rank"]] for pin in pins.values())


def test_a_rank_caches_what_was_sent_to_it_alone(ranked: Ranked) -> None:
    direct = ranked.engine.url
    for rank in ("0", "1"):
        assert ask(direct, "c", 0, **{"x-sgl-ext-rank": rank}) < 20
        assert ask(direct, "c", 1, **{"x-sgl-ext-rank": rank}) > 200


def test_a_pin_is_deleted_at_its_rank(ranked: Ranked) -> None:
    def ranks() -> list[int]:
        pins = requests.get(f"{ranked.engine.url}/v1/pins", timeout=HANG_S).json()["pins"]
        return [pin["rank"] for pin in pins if pin["session"] == "d"]

    for rank in ("0", "1"):
        ask(ranked.engine.url, "d", 0, **{"x-sgl-ext-rank": rank})
    until(lambda: sorted(ranks()) == [0, 1])
    name = next(row["id"] for row in ranked.workers() if row["rank"] == 1)
    found = {"session": "d", "worker": name}
    deleted = requests.delete(f"{ranked.url}/v1/pins", params=found, timeout=HANG_S).json()
    assert deleted == {ranked.engine.url: {"deleted": 1}}
    until(lambda: ranks() == [0])


def test_a_prompt_is_prefilled_ahead_at_the_rank_that_is_named(ranked: Ranked) -> None:
    body = {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": "e" + TEXT}]}
    url = f"{ranked.engine.url}/v1/prefill?protocol=messages"
    there = {"x-sgl-ext-rank": "1"}
    done = requests.post(url, json=body, headers=there, timeout=HANG_S).json()
    assert done["complete"], done
    answers = [
        requests.post(
            f"{ranked.engine.url}/v1/messages",
            json=body,
            headers={"x-sgl-ext-rank": rank},
            timeout=HANG_S,
        ).json()
        for rank in ("1", "0")
    ]
    read = [answer["usage"]["cache_read_input_tokens"] for answer in answers]
    assert read[0] > 200
    assert read[1] < 20
    assert requests.post(url, json=body, timeout=HANG_S).json()["why"] == "no_rank"


def test_each_rank_reports_its_own_load(ranked: Ranked) -> None:
    page = requests.get(f"{ranked.url}/metrics", timeout=HANG_S).text
    rows = [row for row in page.splitlines() if row.startswith("sgl_ext_worker_capacity_tokens{")]
    assert len(rows) == 2
    assert all(float(row.split()[-1]) == 4096 for row in rows)
