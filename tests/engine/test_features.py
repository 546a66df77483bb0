"""Features of SGLang on one real engine: LoRA adapters, whose answers are stock SGLang's and whose
prefixes are their own; mixed chunks; pauses; new weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
from safetensors.torch import save_file
from sgl_ext_cpu.nursery import Nursery

from tests.engine.scheduler.test_event_publisher import (
    Engine,
    Watch,
    chain_of,
    running_engine,
    text,
)
from tests.waiting import HANG_S, until

ADAPTERS = ("one", "two")
ALL = (*ADAPTERS, None)
MODULES = {"q_proj": (64, 64), "k_proj": (64, 32), "v_proj": (64, 32), "o_proj": (64, 64)}
RANK, LAYERS = 4, 2


BLOCK = {
    "type": "text",
    "text": "Be brief. " * 60,
    "cache_control": {"type": "ephemeral", "ttl": "5m"},
}
MARKED = {"max_tokens": 4, "messages": [{"role": "user", "content": "hi"}], "system": [BLOCK]}


def pins_of(engine: Engine) -> list[Any]:
    return list(requests.get(f"{engine.url}/v1/pins", timeout=HANG_S).json()["pins"])


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two adapters of the tiny model, as PEFT writes them."""
    found = {}
    for seed, name in enumerate(ADAPTERS):
        found[name] = folder = tmp_path_factory.mktemp(name)
        generator = torch.Generator().manual_seed(seed)
        weights = {}
        for layer in range(LAYERS):
            for module, (wide, out) in MODULES.items():
                at = f"base_model.model.model.layers.{layer}.self_attn.{module}"
                weights[f"{at}.lora_A.weight"] = torch.randn(RANK, wide, generator=generator) / 8
                weights[f"{at}.lora_B.weight"] = torch.randn(out, RANK, generator=generator)
        save_file(weights, folder / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "bias": "none"}
        config |= {"target_modules": list(MODULES), "task_type": "CAUSAL_LM"}
        (folder / "adapter_config.json").write_text(json.dumps(config))
    return found


def flags_of(adapters: dict[str, Path]) -> list[str]:
    paths = [f"{name}={path}" for name, path in adapters.items()]
    places = ["--max-loras-per-batch", "2", "--lora-backend", "torch_native"]
    mixed = ["--enable-mixed-chunk", "--chunked-prefill-size", "256"]
    return ["--enable-lora", "--lora-paths", *paths, *places, *mixed]


@pytest.fixture(scope="module")
def engine(
    nursery: Nursery,
    tiny_model: Path,
    adapters: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Engine]:
    log = tmp_path_factory.mktemp("lora") / "engine.log"
    with running_engine(nursery, tiny_model, log, *flags_of(adapters)) as started:
        yield started


def ask(engine: Engine, prompt: str, adapter: str | None, tokens: int = 1, **more: Any) -> Any:
    body = {"text": prompt, "sampling_params": {"max_new_tokens": tokens, "temperature": 0}}
    return engine.post("/generate", body | {"lora_path": adapter} | more)


def test_an_adapters_prefixes_are_its_own_and_published_as_such(engine: Engine) -> None:
    watch, prompt = Watch(engine), text(300)
    for adapter in ALL:
        chain = chain_of(
            "/generate", {"text": prompt} | ({"lora_path": adapter} if adapter else {})
        )
        assert watch.claim(chain) == 0
        assert ask(engine, prompt, adapter)["meta_info"]["cached_tokens"] == 0
        watch.settle()
        assert watch.claim(chain) > 0
        meta = ask(engine, prompt, adapter)["meta_info"]
        assert meta["cached_tokens"] == meta["prompt_tokens"] - 1


def test_an_adapters_pins_are_made_and_read(engine: Engine) -> None:
    for model in ("tiny:one", "tiny:one", "tiny:two"):
        engine.post("/v1/messages", MARKED | {"model": model})
    until(lambda: sorted(pin["hits"] for pin in pins_of(engine)) == [0, 1])


def test_more_adapters_than_places_are_served_together_with_chunks_of_prompts(
    engine: Engine,
) -> None:
    asked = [(text(20 if number % 2 else 500), adapter) for number in range(2) for adapter in ALL]
    with ThreadPoolExecutor(len(asked)) as pool:
        answers = list(pool.map(lambda one: ask(engine, *one, 24), asked))
    assert [one["meta_info"]["completion_tokens"] for one in answers] == [24] * len(asked)


def test_a_pause_keeps_pins_and_what_runs_goes_on_after_it(engine: Engine) -> None:
    engine.post("/flush_cache", {})
    prompt = text(100)
    first = ask(engine, prompt, "one", 300)["text"]
    engine.post("/flush_cache", {})
    engine.post("/v1/messages", MARKED | {"model": "tiny:two"})
    with ThreadPoolExecutor(2) as pool:
        with engine.gate.closed():
            at = engine.gate.mark()
            running = pool.submit(ask, engine, prompt, "one", 300)
            engine.gate.run_until(lambda step: any(map(step.answered, step.requests)))
            paused = pool.submit(engine.post, "/pause_generation", {"mode": "retract"})
            engine.gate.arrived("PauseGenerationReqInput", since=at)
        paused.result()
        engine.gate.count(1, "preempted", at)
        assert len(pins_of(engine)) == 1
        engine.post("/continue_generation", {})
        assert running.result()["text"] == first


def test_new_weights_end_pins_and_empty_what_is_published(engine: Engine, tiny_model: Path) -> None:
    watch = Watch(engine)
    engine.post("/v1/messages", MARKED | {"model": "tiny:two"})
    until(lambda: bool(pins_of(engine) and watch.held))
    engine.post("/update_weights_from_disk", {"model_path": str(tiny_model)})
    until(lambda: not pins_of(engine) and not watch.held)


def test_answers_are_those_of_stock_sglang(
    engine: Engine,
    nursery: Nursery,
    tiny_model: Path,
    adapters: dict[str, Path],
    tmp_path: Path,
) -> None:
    shared = text(60)
    prompts = [(f"{shared} {text(5)}", adapter) for adapter in (*ADAPTERS, None, *ADAPTERS)]
    ours = [ask(engine, prompt, adapter, 16)["text"] for prompt, adapter in prompts]
    assert len({ask(engine, shared, adapter, 16)["text"] for adapter in ALL}) == 3
    log, flags = tmp_path / "stock.log", flags_of(adapters)
    with running_engine(nursery, tiny_model, log, *flags, is_stock=True) as stock:
        assert [ask(stock, prompt, adapter, 16)["text"] for prompt, adapter in prompts] == ours
