"""Pins in real engines: they outlast other prompts, end when they should, and hold up nobody.

What is pinned is measured by reading it back. A pinned prefix is read in full after prompts
of several times the memory; where a block ends is computed here, from the model's own template.
Each engine checks its own memory in every step, and ends if any of it is lost.
"""

from __future__ import annotations

import json
import random
import re
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest
import requests
from sgl_ext_cpu.nursery import Nursery

from sgl_ext.pin_mirror import PATH
from sgl_ext.settings.schema import EngineSettings
from sgl_ext.wire.orders import SETTINGS_PATH
from tests.engine.scheduler.test_event_publisher import (
    ONE,
    POOL,
    Engine,
    Watch,
    running_engine,
    text,
    user,
)
from tests.kinds import slow_but_for
from tests.waiting import HANG_S
from tests.waiting import until as until_within

BUDGET = 0.9
CHUNK = 256
SESSION = {"x-sgl-ext-session-id": "session"}
PARTS = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
MESSAGES, CHAT, RESPONSES = "/v1/messages", "/v1/chat/completions", "/v1/responses"


def until(condition: Callable[[], bool]) -> None:
    until_within(condition, 30)


class Kind(NamedTuple):
    """A way to run the engine."""

    flags: tuple[str, ...] = ()
    environ: tuple[tuple[str, str], ...] = ()
    page: int = 1


KINDS = {
    "default": Kind(),
    "two ranks": Kind(("--tp-size", "2"), (("SGLANG_CPU_OMP_THREADS_BIND", "0|1"),)),
    # The platform's default, as on a GPU.
    "pages": Kind(environ=(("SGLEXT_CPU_PAGE_SIZE", "16"),), page=16),
    "python core": Kind(environ=(("SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND", "python"),)),
}
# The first two kinds: pytest runs tests of one kind together by their number.
_TWO_RANKS = pytest.param("two ranks", marks=pytest.mark.slow)
default_and_two_ranks = pytest.mark.parametrize("engine", ["default", _TWO_RANKS], indirect=True)
only_default = pytest.mark.parametrize("engine", ["default"], indirect=True)


class Pinning:
    """One engine, and what is asked of it here."""

    def __init__(self, engine: Engine, log: Path, page: int, template: Any) -> None:
        self.url = engine.url
        self.gate = engine.gate
        self.page = page
        self._engine = engine
        self._log = log
        self._template = template
        self.watch = Watch(engine)

    def send(self, body: dict[str, Any], path: str = MESSAGES, **options: Any) -> requests.Response:
        return requests.post(self.url + path, json=body, **{"timeout": 90, **options})

    def usage(self, body: dict[str, Any], path: str = MESSAGES, **options: Any) -> dict[str, Any]:
        """The usage of a request's answer."""
        answer = self.send(body, path, **options)
        assert answer.ok, answer.text
        usage: dict[str, Any] = answer.json()["usage"]
        return usage

    def read(self, body: dict[str, Any]) -> int:
        """How many of a request's tokens came from the cache."""
        return int(self.usage(body)["cache_read_input_tokens"])

    def pins(self) -> list[dict[str, Any]]:
        pins: list[dict[str, Any]] = requests.get(self.url + PATH, timeout=HANG_S).json()["pins"]
        return pins

    def pinned(self) -> list[int]:
        """The tokens of each pin."""
        return sorted(pin["tokens"] for pin in self.pins())

    def has_pinned(self, number: int, tokens: int = 0) -> list[dict[str, Any]]:
        """The pins, once there are so many, and the load that tells of them: of more `tokens`."""
        until(lambda: len(self.pins()) == number)
        until(lambda: (self.watch.load_now()["pinned_tokens"] > tokens) == (number > 0))
        return self.pins()

    def unpin(self, **named: str) -> requests.Response:
        return requests.delete(self.url + PATH, params=named, timeout=HANG_S)

    def counted(self, name: str) -> float:
        """A counter's value, as the engine spells it; 0 if it was never made."""
        page = requests.get(f"{self.url}/metrics", timeout=HANG_S).text
        values = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
        return sum(float(values[key]) for key in values if key.startswith(name))

    def rendered(self, messages: list[dict[str, Any]], tools: Any = None) -> str:
        """A conversation as the model's template writes it."""
        return str(
            self._template.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=True
            )
        )

    def tokens(self, prompt: str, end: int | None = None) -> int:
        """How many tokens of a prompt end within its first `end` characters."""
        told = self._template(prompt, add_special_tokens=False, return_offsets_mapping=True)
        return sum(stop <= (len(prompt) if end is None else end) for _, stop in told.offset_mapping)

    def whole_pages(self, tokens: int) -> int:
        return tokens - tokens % self.page

    def is_level(self) -> bool:
        """Whether nothing but pins takes memory; an iteration is told of after it."""
        load = self.watch.load_now()
        return load["running"] == 0 and load["used_tokens"] == load["pinned_tokens"]

    def flush(self) -> None:
        requests.post(f"{self.url}/flush_cache", timeout=HANG_S).raise_for_status()

    def assert_sound(self) -> None:
        assert self._engine.server.running()
        said = self._log.read_text().lower()
        assert "leak detected" not in said
        assert "hit an exception" not in said


