"""A cache that takes longer than the work it replaces turns off, says so, and is tried again."""

from __future__ import annotations

import logging
import math
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sgl_ext.engine.core.counters import counter, gauge
from sgl_ext.engine.core.request_context import RequestContext
from sgl_ext.engine.host_cache import message_cache, token_cache, worth
from sgl_ext.engine.host_cache.message_cache import MessageCache, SchemaCache
from sgl_ext.engine.host_cache.token_cache import TokenCache
from sgl_ext.engine.host_cache.token_offsets import TokenOffsets
from sgl_ext.engine.host_cache.worth import LEAST_USES, RETRY_S, WINDOW_S, Worth
from sgl_ext.engine.http import pin_placement
from sgl_ext.engine.http.extension import HttpExtension, set_gauges
from sgl_ext.protocols.anthropic import ANTHROPIC
from sgl_ext.reading.cache_marks import TtlLimits, read_marks
from sgl_ext.settings.schema import EngineSettings

SLOW_S, QUICK_S = 0.01, 0.001


class Clock:
    """A clock that advances when it is told to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def during(self, seconds: float, function: Any) -> Any:
        """A function that takes so long."""

        def run(*args: Any, **options: Any) -> Any:
            self.now_s += seconds
            return function(*args, **options)

        return run


@pytest.fixture
def clock() -> Clock:
    return Clock()


def use(account: Worth, clock: Clock, took_s: float, times: int = LEAST_USES) -> bool:
    """Uses of a cache all over a window. Whether it turned off."""
    noted = []
    for _ in range(times):
        clock.now_s += WINDOW_S / times
        noted.append(account.note(took_s, 1))
    return any(noted)


def test_a_cache_that_costs_more_is_off_for_a_while(clock: Clock) -> None:
    account = Worth("a", clock)
    account.learn(10, 10 * QUICK_S)
    assert use(account, clock, SLOW_S)
    assert account.is_off
    clock.now_s += RETRY_S - 1
    assert not account.is_on()
    clock.now_s += 1
    assert account.is_on()
    assert not account.is_off
    assert use(account, clock, SLOW_S)


def test_a_cache_that_saves_stays(clock: Clock) -> None:
    account = Worth("a", clock)
    account.learn(1, SLOW_S)
    for _ in range(5):  # what was learned once is not forgotten
        assert not use(account, clock, QUICK_S)
    assert account.is_on()
    assert account.replaced_s == pytest.approx(account.took_s * SLOW_S / QUICK_S)


def test_what_was_learned_last_counts_most(clock: Clock) -> None:
    account = Worth("a", clock)
    account.learn(100, 100 * SLOW_S)
    windows = []
    for _ in range(8):
        windows.append(use(account, clock, QUICK_S))
        account.learn(100, 100 * QUICK_S / 10)
    assert windows.index(True) > 1


@pytest.mark.parametrize(("took_s", "times"), [(SLOW_S, LEAST_USES - 1), (1e-4, LEAST_USES)])
def test_a_few_uses_or_a_small_loss_turn_nothing_off(
    clock: Clock, took_s: float, times: int
) -> None:
    assert not use(Worth("a", clock), clock, took_s, times)


def tokens_at(clock: Clock, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    cache = TokenCache(tokenizer, lambda t, text, options=None: t.encode(text), 1 << 20)
    cache.worth = Worth("tokens", clock)
    # What the tokenizer takes on this machine does not count, and no thread reads the clock.
    clocks = SimpleNamespace(perf_counter=clock, monotonic=clock)
    monkeypatch.setattr(token_cache, "time", clocks)
    monkeypatch.setattr(cache, "_check_after_s", math.inf)
    monkeypatch.setattr(cache._pieces, "encode", clock.during(SLOW_S, cache._pieces.encode))
    return cache, lambda: cache.serves(tokenizer, None) and cache.encode("<|im_start|>Hello")


def messages_at(clock: Clock, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    cache = MessageCache(1 << 20)
    cache.worth = Worth("messages", clock)
    slow = SimpleNamespace(dumps=clock.during(SLOW_S, message_cache.marshal.dumps))
    monkeypatch.setattr(message_cache, "marshal", slow)
    body, context = {"messages": [{"role": "user", "content": "a"}]}, RequestContext("/v1/messages")
    return cache, lambda: cache.recall(body, context) is not body


def schemas_at(clock: Clock, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    cache = SchemaCache()
    cache.worth = Worth("schemas", clock)
    slow = SimpleNamespace(dumps=clock.during(SLOW_S, message_cache.orjson.dumps))
    monkeypatch.setattr(message_cache, "orjson", slow)
    before: list[Any] = []

    def check() -> bool:
        cache.check({}, clock.during(QUICK_S, before.append))
        return bool(len(cache))

    return cache, check


@pytest.mark.parametrize("make", [tokens_at, messages_at, schemas_at])
def test_each_cache_turns_off_and_is_tried_again(
    make: Any,
    clock: Clock,
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    cache, is_used = make(clock, tiny_model, monkeypatch)
    times = counter("host_caches_turned_off").labels(cache.worth.name)._value
    before = times.get()
    with caplog.at_level(logging.WARNING, logger=worth.__name__):
        assert is_used()
        for _ in range(LEAST_USES):
            clock.now_s += WINDOW_S / LEAST_USES
            is_used()
    assert not is_used()
    assert cache.worth.is_off
    assert (times.get() - before, len(caplog.records)) == (1, 1)
    clock.now_s += RETRY_S
    assert is_used()


def schemas_that_grow(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Any:
    cache = SchemaCache()
    cache.worth = Worth("schemas", clock)
    return cache, lambda n: cache.check({"maxLength": n}, clock.during(n * QUICK_S, str))


def prompts_that_grow(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Marks at a text that ends with a space, whose place no tail finds."""
    cache = TokenOffsets(lambda text: list(map(ord, text)), lambda ids: "".join(map(chr, ids)))
    cache.worth = Worth("block ends", clock)
    monkeypatch.setattr(pin_placement, "_offsets_of", lambda _: cache)

    def render(body: Any) -> str:
        return "".join(each["content"][0]["text"] for each in body["messages"])

    def find(n: int) -> None:
        text = {"type": "text", "text": "word " * n, "cache_control": {"type": "ephemeral"}}
        body = {"messages": [{"role": "user", "content": [text]}]}
        marks = read_marks(ANTHROPIC, body, TtlLimits(60, 3600))
        context = RequestContext("/v1/messages", body, marks=marks)
        ids = array("q", map(ord, render(body)))
        slow = clock.during(n * QUICK_S, render)
        assert pin_placement._find_ends(None, context, ids, slow)  # type: ignore[arg-type]

    return cache, find


@pytest.mark.parametrize("make", [schemas_that_grow, prompts_that_grow])
def test_work_that_is_new_and_grows_turns_nothing_off(
    make: Any, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, work = make(clock, monkeypatch)
    for n in range(1, 2 * LEAST_USES):
        clock.now_s += WINDOW_S / LEAST_USES
        work(n)
    assert not cache.worth.is_off


def test_the_page_of_metrics_says_which_are_off(clock: Clock) -> None:
    extension = HttpExtension(EngineSettings())
    extension.schemas.worth = account = Worth("schemas", clock)
    use(account, clock, SLOW_S)
    set_gauges(extension)
    assert gauge("host_cache_off").labels("schemas")._value.get() == 1
    assert gauge("host_cache_seconds").labels("schemas", "taken")._value.get() == account.took_s
