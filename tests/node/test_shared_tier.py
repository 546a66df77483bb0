"""A node whose engines share a tier: what one computed, another one reads, and answers alike."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests
from sgl_ext_cpu.engine_processes import find_engine
from sgl_ext_cpu.node import Node, StartNode
from sgl_ext_cpu.nursery import Nursery

from tests.engine.scheduler.test_event_publisher import running_engine
from tests.node.test_routing import CHAT, explained
from tests.waiting import HANG_S, until

POOL, LENGTH, PAGE = 4096, 1500, 16
PAGES = LENGTH // PAGE
_source = random.Random(1)


class Shared:
    """The node, the folder of its tier, and an engine of SGLang's without the extension."""

    def __init__(self, node: Node, folder: Path, stock: str) -> None:
        self.node = node
        self.engines = node.engines
        self.folder = folder
        self._stock = stock

    def pages(self) -> set[Path]:
        return {path for path in self.folder.rglob("*") if path.is_file() and len(path.name) == 64}

    def compute(self, engine: int, prompt: list[int], **more: Any) -> None:
        """An engine answers a prompt that nobody has computed, and its pages are stored."""
        before = self.pages()
        answer = self.ask(engine, prompt, **more)
        assert answer["meta_info"]["cached_tokens"] == 0
        until(lambda: len(self.pages() - before) >= PAGES)

    def ask(self, engine: int, prompt: list[int], **more: Any) -> dict[str, Any]:
        """The answer of an engine, which equals that of stock SGLang."""
        answer = ask(self.engines[engine], prompt, **more)
        expected = ask(self._stock, prompt)
        assert answer["output_ids"] == expected["output_ids"]
        return answer

    def read(self, engine: int, prompt: list[int], **more: Any) -> None:
        """An engine reads nearly all of a prompt from the tier."""
        details = self.ask(engine, prompt, **more)["meta_info"]["cached_tokens_details"]
        assert details["storage"] >= LENGTH - 2 * PAGE, details

    def flush(self, engine: int) -> None:
        requests.post(f"{self.engines[engine]}/flush_cache", timeout=HANG_S).raise_for_status()

    def kill(self, engine: int) -> None:
        """Kills an engine's processes at once, and waits until it serves again."""
        url = self.engines[engine]
        found = find_engine(url)
        for process in (found.scheduler, found.http):
            process.kill()
        until(lambda: not found.http.is_running())
        until(lambda: is_ready(url))

    def count(self, result: str) -> float:
        return self.node.metric(f'sgl_ext_shared_tier_pages_total{{result="{result}"')


def ask(url: str, prompt: list[int], **more: Any) -> dict[str, Any]:
    sampling = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling, **more}
    answer = requests.post(f"{url}/generate", json=body, timeout=HANG_S)
    assert answer.ok, answer.text
    return answer.json()  # type: ignore[no-any-return]


def is_ready(url: str) -> bool:
    try:
        return requests.get(f"{url}/ready", timeout=HANG_S).ok
    except requests.RequestException:
        return False


def new_prompt() -> list[int]:
    return [_source.randrange(20, 900) for _ in range(LENGTH)]


def announced(url: str) -> list[str]:
    """The segments of the shared tier in an engine's snapshot."""
    with requests.get(f"{url}/sgl_ext/events", stream=True, timeout=HANG_S) as stream:
        found: list[str] = []
        for raw in stream.iter_lines():
            line = json.loads(raw)
            found += [segment for segment, *_ in line.get("shared", ())]
            if line.get("complete"):
                return found
    raise AssertionError("the stream ended")


@pytest.fixture(scope="module")
def shared(
    start_node: StartNode,
    nursery: Nursery,
    tiny_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Shared]:
    shm, logs = Path("/dev/shm"), tmp_path_factory.mktemp("shared")
    before = {*shm.glob("sgl-ext-tier-*")}
    flags = ("--instances", "2", "--shared-tier-bytes", str(256 << 20), "--page-size", str(PAGE))
    flags += ("--enable-hierarchical-cache", "--hicache-ratio", "1.5")
    flags += ("--max-total-tokens", str(POOL), "--drain-s", "2")
    with start_node(logs, *flags) as node:
        (folder,) = {*shm.glob("sgl-ext-tier-*")} - before
        assert folder.stat().st_mode & 0o777 == 0o700
        with running_engine(nursery, tiny_model, logs / "stock.log", is_stock=True) as stock:
            yield Shared(node, folder, stock.url)
    assert not folder.exists()


