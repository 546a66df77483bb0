"""Flags of SGLang that recipes for agents set, on a real engine: steps of decoding between
prefills, and rarer chunks of a stream."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import requests
from sgl_ext_cpu.nursery import Nursery

from tests.engine.scheduler.test_event_publisher import (
    Engine,
    Watch,
    chain_of,
    running_engine,
    text,
)
from tests.waiting import until

CHUNK, INTERVAL = 256, 2
FLAGS = ("--chunked-prefill-size", str(CHUNK), "--prefill-decode-interval", str(INTERVAL))
FLAGS += ("--stream-interval", "20", "--incremental-streaming-output")


@pytest.fixture(scope="module")
def engine(
    nursery: Nursery, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    log = tmp_path_factory.mktemp("agentic") / "engine.log"
    with running_engine(nursery, tiny_model, log, *FLAGS) as started:
        yield started


def sampled(rid: str, prompt: str, tokens: int) -> dict[str, Any]:
    sampling = {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 0}
    return {"rid": rid, "text": prompt, "sampling_params": sampling}


def test_decoding_goes_on_between_the_chunks_of_a_long_prompt(engine: Engine) -> None:
    gate = engine.gate
    with gate.closed(), ThreadPoolExecutor() as pool:
        short = pool.submit(engine.post, "/generate", sampled("short", text(10), 60))
        gate.arrived("short")
        gate.answer("short")
        long = pool.submit(engine.post, "/generate", sampled("long", text(5 * CHUNK), 1))
        gate.arrived("long")
        since = gate.mark()
        gate.finish("long")
        steps = [event for event in gate.events[since:] if event.kind == "step"]
        gate.open()
        short.result()
        long.result()
    chunks = [at for at, step in enumerate(steps) if step.computed("long") and step.is_prefill]
    assert len(chunks) >= 5
    between = [later - earlier - 1 for earlier, later in pairwise(chunks)]
    assert set(between) == {INTERVAL}


TURN = [{"role": "user", "content": "Say something long about files and tools."}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/messages": {"messages": TURN, "max_tokens": 70, "temperature": 0},
    "/v1/chat/completions": {"messages": TURN, "max_tokens": 70, "temperature": 0},
    "/v1/responses": {"input": TURN, "max_output_tokens": 70, "temperature": 0},
}


def whole_text(path: str, answer: dict[str, Any]) -> str:
    if path == "/v1/messages":
        return "".join(block.get("text", "") for block in answer["content"])
    if path == "/v1/responses":
        messages = [item for item in answer["output"] if item["type"] == "message"]
        return "".join(part["text"] for item in messages for part in item["content"])
    return str(answer["choices"][0]["message"]["content"])


def delta_of(path: str, event: dict[str, Any]) -> str:
    if path == "/v1/messages":
        return str(event.get("delta", {}).get("text", ""))
    if path == "/v1/responses":
        return str(event["delta"]) if event["type"] == "response.output_text.delta" else ""
    return "".join(choice["delta"].get("content") or "" for choice in event["choices"])


@pytest.mark.parametrize("path", BODIES)
def test_a_streams_text_is_that_of_the_whole_answer(engine: Engine, path: str) -> None:
    body = {"model": "tiny", **BODIES[path]}
    whole = whole_text(path, engine.post(path, body))
    answer = requests.post(engine.url + path, json=body | {"stream": True}, timeout=120)
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    deltas = [delta for line in lines if (delta := delta_of(path, json.loads(line)))]
    assert whole
    assert "".join(deltas) == whole
    assert len(deltas) < 10, "a chunk is of 20 tokens"


def test_pins_and_published_prefixes_hold(engine: Engine) -> None:
    watch = Watch(engine)
    block = {"type": "text", "text": text(200), "cache_control": {"type": "ephemeral"}}
    body = {"model": "tiny", "max_tokens": 2, "system": [block], "messages": TURN}
    engine.post("/v1/messages", body)
    watch.settle()
    assert watch.claim(chain_of("/v1/messages", body)) > 200
    until(lambda: len(requests.get(f"{engine.url}/v1/pins", timeout=60).json()["pins"]) == 1)
    usage = engine.post("/v1/messages", body)["usage"]
    assert usage["cache_read_input_tokens"] > 200
