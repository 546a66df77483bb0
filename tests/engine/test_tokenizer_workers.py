"""A real engine with several tokenizer workers: what holds with one HTTP process holds with two."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests
from sgl_ext_cpu.nursery import Nursery

from sgl_ext.engine.sglang_versions import WITHOUT_WORKERS, installed
from sgl_ext.wire.events import EVENTS_PATH
from sgl_ext.wire.headers import CONVERSATION_HEADER
from sgl_ext.wire.orders import SETTINGS_PATH
from sgl_ext.wire.probes import READY_PATH
from tests.engine.scheduler.test_event_publisher import Engine, running_engine, text
from tests.reading.test_strip import HEADER
from tests.waiting import HANG_S, until

pytestmark = pytest.mark.skipif(installed() in WITHOUT_WORKERS, reason="is refused by name")

WORKERS = 2
# So many new connections reach each worker, as good as always: the kernel gives them out.
OFTEN = 40


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("workers") / "engine.log"


@pytest.fixture(scope="module")
def engine(nursery: Nursery, tiny_model: Path, log: Path) -> Iterator[Engine]:
    flags = ("--tokenizer-worker-num", str(WORKERS))
    with running_engine(nursery, tiny_model, log, *flags) as started:
        until(lambda: requests.get(started.url + READY_PATH, timeout=HANG_S).ok)
        yield started


def counted(engine: Engine, name: str) -> float:
    page = requests.get(f"{engine.url}/metrics", timeout=HANG_S).text
    rows = [line for line in page.splitlines() if line.startswith(f"sgl_ext_{name}")]
    return sum(float(row.rsplit(" ", 1)[1]) for row in rows)


def ask(engine: Engine, conversation: str, first: str, turn: int = 0, **body: Any) -> Any:
    block = {"type": "text", "text": first, "cache_control": {"type": "ephemeral"}}
    messages: list[dict[str, Any]] = [{"role": "user", "content": [block]}]
    for number in range(turn):
        messages += [{"role": "assistant", "content": "ok"}]
        messages += [{"role": "user", "content": f"go on {number}"}]
    body = {"model": "tiny", "max_tokens": 4, "temperature": 0, "messages": messages} | body
    headers = {CONVERSATION_HEADER: conversation}
    return requests.post(f"{engine.url}/v1/messages", json=body, headers=headers, timeout=HANG_S)


def test_the_turns_of_each_conversation_find_tokens_and_prefix(engine: Engine) -> None:
    source = 'prompt_tokens_encoded_total{source="known"}'
    for conversation in "01":
        first = text(300)
        ask(engine, conversation, first)
        for turn in range(1, 6):
            known = counted(engine, source)
            usage = ask(engine, conversation, first, turn).json()["usage"]
            assert usage["cache_read_input_tokens"] > 300
            assert counted(engine, source) - known > 300


def test_pins_are_the_same_by_whichever_worker_they_are_listed_and_deleted(engine: Engine) -> None:
    for conversation in "01":
        ask(engine, conversation, text(200), metadata={"user_id": f"pinned {conversation}"})

    def pins() -> list[Any]:
        return requests.get(f"{engine.url}/v1/pins", timeout=HANG_S).json()["pins"]

    until(lambda: len(pins()) >= 2)
    assert len({json.dumps([pin["prefix"] for pin in pins()]) for _ in range(OFTEN)}) == 1
    for pin in pins():
        one = {"prefix": pin["prefix"]}
        answer = requests.delete(f"{engine.url}/v1/pins", params=one, timeout=HANG_S)
        assert answer.json() == {"deleted": 1}
    assert not pins()


def test_each_subscriber_gets_the_snapshot_of_the_whole_engine(engine: Engine) -> None:
    first = text(200)
    ask(engine, "1", first)

    def snapshot() -> list[Any]:
        with requests.get(engine.url + EVENTS_PATH, stream=True, timeout=HANG_S) as answer:
            for raw in answer.iter_lines(chunk_size=1):
                line = json.loads(raw)
                if "stored" in line:
                    return sorted(row[0] for row in line["stored"])
        raise AssertionError

    engine.post("/flush_cache", {})
    ask(engine, "1", first)
    until(lambda: len({json.dumps(snapshot()) for _ in range(OFTEN)}) == 1)


def test_the_header_is_stripped_and_errors_have_their_shape_at_each_worker(engine: Engine) -> None:
    for conversation in "01":
        before = counted(engine, "headers_stripped_total")
        system = [{"type": "text", "text": HEADER + "\nBe brief."}]
        assert ask(engine, conversation, "Hi", system=system).ok
        assert counted(engine, "headers_stripped_total") == before + 1
        refused = ask(engine, conversation, "Hi", max_tokens="many")
        assert refused.status_code == 400
        assert refused.json()["error"]["message"].startswith("max_tokens: ")


def test_a_stream_is_that_of_a_whole_answer_at_each_worker(engine: Engine) -> None:
    first = text(50)
    for conversation in "01":
        whole = ask(engine, conversation, first, max_tokens=20).json()["content"]
        streamed = ask(engine, conversation, first, max_tokens=20, stream=True).text
        lines = [json.loads(line[6:]) for line in streamed.splitlines() if line[:6] == "data: "]
        deltas = [line["delta"].get("text", "") for line in lines if "delta" in line]
        assert "".join(deltas) == "".join(block["text"] for block in whole)


def test_a_prompt_is_prefilled_ahead_by_the_worker_of_its_conversation(engine: Engine) -> None:
    for conversation in "01":
        first = text(200)
        body = {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": first}]}
        url = f"{engine.url}/v1/prefill?protocol=messages"
        headers = {CONVERSATION_HEADER: conversation}
        done = requests.post(url, json=body, headers=headers, timeout=HANG_S).json()
        assert done["complete"], done
        assert engine.post("/v1/messages", body)["usage"]["cache_read_input_tokens"] > 200


def test_changed_settings_are_in_effect_at_each_worker(engine: Engine) -> None:
    def clamps(conversation: str) -> bool:
        before = counted(engine, "priority_clamped_total")
        hints = {"nvext": {"agent_hints": {"priority": 40}}}
        assert ask(engine, conversation, "Hi", **hints).ok
        return counted(engine, "priority_clamped_total") > before

    assert not any(map(clamps, "01"))
    change = {"number": 1, "values": {"max_priority": 7}}
    answer = requests.post(engine.url + SETTINGS_PATH, json=change, timeout=HANG_S)
    assert answer.json() == {"applied": True, "why": ""}
    assert all(map(clamps, "01"))


def ended(engine: Engine) -> int:
    until(lambda: not engine.server.running())
    return engine.server.exit_status() or 0


def test_an_engine_that_is_told_to_end_answers_first_at_each_worker(
    nursery: Nursery, tiny_model: Path, tmp_path: Path
) -> None:
    flags = ("--tokenizer-worker-num", str(WORKERS))
    with (
        running_engine(nursery, tiny_model, tmp_path / "log", *flags) as engine,
        ThreadPoolExecutor() as pool,
    ):
        until(lambda: requests.get(engine.url + READY_PATH, timeout=HANG_S).ok)
        with engine.gate.closed():
            answers = [
                pool.submit(ask, engine, conversation, text(20), max_tokens=30)
                for conversation in "01"
            ]
            engine.gate.count(2, "arrived")
            psutil.Process(engine.server.pid).send_signal(signal.SIGTERM)
        assert [answer.result().status_code for answer in answers] == [200, 200]
        assert ended(engine) == 0
    assert "crashed" not in (tmp_path / "log").read_text()


@pytest.mark.slow
def test_an_engine_ends_with_one_of_its_workers(
    nursery: Nursery, tiny_model: Path, tmp_path: Path
) -> None:
    flags = ("--tokenizer-worker-num", str(WORKERS))
    with running_engine(nursery, tiny_model, tmp_path / "log", *flags) as engine:
        until(lambda: requests.get(engine.url + READY_PATH, timeout=HANG_S).ok)
        children = psutil.Process(engine.server.pid).children()
        worker = next(one for one in children if "tokenizer_worker" in "".join(one.cmdline()))
        worker.kill()
        ended(engine)
    assert "a tokenizer worker has ended, so the engine ends" in (tmp_path / "log").read_text()
