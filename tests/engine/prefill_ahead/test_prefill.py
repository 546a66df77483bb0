"""Prefill ahead in a real engine: the next request's prefix is cached, and no request is delayed.

What was prefilled is measured by asking for it. The engine has little memory and small slices,
and its template drops what an assistant thought before an earlier user's turn: so the next turn
of a person is not what the cache has, unless it was prefilled.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import requests
from sgl_ext_cpu.nursery import Nursery

from sgl_ext.engine.prefill_ahead.service import MOST_WAITING
from sgl_ext.protocols.routes import PREFILL
from sgl_ext.settings.schema import EngineSettings
from tests.engine.scheduler.test_event_publisher import (
    ONE,
    Engine,
    Watch,
    chain_of,
    running_engine,
    text,
    user,
)
from tests.kinds import slow_but_for
from tests.waiting import HANG_S
from tests.waiting import until as until_within

SLICE = 256
SLACK = 24  # what pages, a turn's header, and the last token cost
MESSAGES, CHAT, RESPONSES = "/v1/messages", "/v1/chat/completions", "/v1/responses"
ASKED = {"nvext": {"agent_hints": {"speculative_prefill": True}}}
_names = count(1)
TEMPLATE = """
{%- set ns = namespace(last=0) %}
{%- for m in messages if m.role == "user" %}{% set ns.last = messages.index(m) %}{% endfor %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if loop.index0 > ns.last and m.reasoning_content %}{{ m.reasoning_content }}
{% endif %}{{ m.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def until(condition: Callable[[], bool]) -> None:
    until_within(condition)


class Serving:
    """One engine, and the requests that these tests send."""

    def __init__(self, engine: Engine, log: Path) -> None:
        self.url = engine.url
        self.watch = Watch(engine)
        self.warmed: list[tuple[int, int]] = []
        self._engine = engine
        self._log = log
        self._is_busy = False

    def post(self, path: str, body: Any, **options: Any) -> requests.Response:
        """The answer; a busy engine takes steps until it is there."""
        send = partial(requests.post, self.url + path, json=body, **{"timeout": 120, **options})
        if not self._is_busy:
            return send()
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(send)
            while not answer.done():
                self._engine.gate.step()
            return answer.result()

    def prefill(self, body: Any, **options: Any) -> dict[str, Any]:
        answer = self.post(PREFILL, body, **options)
        assert answer.ok, answer.text
        result: dict[str, Any] = answer.json()
        return result

    def holds(self, path: str, body: Any) -> bool:
        """Whether the engine's events say that all of a prompt is in its cache."""
        return set(chain_of(path, body)) <= self.watch.held.keys()

    def usage(self, path: str, body: Any) -> tuple[int, int]:
        """A request's tokens, and how many of them were cached."""
        answer = self.post(path, body)
        assert answer.ok, answer.text
        usage = answer.json()["usage"]
        if path == MESSAGES:
            cached = usage["cache_read_input_tokens"]
            return usage["input_tokens"] + usage["cache_creation_input_tokens"] + cached, cached
        details = "prompt_tokens" if path == CHAT else "input_tokens"
        cached = (usage[f"{details}_details"] or {"cached_tokens": 0})["cached_tokens"]
        return usage[details], cached

    def counted(self, name: str, **labels: str) -> float:
        """One of our counters, over all series that have these labels."""
        page = requests.get(f"{self.url}/metrics", timeout=HANG_S).text
        lines = [one for one in page.splitlines() if one.startswith(f"sgl_ext_{name}_total")]
        parts = [f'{key}="{value}"' for key, value in labels.items()]
        return sum(float(o.split()[-1]) for o in lines if all(part in o for part in parts))

    @contextmanager
    def busy(self, *, goes_on: bool = False) -> Iterator[None]:
        """Inside the block, a long request runs. So that it lasts, it goes on only while an answer
        is awaited; with `goes_on` all the time."""
        name = f"busy {next(_names)}"
        # What it may answer is kept free for it: the tests' other requests fit beside that.
        tokens = 3000 if goes_on else 1500
        sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
        body = {"text": text(5), "rid": name, "sampling_params": sampling}
        with ThreadPoolExecutor(1) as pool, self._engine.gate.closed():
            pool.submit(self.post, "/generate", body)
            self._engine.gate.answer(name)
            if goes_on:
                self._engine.gate.open()
            self._is_busy = not goes_on
            try:
                yield
            finally:
                self._is_busy = False
                self.post("/abort_request", {"rid": name})
                self._engine.gate.open()

    def is_level(self) -> bool:
        load = self.watch.load_now()
        return load["running"] == 0 and load["used_tokens"] == load["pinned_tokens"]

    def flush(self) -> None:
        requests.delete(f"{self.url}/v1/pins", params={"session": "session"}, timeout=HANG_S)
        requests.post(f"{self.url}/flush_cache", timeout=HANG_S).raise_for_status()

    def assert_sound(self) -> None:
        assert self._engine.server.running()
        said = self._log.read_text().lower()
        assert "leak detected" not in said
        assert "hit an exception" not in said
        assert "was not prefilled ahead" not in said


WARMED = [{**ONE, "system": text(500), "messages": [user(5)]} for _ in range(2)]
RANKS = {"one rank": (), "two ranks": ("--tp-size", "2")}


@pytest.fixture(scope="module", params=slow_but_for(["one rank"], RANKS))
def started(
    request: pytest.FixtureRequest,
    nursery: Nursery,
    tiny_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("prefill")
    template = folder / "template.jinja"
    template.write_text(TEMPLATE)
    warm = folder / "warm.jsonl"
    warm.write_text("\n".join(json.dumps(body) for body in WARMED))
    settings = EngineSettings(prefill_ahead_slice_tokens=SLICE, warmup_requests=str(warm))
    with pytest.MonkeyPatch.context() as patch:
        checks = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"}
        checks |= {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"} if RANKS[request.param] else {}
        for name, value in {**settings.to_environment(), **checks}.items():
            patch.setenv(name, value)
        log = folder / "engine.log"
        flags = ("--chunked-prefill-size", "512", "--chat-template", str(template))
        flags += RANKS[request.param]
        with running_engine(nursery, tiny_model, log, *flags) as engine:
            serving = Serving(engine, log)
            until(lambda: all(serving.holds(MESSAGES, body) for body in WARMED))
            until(serving.is_level)
            serving.warmed = [serving.usage(MESSAGES, body) for body in WARMED]
            yield serving


@pytest.fixture
def engine(started: Serving) -> Iterator[Serving]:
    """Begins with an empty cache, and ends with an engine that leaks nothing."""
    started.flush()
    started.post("/generate", {"text": text(5), "sampling_params": {"max_new_tokens": 1}})
    until(started.is_level)
    yield started
    until(started.is_level)
    started.assert_sound()


def test_an_engine_begins_with_its_warmup_requests(engine: Serving) -> None:
    assert len(engine.warmed) == len(WARMED)
    for tokens, cached in engine.warmed:
        assert cached >= tokens - SLACK


BODIES: dict[str, Callable[[], dict[str, Any]]] = {
    MESSAGES: lambda: {**ONE, "system": text(20), "messages": [user(600)]},
    CHAT: lambda: {**ONE, "messages": [user(600)]},
    RESPONSES: lambda: {"model": "tiny", "max_output_tokens": 3, "input": text(600)},
}


@pytest.mark.parametrize("path", BODIES)
def test_a_prompt_is_in_the_cache_before_its_request_comes(engine: Serving, path: str) -> None:
    body = BODIES[path]()
    answer = engine.prefill(body)
    assert answer["complete"], answer
    assert answer["cached_tokens"] < SLACK
    assert answer["prefilled_tokens"] >= answer["prompt_tokens"] - answer["cached_tokens"] - SLACK
    assert answer["segments"] > 0
    tokens, cached = engine.usage(path, body)
    assert answer["prompt_tokens"] <= tokens
    assert cached >= tokens - SLACK


def test_cached_tokens_are_not_computed_again(engine: Serving) -> None:
    body = BODIES[MESSAGES]()
    engine.prefill(body)
    before = engine.counted("prefilled_ahead_tokens")
    answer = engine.prefill(body)
    assert answer["complete"]
    assert answer["prefilled_tokens"] == 0
    assert answer["cached_tokens"] >= answer["prompt_tokens"] - SLACK
    assert engine.counted("prefilled_ahead_tokens") == before


def test_results_of_tools_are_prefilled_as_they_appear(engine: Serving) -> None:
    calls = [{"type": "tool_use", "id": name, "name": "read", "input": {}} for name in "ab"]
    results = [{"type": "tool_result", "tool_use_id": name, "content": text(300)} for name in "ab"]
    messages = [user(300), {"role": "assistant", "content": calls}]
    first = engine.prefill({**ONE, "messages": messages})
    assert first["complete"]
    some = [*messages, {"role": "user", "content": results[:1]}]
    second = engine.prefill({**ONE, "messages": some})
    assert second["cached_tokens"] >= first["prompt_tokens"] - SLACK
    assert second["prefilled_tokens"] > 250
    body = {**ONE, "messages": [*messages, {"role": "user", "content": results}]}
    engine.prefill(body)
    tokens, cached = engine.usage(MESSAGES, body)
    assert cached >= tokens - SLACK


def test_a_mark_pins_the_prefilled_prompt(engine: Serving) -> None:
    marked = {"type": "text", "text": text(400), "cache_control": {"type": "ephemeral"}}
    body = {**ONE, "messages": [{"role": "user", "content": [marked]}]}
    for _ in range(2):  # the second time nothing is computed
        answer = engine.prefill(body, headers={"x-sgl-ext-session-id": "session"})
        assert answer["complete"]
        until(
            lambda: len(requests.get(f"{engine.url}/v1/pins", timeout=HANG_S).json()["pins"]) == 1
        )
        until(lambda: engine.watch.load_now()["pinned_tokens"] > 380)
    engine.flush()


def test_a_client_need_not_wait(engine: Serving) -> None:
    body = BODIES[CHAT]()
    before = engine.counted("prefilled_ahead_tokens")
    answer = engine.post(PREFILL, body, params={"wait": "false"})
    assert (answer.status_code, answer.json()) == (202, {"queued": True})
    until(lambda: engine.counted("prefilled_ahead_tokens") > before + 500)
    until(lambda: engine.holds(CHAT, body))  # the last slice sends the hints
    until(engine.is_level)
    tokens, cached = engine.usage(CHAT, body)
    assert cached >= tokens - SLACK


def test_nothing_is_prefilled_while_anything_runs(engine: Serving) -> None:
    body = BODIES[MESSAGES]()
    before = engine.counted("prefilled_ahead_tokens")
    with engine.busy():
        assert engine.post(PREFILL, body, params={"wait": "false"}).status_code == 202
        engine.usage(MESSAGES, BODIES[MESSAGES]())  # real work beside it is done
        assert engine.counted("prefilled_ahead_tokens") == before
    until(lambda: engine.counted("prefilled_ahead_tokens") > before + 500)


def test_prefill_ahead_evicts_nothing(engine: Serving) -> None:
    bodies = [{**ONE, "messages": [user(900)]} for _ in range(3)]
    for body in bodies:
        engine.usage(MESSAGES, body)
    until(engine.is_level)
    answer = engine.prefill({**ONE, "messages": [user(1500)]})
    assert (answer["complete"], answer["why"]) == (False, "memory")
    for body in bodies:
        tokens, cached = engine.usage(MESSAGES, body)
        assert cached >= tokens - SLACK


def turns(thought: str) -> list[dict[str, Any]]:
    """A conversation up to the result of a tool, after which the user speaks next."""
    return [
        user(50),
        {"role": "assistant", "content": "I look.", "reasoning_content": thought},
        {"role": "tool", "tool_call_id": "a", "content": text(700)},
    ]


def ask(engine: Serving, messages: list[dict[str, Any]], session: str, **fields: Any) -> Any:
    body = {"model": "tiny", "max_tokens": 32, "messages": messages, **fields}
    answer = engine.post(CHAT, body, headers={"x-sgl-ext-session-id": session})
    assert answer.ok, answer.text
    return answer.json()


def cached_of(answer: Any) -> tuple[int, int]:
    usage = answer["usage"]
    return usage["prompt_tokens"], (usage["prompt_tokens_details"] or {"cached_tokens": 0})[
        "cached_tokens"
    ]


def test_a_request_for_a_summary_keeps_the_thinking_of_its_tool_loop(engine: Serving) -> None:
    session, messages = f"session {next(_names)}", turns(text(300))
    before, _ = cached_of(ask(engine, messages, session))
    sum_up = user(0) | {"content": "Do not call any tools. Write a summary of the conversation."}
    tokens, cached = cached_of(ask(engine, [*messages, sum_up], session))
    assert cached >= before - SLACK
    assert tokens > before
    other = sum_up | {"content": "Go on, please, and say what you know of the conversation."}
    _, cached = cached_of(ask(engine, [*messages, other], session))
    assert cached < before - 300


@pytest.mark.parametrize(("fields", "is_warm"), [(ASKED, True), ({}, False)])
def test_a_next_turn_is_warm_if_the_request_hints_so(
    engine: Serving, fields: dict[str, Any], is_warm: bool
) -> None:
    session = f"session {next(_names)}"
    messages = turns(text(30))
    before = engine.counted("prefilled_ahead_tokens")
    answer = ask(engine, messages, session, regex="[a-z]{6,9}", **fields)
    content = answer["choices"][0]["message"]["content"] or ""
    if is_warm:
        until(lambda: engine.counted("prefilled_ahead_tokens") > before + 600)
        until(engine.is_level)
    guessed = engine.counted("next_turns_guessed", result="right")
    following = [*messages, {"role": "assistant", "content": content}, user(20)]
    tokens, cached = cached_of(ask(engine, following, session))
    if is_warm:
        assert cached >= tokens - 20 * 8 - SLACK
        assert engine.counted("next_turns_guessed", result="right") == guessed + 1
    else:
        assert cached < 300


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "not JSON": ({"data": "{", "headers": {"content-type": "application/json"}}, "JSON"),
    "no protocol": ({"json": {"model": "tiny"}}, "protocol"),
    "wait": ({"json": {"messages": []}, "params": {"wait": "maybe"}}, "wait"),
    "the protocol's own": ({"json": {"model": "tiny", "input": 5}}, "input"),
    "too long": (
        {"json": {**ONE, "messages": [{"role": "user", "content": "a b " * 9000}]}},
        "tokens",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_malformed_request_is_rejected(engine: Serving, case: str) -> None:
    options, word = REFUSED[case]
    answer = requests.post(engine.url + PREFILL, timeout=HANG_S, **options)
    assert answer.status_code == 400, answer.text
    assert word in answer.text


def test_a_session_can_delete_its_prefills(engine: Serving) -> None:
    headers = {"x-sgl-ext-session-id": "given up"}
    with engine.busy():
        engine.post(PREFILL, BODIES[MESSAGES](), params={"wait": "false"}, headers=headers)
    deleted = requests.delete(engine.url + PREFILL, params={"session": "given up"}, timeout=HANG_S)
    assert deleted.ok


def test_too_many_prefills_are_rejected_and_delay_no_request(engine: Serving) -> None:
    body = BODIES[MESSAGES]()
    assert engine.prefill(BODIES[MESSAGES]())["complete"], "none of an earlier test still waits"
    with engine.busy(), ThreadPoolExecutor(8) as pool:

        def send(_: int) -> requests.Response:
            return engine.post(PREFILL, body, params={"wait": "false"})

        answers = list(pool.map(send, range(3 * MOST_WAITING)))
        engine.usage(MESSAGES, BODIES[MESSAGES]())
    refused = [answer for answer in answers if answer.status_code == 429]
    assert len(refused) == 3 * MOST_WAITING - MOST_WAITING // 2, "the rest is for other tenants"
    assert {answer.status_code for answer in answers} == {202, 429}
    assert all(int(answer.headers["retry-after"]) > 0 for answer in refused)
    # Each that ends makes room for one: the first that finds room is taken, and computed.
    until(lambda: (answer := engine.post(PREFILL, body)).ok and answer.json()["complete"])
