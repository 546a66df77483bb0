"""Pins and published segments in SGLang's own trees, as features of SGLang configure them:
speculative decoding with a draft model, sessions, LoRA adapters. Without an engine."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest

from sgl_ext.engine.core.request_context import WHOLE_PROMPT
from sgl_ext.engine.scheduler.state import RequestState
from sgl_ext.protocols.registry import of_path
from sgl_ext.reading.segments import read_chain
from sgl_ext.wire.hints import Hints
from tests.engine.core.test_shared_prefixes import TOKENS, Tree, loaded, sglang
from tests.radix.held import everything

pytestmark = pytest.mark.filterwarnings("ignore")  # SGLang warns while it is imported

GENERATE = of_path("/generate")
NUMBERS = count(1)
LENGTH = 100


class Cache(Tree):
    """A tree that serves prompts, one after the other."""

    def serve(self, ids: list[int], *, is_marked: bool = False, **more: Any) -> int:
        """Runs a request; how much of its prompt it read."""
        batch = sglang("managers.schedule_batch")
        req = batch.Req(str(next(NUMBERS)), "", array("q", ids), batch.SamplingParams(), **more)
        chain = chain_of(ids, more.get("lora_id"))
        pins = ((WHOLE_PROMPT, 300.0),) if is_marked else ()
        hints = Hints(chain.hashes, chain.ends, pins, "", "s", 1.0, True, False, True)
        req.sgl_ext = RequestState(hints)
        self.admit(req)
        req.finished_reason = batch.FINISH_LENGTH(0)
        sglang("mem_cache.common").release_kv_cache(req, self.cache, checkpoint=True)
        return int(req.cached_tokens)

    def flood(self) -> None:
        for _ in range(2 * TOKENS // LENGTH):
            self.serve(prompt())
        self.cache.sweep(1 << 60)

    def published(self, ids: list[int], adapter: str | None = None) -> int:
        """How many tokens of a prompt the published segments say are held."""
        held = {segment: tokens for segment, _, tokens in everything(self.cache.residency)}
        return max((held.get(one, 0) for one in chain_of(ids, adapter).hashes), default=0)


def chain_of(ids: list[int], adapter: str | None) -> Any:
    body = {"input_ids": ids} | ({"lora_path": adapter} if adapter else {})
    return read_chain(GENERATE, body)


def prompt() -> list[int]:
    """A prompt of which no other has any token."""
    return [next(NUMBERS) for _ in range(LENGTH)]


@pytest.fixture(autouse=True)
def _entry_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaded("sgl_ext.engine.scheduler.state"), "is_entry_rank", lambda: True)


@pytest.fixture(params=["plain-rust", "eagle-rust", "eagle-python", "session-python"])
def cache(request: pytest.FixtureRequest) -> Iterator[Cache]:
    feature, core = request.param.split("-")
    more = {"enable_session_radix_cache": True} if feature == "session" else {}
    with sglang("runtime_context").get_context().override_server_args():
        yield Cache(core, is_eagle=feature == "eagle", eviction_policy="priority", **more)


def test_a_pinned_prompt_outlasts_a_flood_and_segments_say_what_is_held(cache: Cache) -> None:
    kept, twin = prompt(), prompt()
    cache.serve(kept, is_marked=True)
    cache.serve(twin)
    assert cache.published(kept) == cache.published(twin) >= LENGTH - 1
    cache.flood()
    assert cache.matched(kept, None) >= LENGTH - 1
    assert cache.matched(twin, None) == 0
    assert (cache.published(kept) > 0, cache.published(twin)) == (True, 0)
    assert cache.serve([*kept, *prompt()]) >= LENGTH - 1
    cache.cache.sanity_check()


def test_a_flush_leaves_neither_pins_nor_segments(cache: Cache) -> None:
    """As SGLang flushes after it has updated weights, or released memory."""
    cache.serve(kept := prompt(), is_marked=True)
    cache.cache.reset()
    cache.memory.clear()
    assert not len(cache.cache.pins.pins)
    assert cache.published(kept) == cache.cache.full_protected_size() == 0
    assert cache.serve(kept) == 0
    cache.cache.sanity_check()


@pytest.mark.parametrize("core", ["rust", "python"])
def test_two_adapters_share_neither_tokens_nor_segments_nor_pins(core: str) -> None:
    with sglang("runtime_context").get_context().override_server_args():
        cache, ids = Cache(core, eviction_policy="priority"), prompt()
        cache.serve(ids, is_marked=True, lora_id="a")
        assert cache.published(ids, "a") >= LENGTH - 1
        assert cache.published(ids, "b") == cache.published(ids) == 0
        assert [cache.serve(ids, lora_id="b"), cache.serve(ids)] == [0, 0]
        cache.flood()
        held = [cache.published(ids, adapter) > 0 for adapter in ("a", "b", None)]
        assert held == [True, False, False]
        assert cache.serve(ids, lora_id="a") >= LENGTH - 1