@pytest.fixture(scope="module", params=slow_but_for(["default", "pages"], KINDS))
def engine(
    request: pytest.FixtureRequest,
    nursery: Nursery,
    tiny_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Pinning]:
    kind = KINDS[request.param]
    with warnings.catch_warnings(action="ignore"):
        transformers = import_module("transformers")
        template = transformers.AutoTokenizer.from_pretrained(tiny_model)
    settings = EngineSettings(pin_budget=BUDGET).to_environment()
    checks = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"}
    log = tmp_path_factory.mktemp("pins") / "engine.log"
    flags = ("--chunked-prefill-size", str(CHUNK), "--max-running-requests", "16")
    flags += ("--reasoning-parser", "qwen3", *kind.flags)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**settings, **checks, **dict(kind.environ)}.items():
            patch.setenv(name, value)
        with running_engine(nursery, tiny_model, log, *flags) as started:
            yield Pinning(started, log, kind.page, template)


@pytest.fixture(autouse=True)
def _sound(engine: Pinning) -> Iterator[None]:
    """Begins with nothing pinned, and ends with an engine that lacks nothing."""
    engine.flush()
    until(lambda: engine.pins() == [])
    engine.usage({**ONE, "messages": [user(5)]})
    yield
    until(engine.is_level)
    engine.assert_sound()


def block(words: int | str, ttl: str | None = None) -> dict[str, Any]:
    """A block of text, marked if a ttl is given; "" is a mark without one."""
    made = {"type": "text", "text": text(words) if isinstance(words, int) else words}
    if ttl is None:
        return made
    return made | {"cache_control": {"type": "ephemeral"} | ({"ttl": ttl} if ttl else {})}


