"""Requests that come together and share a cold prefix, in real engines: who computes it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from sgl_ext_cpu.nursery import Nursery

from sgl_ext.engine.scheduler.admission import FOLLOW_TOKENS
from tests.engine.scheduler.test_event_publisher import Engine, Watch, running_engine, text
from tests.waiting import HANG_S

AGENTS = 6
CHUNK = 2048
SLACK = 64  # what pages and the last token cost each


@pytest.fixture(scope="module", params=["priority", "lpm"])
def engine(
    request: pytest.FixtureRequest,
    nursery: Nursery,
    tiny_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Engine]:
    """With our order of the queue, and with SGLang's own."""
    log = tmp_path_factory.mktemp("single") / "engine.log"
    own = ("--schedule-policy", "lpm") if request.param == "lpm" else ()
    flags = ("--chunked-prefill-size", str(CHUNK), *own)
    with running_engine(nursery, tiny_model, log, *flags) as started:
        yield started


@pytest.fixture
def fresh(engine: Engine) -> Engine:
    engine.post("/flush_cache", {})
    Watch(engine).settle()
    return engine


def together(engine: Engine, prompts: list[str], **fields: Any) -> tuple[list[int], list[int]]:
    """Of prompts that come in one pass, each one's tokens and those it computed."""
    body = {"text": prompts, "sampling_params": {"max_new_tokens": 4, "temperature": 0}, **fields}
    answer = requests.post(f"{engine.url}/generate", json=body, timeout=HANG_S)
    assert answer.ok, answer.text
    told = [one["meta_info"] for one in answer.json()]
    sizes = [one["prompt_tokens"] for one in told]
    return sizes, [size - one["cached_tokens"] for size, one in zip(sizes, told, strict=True)]


def shared(words: int, own: int = 10) -> list[str]:
    prefix = text(words)
    return [f"{prefix} {text(own)}" for _ in range(AGENTS)]


@pytest.mark.parametrize("words", [500, 1300], ids=["whole", "in chunks"])
def test_a_cold_prefix_is_computed_once(fresh: Engine, words: int) -> None:
    sizes, computed = together(fresh, shared(words))
    assert min(sizes) > FOLLOW_TOKENS + SLACK
    assert max(computed) > min(sizes) - SLACK  # one did
    assert sum(computed) < max(sizes) + AGENTS * SLACK


def test_a_shared_part_after_a_cached_prefix_is_computed_once_too(fresh: Engine) -> None:
    cached = text(500)
    together(fresh, [cached])
    rest = text(500)
    sizes, computed = together(fresh, [f"{cached} {rest} {text(10)}" for _ in range(AGENTS)])
    assert sum(computed) < max(sizes) - FOLLOW_TOKENS / 2 + AGENTS * SLACK


def test_requests_that_share_little_do_not_wait(fresh: Engine) -> None:
    before = awaited(fresh)
    prefix = text(50)
    sizes, computed = together(fresh, [f"{prefix} {text(100)}" for _ in range(AGENTS)])
    assert awaited(fresh) == before
    assert computed[0] == sizes[0]
    assert min(computed) >= 100  # the last ones may find the prefix, but nothing of their own


def test_two_tenants_do_not_wait_for_each_others_prefixes(fresh: Engine) -> None:
    prompts = shared(500)[:2]
    before = awaited(fresh)
    sizes, computed = together(fresh, prompts, cache_salt=["one", "other"])
    assert awaited(fresh) == before
    assert computed == sizes


def awaited(engine: Engine) -> float:
    page = requests.get(f"{engine.url}/metrics", timeout=HANG_S).text
    lines = [
        line for line in page.splitlines() if line.startswith("sgl_ext_prefixes_awaited_total")
    ]
    return sum(float(line.split()[-1]) for line in lines)