def test_a_session_that_moves_is_read_by_the_other_engine(shared: Shared) -> None:
    prompts = [new_prompt() for _ in range(3)]
    tokens = 'sgl_ext_cached_tokens_total{tier="shared"'
    before, pages = shared.node.metric(tokens), shared.count("read")
    for prompt in prompts:
        shared.compute(0, prompt)
    for prompt in prompts:
        shared.read(1, prompt)
    assert shared.count("read") >= pages + 3 * (PAGES - 1)
    assert shared.node.metric(tokens) >= before + 3 * (LENGTH - 2 * PAGE)
    moved = [
        f'sgl_ext_shared_tier_tokens_total{{operation="{kind}"' for kind in ("written", "read")
    ]
    assert all(shared.node.metric(name) >= 3 * (LENGTH - 2 * PAGE) for name in moved)


def test_a_flushed_engine_reads_what_it_had(shared: Shared) -> None:
    prompt = new_prompt()
    shared.compute(0, prompt)
    shared.flush(0)
    shared.read(0, prompt)


def test_an_engine_reads_what_its_host_had_to_evict(shared: Shared) -> None:
    prompt = new_prompt()
    shared.compute(1, prompt)
    for _ in range(1 + 3 * POOL // LENGTH):
        shared.compute(1, new_prompt())
    shared.read(1, prompt)


def test_engines_that_compute_the_same_at_once_store_it_once(shared: Shared) -> None:
    prompts = [new_prompt() for _ in range(2)]
    before = len(shared.pages())
    with ThreadPoolExecutor(4) as pool:
        for engine in (0, 1):
            for prompt in prompts:
                pool.submit(shared.ask, engine, prompt)
    until(lambda: len(shared.pages()) - before >= 2 * PAGES)
    for engine in (0, 1):
        shared.flush(engine)
    for engine in (0, 1):
        for prompt in prompts:
            shared.read(engine, prompt)
    assert shared.count("corrupt") == 0


def test_a_damaged_page_is_computed_and_stored_again(shared: Shared) -> None:
    prompt, before = new_prompt(), shared.pages()
    shared.compute(0, prompt)
    page = sorted(shared.pages() - before)[0]
    raw = bytearray(page.read_bytes())
    raw[-1] ^= 1
    page.write_bytes(raw)
    corrupt = shared.count("corrupt")
    answer = shared.ask(1, prompt)
    assert answer["meta_info"]["cached_tokens"] < LENGTH - 2 * PAGE
    assert shared.count("corrupt") == corrupt + 1
    until(page.exists)
    shared.flush(1)
    shared.read(1, prompt)


def test_tenants_do_not_read_each_others_pages(shared: Shared) -> None:
    prompt = new_prompt()
    shared.compute(0, prompt, cache_salt="6:tenant")
    for more in ({"cache_salt": "5:other"}, {}, {"extra_key": "6:tenant"}):
        answer = shared.ask(1, prompt, **more)
        assert answer["meta_info"]["cached_tokens"] == 0, more
    shared.read(1, prompt, cache_salt="6:tenant")


def rows(shared: Shared, request: dict[str, Any]) -> list[tuple[int, int]]:
    """Of each engine, how many tokens of a request the balancer takes it to have by itself, and how
    many more in the shared tier."""
    found = explained(shared.node, request)["workers"]
    return [(row["held_tokens"] + row["host_tokens"], row["shared_tokens"]) for row in found]


def test_the_balancer_is_sent_what_the_tier_has_once_and_by_another_engine_after_a_kill(
    shared: Shared,
) -> None:
    system = {"role": "system", "content": "You are the tester of tiers. " * 150}
    turns = [system, {"role": "user", "content": "Hello"}]
    request = {"model": "m", "max_tokens": 4, "messages": turns}
    answer = shared.node.post(CHAT, request)
    assert answer.ok, answer.text
    most = 0.8 * answer.json()["usage"]["prompt_tokens"]
    until(lambda: sorted(has > 0 for has, _ in rows(shared, request)) == [False, True])

    def is_known() -> bool:
        return all(has + more > most for has, more in rows(shared, request))

    until(is_known)
    found = [announced(url) for url in shared.engines]
    (announcer,) = [number for number, segments in enumerate(found) if segments]
    shared.kill(announcer)
    until(lambda: bool(announced(shared.engines[1 - announcer])))
    until(is_known)
    assert announced(shared.engines[announcer]) == []
    for url in shared.engines:
        requests.post(f"{url}/flush_cache", timeout=HANG_S).raise_for_status()
    until(lambda: all(not has and more > most for has, more in rows(shared, request)))


def test_an_engine_that_was_killed_while_it_stored_leaves_whole_pages(shared: Shared) -> None:
    prompts, corrupt = [new_prompt() for _ in range(3)], shared.count("corrupt")
    before = shared.pages()
    for prompt in prompts:
        ask(shared.engines[0], prompt)
    until(lambda: bool(shared.pages() - before))
    shared.kill(0)
    for prompt in prompts:
        for engine in (0, 1):
            shared.ask(engine, prompt)
    assert shared.count("corrupt") <= corrupt
    shared.flush(1)
    shared.read(1, prompts[0])