def turn(*blocks: dict[str, Any], role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": list(blocks)}


def asked(system: list[dict[str, Any]], *turns: dict[str, Any]) -> dict[str, Any]:
    return {**ONE, "system": system, "messages": list(turns) or [user(10)]}


def marked(words: int, ttl: str = "1h") -> dict[str, Any]:
    """A request whose system prompt is to be kept."""
    return asked([block(words, ttl)])


def flood(engine: Pinning, tokens: int) -> None:
    """So many tokens of prompts that have nothing in common."""
    with ThreadPoolExecutor(4) as pool:
        bodies = [{**ONE, "messages": [user(400)]} for _ in range(tokens // 500)]
        used = list(pool.map(engine.usage, bodies))
    assert sum(usage["input_tokens"] for usage in used) > 0.9 * tokens


def test_a_marked_prefix_outlasts_a_flood_and_an_unmarked_one_does_not(engine: Pinning) -> None:
    kept, twin = marked(150), asked([block(150)])
    for body in (kept, twin):
        engine.usage(body)
    [pin] = engine.has_pinned(1)
    flood(engine, 4 * POOL)
    kept["messages"], twin["messages"] = [user(12)], [user(12)]
    assert engine.read(kept) == pin["tokens"] > 150
    assert engine.read(twin) < 20
    assert [each["hits"] for each in engine.pins()] == [1]


@default_and_two_ranks
def test_a_smaller_budget_releases_the_least_valuable_pins_on_every_rank_alike(
    engine: Pinning,
) -> None:
    def change(budget: float) -> None:
        version = {"number": time.time_ns(), "values": {"pin_budget": budget}}
        answer = requests.post(engine.url + SETTINGS_PATH, json=version, timeout=HANG_S)
        assert answer.json() == {"applied": True, "why": ""}

    first, second = marked(60), marked(60)
    engine.usage(first)
    engine.usage(second)
    engine.read(first)
    sizes = {pin["prefix"]: pin["tokens"] for pin in engine.has_pinned(2)}
    change((max(sizes.values()) + 1) / POOL)
    (left,) = engine.has_pinned(1)
    assert left["hits"] == 1  # the one that was read
    assert engine.counted('sgl_ext_pins_ended_total{reason="reduced"}') >= 1
    engine.usage(second)
    change(0)
    engine.has_pinned(0)
    change(BUDGET)
    engine.usage(first)
    engine.has_pinned(1)


@default_and_two_ranks
def test_time_ends_a_pin_of_an_idle_engine_and_a_read_renews_it(engine: Pinning) -> None:
    body = marked(60, ttl="600s")
    engine.usage(body)
    left_s = engine.has_pinned(1)[0]["left_s"]
    until(lambda: engine.pins()[0]["left_s"] < left_s - 0.5)
    left_s = engine.pins()[0]["left_s"]
    ends_s = time.monotonic() + left_s  # or somewhat sooner
    del body["system"][0]["cache_control"]
    engine.usage(body)
    until(lambda: engine.pins()[0]["hits"] == 1)
    asked_s = time.monotonic()
    assert asked_s + engine.pins()[0]["left_s"] > ends_s
    expired = 'sgl_ext_pins_ended_total{reason="expired"}'
    before = engine.counted(expired)
    engine.usage(marked(70, ttl="1s"))
    lines = len(engine.watch.lines)
    until(lambda: engine.counted(expired) > before)
    assert [pin["ttl_s"] for pin in engine.has_pinned(1)] == [600.0]
    assert all(line.get("load", {}).get("running", 0) == 0 for line in engine.watch.lines[lines:])


def test_a_request_that_needs_memory_gets_it_from_the_fewest_pins(engine: Pinning) -> None:
    ended = engine.counted("sgl_ext_pins_ended_total{")
    first, *others = [marked(400) for _ in range(6)]
    for body in (first, *others):
        engine.usage(body)
    engine.has_pinned(6, tokens=6 * 490)
    free = POOL - engine.watch.load["pinned_tokens"]
    assert free < 1150
    usage = engine.usage({**ONE, "messages": [user(1100)]}, timeout=HANG_S)
    assert usage["input_tokens"] > free + 100
    assert len(engine.has_pinned(5)) == 5
    assert engine.counted("sgl_ext_pins_ended_total{") == ended + 1
    assert engine.counted('sgl_ext_pins_ended_total{reason="pressure"}') >= 1
    assert engine.read(first) < 20, "it was the least valuable"
    for body in others:
        assert engine.read(body) > 400


def test_a_request_that_would_not_fit_without_pins_either_costs_none(engine: Pinning) -> None:
    for _ in range(2):
        engine.usage(marked(60))
    engine.has_pinned(2, tokens=2 * 60)
    ended = engine.counted("sgl_ext_pins_ended_total{")
    pinned = engine.watch.load["pinned_tokens"]
    sampling = {"max_new_tokens": POOL - pinned - 150, "ignore_eos": True}
    long = {"text": text(6), "rid": "long", "sampling_params": sampling}
    # Its prompt alone would fit; with what it may answer, it does not.
    next_one = {**ONE, "messages": [user(6)], "max_tokens": 150 + pinned}
    with ThreadPoolExecutor(2) as pool:
        with engine.gate.closed():
            pool.submit(engine.send, long, "/generate")
            engine.gate.answer("long")
            at = engine.gate.mark()
            waiting = pool.submit(engine.usage, next_one)
            engine.gate.until(lambda event: event.kind == "arrived", at)
            engine.gate.run_until(lambda step: len(step.waiting) == 1)
            assert len(engine.pins()) == 2
            requests.post(f"{engine.url}/abort_request", json={"rid": "long"}, timeout=HANG_S)
        assert waiting.result(timeout=HANG_S)["output_tokens"] > 0
    assert len(engine.pins()) == 2
    assert engine.counted("sgl_ext_pins_ended_total{") == ended


def test_answers_that_outgrow_the_memory_cost_pins_and_are_not_retracted(engine: Pinning) -> None:
    for _ in range(6):
        engine.usage(marked(440))
    engine.has_pinned(6, tokens=6 * 500)
    pressure = engine.counted('sgl_ext_pins_ended_total{reason="pressure"}')
    # Two that fit as they are estimated, and do not as they come.
    size = int((POOL - engine.watch.load["pinned_tokens"]) * 0.54)
    sampling = {"max_new_tokens": size, "min_new_tokens": size}

    def answer(rid: str) -> int:
        body = {"text": text(6), "rid": rid, "sampling_params": sampling}
        return int(engine.send(body, "/generate").json()["meta_info"]["completion_tokens"])

    with ThreadPoolExecutor(2) as pool:
        with engine.gate.closed():
            answers = [pool.submit(answer, rid) for rid in ("outgrows 1", "outgrows 2")]
            engine.gate.arrived("outgrows 1", "outgrows 2")
        assert [each.result() for each in answers] == [size, size]
    assert engine.counted('sgl_ext_pins_ended_total{reason="pressure"}') > pressure
    assert len(engine.pins()) > 3
    assert engine.counted("sglang:num_retracted_requests_total") == 0


@default_and_two_ranks
def test_a_flush_ends_pins_and_an_idle_engine_that_has_some_misses_no_memory(
    engine: Pinning,
) -> None:
    body = marked(100, ttl="100s")
    engine.usage(body)
    engine.has_pinned(1)
    until(lambda: engine.pins()[0]["left_s"] < 97)
    engine.assert_sound()
    engine.flush()
    engine.has_pinned(0)
    assert engine.read(body) == 0
    engine.has_pinned(1)


@default_and_two_ranks
def test_pins_are_given_up_by_prefix_and_by_session(engine: Pinning) -> None:
    engine.usage(asked([block(50, "1h")], turn(block(50, ""))), headers=SESSION)
    engine.usage(marked(50))
    pins = engine.has_pinned(3)
    assert sorted((pin["session"], pin["ttl_s"]) for pin in pins) == [
        ("", 3600.0),
        ("session", 300.0),
        ("session", 3600.0),
    ]
    assert engine.unpin(prefix=pins[0]["prefix"]).json() == {"deleted": 1}
    assert engine.unpin(prefix=pins[0]["prefix"]).json() == {"deleted": 0}
    assert engine.unpin(session="another").json() == {"deleted": 0}
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: engine.unpin(session="session"), range(4)))
    assert all(answer.ok for answer in answers)
    assert [pin["session"] for pin in engine.pins()] == [""]
    for refused in (engine.unpin(), engine.unpin(prefix="", session="")):
        assert refused.status_code == 400
        assert refused.json()["error"]["type"] == "invalid_request_error"
    assert engine.unpin(prefix=engine.pins()[0]["prefix"]).json() == {"deleted": 1}
    until(lambda: engine.watch.load_now()["pinned_tokens"] == 0)


def test_a_block_of_text_is_pinned_up_to_its_end(engine: Pinning) -> None:
    system, first, second = text(40), text(30), text(20)
    usage = engine.usage(
        asked(
            [block(system, "1h")],
            turn(block(first, "1h"), block(second)),
            turn(block("I see. "), role="assistant"),
            turn(block(second + "\n\n", "")),
        )
    )
    prompt = engine.rendered(
        [
            {"role": "system", "content": system},
            {"role": "user", "content": f"{first} {second}"},
            {"role": "assistant", "content": "I see. "},
            {"role": "user", "content": second + "\n\n"},
        ]
    )
    ends = [prompt.index(system) + len(system), prompt.index(first) + len(first)]
    ends.append(prompt.rindex(second) + len(second))
    tokens = [engine.tokens(prompt, end) for end in ends]
    assert [pin["tokens"] for pin in engine.has_pinned(3)] == list(map(engine.whole_pages, tokens))
    assert usage["input_tokens"] == engine.tokens(prompt) - tokens[-1]
    assert usage["cache_creation"] == {
        "ephemeral_5m_input_tokens": tokens[2] - tokens[1],
        "ephemeral_1h_input_tokens": tokens[1] - usage["cache_read_input_tokens"],
    }


def test_a_part_of_a_chat_message_is_pinned_up_to_its_end(engine: Pinning) -> None:
    system, first, second = text(40), text(30), text(20)
    turns = [
        {"role": "system", "content": system, "cache_control": {"type": "ephemeral"}},
        turn(block(first, "1h"), block(second)),
    ]
    usage = engine.usage({**ONE, "messages": turns}, CHAT)
    prompt = engine.rendered(
        [
            {"role": "system", "content": system},
            {"role": "user", "content": f"{first} {second}"},
        ]
    )
    ends = [prompt.index(part) + len(part) for part in (system, first)]
    tokens = [engine.whole_pages(engine.tokens(prompt, end)) for end in ends]
    assert [(pin["tokens"], pin["ttl_s"]) for pin in engine.has_pinned(2)] == [
        (tokens[0], 300.0),
        (tokens[1], 3600.0),
    ]
    assert usage["prompt_tokens"] == engine.tokens(prompt)


def broken(words: str, kind: str) -> dict[str, Any]:
    return {"type": kind, "text": words, "prompt_cache_breakpoint": {"mode": "explicit"}}


def openai_usage(engine: Pinning, path: str, body: dict[str, Any]) -> tuple[int, int]:
    """The tokens that the answer to a request says were read and written, whole or streamed."""
    answer = engine.send(body, path)
    assert answer.ok, answer.text
    found = re.findall(r'tokens_details": ?(\{"cached[^}]+})', answer.text)
    details = json.loads(found[-1])
    return details["cached_tokens"], details["cache_write_tokens"]


@only_default
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_a_breakpoint_of_openai_is_pinned_up_to_its_end(
    engine: Pinning, path: str, stream: bool
) -> None:
    field, kind = ("messages", "text") if path == CHAT else ("input", "input_text")
    system, first, second = text(40), text(30), text(20)
    asked = {"model": "tiny", "stream": stream, "prompt_cache_options": {"mode": "explicit"}}
    asked |= {"max_tokens": 1} if path == CHAT else {"max_output_tokens": 1, "store": False}
    if path == CHAT and stream:
        asked["stream_options"] = {"include_usage": True}
    turns = [
        {"role": "system", "content": [broken(system, kind)]},
        turn(broken(first, kind), {"type": kind, "text": second}),
    ]
    read, written = openai_usage(engine, path, {**asked, field: turns})
    rendered = [
        {"role": "system", "content": system},
        {"role": "user", "content": f"{first} {second}"},
    ]
    prompt = engine.rendered(rendered)
    ends = [prompt.index(part) + len(part) for part in (system, first)]
    tokens = [engine.whole_pages(engine.tokens(prompt, end)) for end in ends]
    pins = [(pin["tokens"], pin["ttl_s"]) for pin in engine.has_pinned(2)]
    assert pins == [(each, 1800.0) for each in tokens]
    assert read + written == tokens[1]
    # The next turn marks its own end, and reads what the last one marked.
    del turns[1]["content"][0]["prompt_cache_breakpoint"]
    turns.append(turn(broken(text(10), kind)))
    read, written = openai_usage(engine, path, {**asked, field: turns})
    assert read >= tokens[1]
    assert written > 10
    assert len(engine.has_pinned(3)) == 3


@only_default
def test_whoever_states_a_longer_ttl_than_there_is_gets_told(engine: Pinning) -> None:
    usage = engine.usage(marked(30, "9h"))
    assert usage["cache_creation"]["granted_ttl_s"] == 3600
    body = {**ONE, "messages": [user(30)], "prompt_cache_options": {"ttl": "9h"}}
    assert engine.usage(body, CHAT)["prompt_tokens_details"]["granted_ttl_s"] == 3600
    assert {pin["ttl_s"] for pin in engine.has_pinned(2)} == {3600.0}
    assert engine.counted(f'sgl_ext_cache_ttls_clamped_total{{path="{CHAT}"}}') == 1


@only_default
@pytest.mark.parametrize("path", [MESSAGES, CHAT, "/generate"])
def test_kv_hints_pin_a_prompt_and_let_it_go(engine: Pinning, path: str) -> None:
    def send(*actions: dict[str, Any], session: dict[str, str] = SESSION) -> None:
        hints = {"protocol_version": "0.1", "message_id": "m", "actions": list(actions)}
        assert engine.send({**prompt, "kv_hints": hints}, path, headers=session).ok

    def action(kind: str, **payload: Any) -> dict[str, Any]:
        named = {"action_id": "a", "action_type": kind, "action_version": "0.1"}
        return {**named, "payload": payload}

    prompt = {**ONE, "messages": [user(30)]}
    if path == "/generate":
        prompt = {"text": text(30), "sampling_params": {"max_new_tokens": 1}}
    others = engine.counted('sgl_ext_kv_hints_total{type="other"}')
    send(action("kv.retain", ttl="10m"), action("kv.fetch", keys=[1]))
    (pin,) = engine.has_pinned(1)
    assert (pin["ttl_s"], pin["session"]) == (600.0, "session")
    assert engine.counted('sgl_ext_kv_hints_total{type="other"}') == others + 1
    send(action("kv.demote"), session={})
    assert len(engine.pins()) == 1  # another session's
    send(action("kv.demote"))
    engine.has_pinned(0)


TOOLS = [
    {"name": name, "description": text(20), "input_schema": {"type": "object", "properties": {}}}
    for name in ("grep", "read", "write")
]


@only_default
@pytest.mark.parametrize("path", [MESSAGES, CHAT])
def test_a_tool_is_pinned_up_to_its_end(engine: Pinning, path: str) -> None:
    system, question = text(20), text(10)
    if path == MESSAGES:
        body = asked([block(system)], turn(block(question)))
        tools: list[dict[str, Any]] = [dict(tool) for tool in TOOLS]
    else:
        turns = [{"role": "system", "content": system}, {"role": "user", "content": question}]
        body = {**ONE, "messages": turns}
        tools = [{"type": "function", "function": _function(tool)} for tool in TOOLS]
    for tool in tools[1:]:
        tool["cache_control"] = {"type": "ephemeral"}
    usage = engine.usage({**body, "tools": tools}, path)
    total = usage.get("prompt_tokens") or sum(usage[part] for part in PARTS)
    pins = engine.has_pinned(2)
    # The template writes each tool on a line.
    prompt = engine.rendered(
        [{"role": "system", "content": system}, {"role": "user", "content": question}],
        [{"type": "function", "function": _function(tool)} for tool in TOOLS],
    )
    assert prompt.index(system) < prompt.index(TOOLS[0]["description"])
    # SGLang spells a tool with fields that it did not have, all behind its description.
    framing = (total - engine.tokens(prompt)) / len(TOOLS)
    for pin, k in zip(pins, (1, 2), strict=True):
        line = prompt.index("\n", prompt.index(TOOLS[k]["description"]))
        expected = engine.tokens(prompt, line) + framing * (k + 1)
        assert expected <= pin["tokens"] <= expected + 1


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    named = {name: tool[name] for name in ("name", "description")}
    return named | {"parameters": tool["input_schema"]}


@only_default
def test_the_mark_of_a_system_prompt_covers_the_tools_after_it(engine: Pinning) -> None:
    body = {**marked(20), "tools": TOOLS}
    engine.usage(body)
    [pin] = engine.has_pinned(1)
    body["messages"] = [user(10)]
    assert pin["tokens"] <= engine.read(body) <= pin["tokens"] + 100
    body["tools"] = TOOLS[:2]
    assert 0 < engine.read(body) < pin["tokens"]


@only_default
@pytest.mark.parametrize("stream", [False, True])
def test_usage_tells_what_was_read_written_and_neither(engine: Pinning, stream: bool) -> None:
    body = asked([block(40, "1h")], turn(block(30, "5m")), turn(block("Yes."), role="assistant"))
    body["messages"] += [user(10)]
    seen = []
    for _ in range(2):
        answer = engine.send({**body, "stream": stream})
        assert answer.ok
        if stream:
            first = next(line for line in answer.text.splitlines() if line.startswith("data:"))
            seen.append(json.loads(first.removeprefix("data:"))["message"]["usage"])
        else:
            seen.append(answer.json()["usage"])
    prompt = engine.rendered(
        [
            {"role": "system", "content": body["system"][0]["text"]},
            {"role": "user", "content": body["messages"][0]["content"][0]["text"]},
            {"role": "assistant", "content": "Yes."},
            {"role": "user", "content": body["messages"][2]["content"]},
        ]
    )
    for usage in seen:
        assert sum(usage[part] for part in PARTS) == engine.tokens(prompt)
        split = usage["cache_creation"]
        assert sum(split.values()) == usage["cache_creation_input_tokens"]
    assert seen[0]["cache_creation"]["ephemeral_1h_input_tokens"] > 40
    assert seen[0]["cache_creation"]["ephemeral_5m_input_tokens"] > 30
    assert seen[1]["cache_creation_input_tokens"] == 0
    assert seen[1]["input_tokens"] == 1


@only_default
def test_the_usage_of_openai_has_the_fields_it_had(engine: Pinning) -> None:
    plain = {**ONE, "messages": [turn(block(40)), turn(block(10))]}
    kept = {**ONE, "messages": [turn(block(40, "1h")), turn(block(10))]}
    assert engine.usage(plain, CHAT).keys() == engine.usage(kept, CHAT).keys()
    assert engine.usage(kept, CHAT)["prompt_tokens_details"]["cached_tokens"] > 40
    engine.has_pinned(1)


_THOUGHT = {"type": "thinking", "thinking": "Hm.", "signature": "s"}
REFUSED: dict[str, dict[str, Any]] = {
    "a ttl below 0": marked(5, "-1"),
    "a ttl that is none": marked(5, "forever"),
    "a fifth mark": asked([block(5, "")], turn(*(block(5, "") for _ in range(4)))),
    "a mark on a thought": asked(
        [], user(5), turn(_THOUGHT | {"cache_control": {"type": "ephemeral"}}, role="assistant")
    ),
    "1h behind 5m": asked([block(5, "5m")], turn(block(5, "1h"))),
    "another type": asked([block(5) | {"cache_control": {"type": "eternal"}}]),
}


@only_default
@pytest.mark.parametrize("what", REFUSED)
def test_a_malformed_mark_is_rejected_as_anthropic_does(engine: Pinning, what: str) -> None:
    refused = engine.send(REFUSED[what])
    assert refused.status_code == 400
    told = refused.json()
    assert told["type"] == "error"
    assert told["error"]["type"] == "invalid_request_error"
    assert "cache_control" in told["error"]["message"]
    engine.usage(marked(5))
    engine.has_pinned(1)


@only_default
def test_a_prefix_beyond_the_budget_is_answered_and_not_pinned(engine: Pinning) -> None:
    refused = engine.counted("sgl_ext_pins_rejected_total{")
    words = 1000 * 0.95 * POOL / engine.tokens(text(1000))
    usage = engine.usage(marked(int(words)))
    assert BUDGET * POOL < usage["cache_creation_input_tokens"] < POOL
    assert engine.counted("sgl_ext_pins_rejected_total{") == refused + 1
    assert engine.pins() == []


@only_default
def test_a_request_that_is_aborted_before_it_is_computed_pins_nothing(engine: Pinning) -> None:
    # It reserves nearly all memory, so the marked request waits however fast the machine is.
    sampling = {"max_new_tokens": POOL - 150, "ignore_eos": True}
    long = {"text": text(6), "rid": "long before it", "sampling_params": sampling}
    with ThreadPoolExecutor(2) as pool:
        with engine.gate.closed():
            pool.submit(engine.send, long, "/generate")
            engine.gate.answer("long before it")
            body = asked([block(150, "1h")], turn(block(2400, "1h")))
            waiting = pool.submit(engine.send, body)
            engine.gate.run_until(lambda step: len(step.waiting) == 1)
            requests.post(f"{engine.url}/abort_request", json={"abort_all": True}, timeout=HANG_S)
        assert waiting.result(timeout=HANG_S).status_code == 500, "no half answer looks complete"
    until(engine.is_level)
    assert engine.pins() == []


@only_default
def test_clients_that_disconnect_leave_no_memory_in_use(engine: Pinning) -> None:
    for chunks in range(3):
        body = asked([block(150, "1h")], turn(block(2400, "1h")))
        sent = json.dumps(body).encode()
        client = HTTPConnection(urlsplit(engine.url).netloc, timeout=HANG_S)
        with engine.gate.closed():
            at = engine.gate.mark()
            client.request("POST", MESSAGES, sent, {"content-type": "application/json"})
            engine.gate.until(lambda event: event.kind == "arrived", at)
            for _ in range(chunks):
                (step,) = engine.gate.step()
                assert step.is_prefill, "its prompt is not computed yet"
            client.close()
        engine.gate.until(lambda event: event.kind == "left", at)
    until(engine.is_level)
    engine.usage(marked(5))


@only_default
def test_many_pins_stay_within_the_budget_and_leave_nothing(engine: Pinning) -> None:
    lines = len(engine.watch.lines)
    with ThreadPoolExecutor(8) as pool:
        bodies = [marked(random.Random(n).randrange(10, 40), "100s") for n in range(300)]
        list(pool.map(lambda body: engine.usage(body, headers=SESSION), bodies))
    until(lambda: len(engine.pins()) > 50)
    loads = [line["load"] for line in engine.watch.lines[lines:] if "load" in line]
    assert POOL / 2 < max(load["pinned_tokens"] for load in loads) <= BUDGET * POOL
    until(lambda: engine.counted("sgl_ext_pins_granted_total") >= 300)
    until(engine.is_level)
    deleted = engine.unpin(session="session").json()["deleted"]
    assert deleted > 50
    assert engine.pins() == []
    until(lambda: engine.watch.load_now()["used_tokens"] == 0)
