"""Priority in real engines: who is served first, whose memory is taken, and what it costs them.

Nothing here is timed: it is the order of answers that counts, who still runs when another one
is answered, what the engine counts, and that answers are the same tokens as without any haste.
One engine ages nothing; in the other, of two ranks, a request rises by a step every two seconds.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import requests
from prometheus_client.parser import text_string_to_metric_families
from sgl_ext_cpu.gate import Event, Gate
from sgl_ext_cpu.nursery import Nursery

from sgl_ext.settings.schema import EngineSettings, Tenant
from tests.engine.scheduler.test_event_publisher import (
    ONE,
    Engine,
    Watch,
    running_engine,
    text,
    user,
)
from tests.sglang_versions import needs_newest
from tests.waiting import HANG_S
from tests.waiting import until as until_within

CEILING = 50
THRESHOLD = 10
AGING_S = 2.0
SLOTS, SLOTS_OF_TWO_RANKS = 2, 5
HEADER = "x-sgl-ext-priority"
TENANT = "x-tenant-id"
_names = count(1)


def until(condition: Callable[[], bool]) -> None:
    until_within(condition)


class Serving:
    """One engine, and what is asked of it here."""

    def __init__(self, engine: Engine, log: Path) -> None:
        self.url = engine.url
        self.watch = Watch(engine)
        self.gate = engine.gate
        self._engine = engine
        self._log = log

    def post(
        self, path: str, body: Any, headers: dict[str, str] | None = None
    ) -> requests.Response:
        return requests.post(self.url + path, json=body, headers=headers, timeout=HANG_S)

    def generate(
        self, priority: int, prompt: str, tokens: int, name: str = "", *, tenant: str = ""
    ) -> list[int]:
        """The token ids of an answer of so many. name: the request's id; "": SGLang makes one."""
        body = {**raw(prompt, tokens), **({"rid": name} if name else {})}
        headers = {HEADER: str(priority), **({TENANT: tenant} if tenant else {})}
        answer = self.post("/generate", body, headers)
        assert answer.ok, answer.text
        ids: list[int] = answer.json()["output_ids"]
        return ids

    def counted(self, name: str, **labels: str) -> float:
        """A counter's value, over all series that have these labels."""
        page = requests.get(f"{self.url}/metrics", timeout=HANG_S).text
        # Parsing all of SGLang's histograms takes longer than what is counted.
        series = "".join(one for one in page.splitlines(True) if one.startswith(name))
        return sum(
            sample.value
            for family in text_string_to_metric_families(series)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def is_level(self) -> bool:
        """Whether nothing takes memory, runs or waits; an iteration is told of after it."""
        load = self.watch.load_now()
        return load["running"] == load["queued"] == load["used_tokens"] == 0

    def flush(self) -> None:
        requests.post(f"{self.url}/flush_cache", timeout=HANG_S).raise_for_status()

    @contextmanager
    def held(self, number: int, priority: int, tokens: int = 1500) -> Iterator[list[str]]:
        """So many requests that answer at length and have begun to, by name, before a closed gate.
        They end with this, and the gate is open then."""
        names = [f"held {next(_names)}" for _ in range(number)]
        with self.gate.closed(), ThreadPoolExecutor(number) as pool:
            for name in names:
                body = {**raw(text(5), tokens), "rid": name}
                pool.submit(self.post, "/generate", body, {HEADER: str(priority)})
            self.gate.arrived(*names)
            self.gate.answer(*names)
            try:
                yield names
            finally:
                for name in names:
                    self.abort(name)
                self.gate.open()

    def abort(self, name: str) -> None:
        assert self.post("/abort_request", {"rid": name}).ok

    def assert_sound(self) -> None:
        assert self._engine.server.running()
        said = self._log.read_text().lower()
        assert "leak detected" not in said
        assert "hit an exception" not in said


class Answers:
    """Requests on their way, and the order in which the scheduler has answered them."""

    def __init__(self, serving: Serving, workers: int = 16) -> None:
        self._names: dict[str, str] = {}
        self._serving = serving
        self._pool = ThreadPoolExecutor(workers)

    @property
    def order(self) -> list[str]:
        left = [event.rid for event in self._serving.gate.events if event.kind == "left"]
        return [self._names[rid] for rid in left if rid in self._names]

    def __enter__(self) -> Answers:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    def arrive(
        self, name: str, priority: int, prompt: str, tokens: int = 16, tenant: str = ""
    ) -> tuple[str, Future[list[int]]]:
        """Sends it, and returns its id once the scheduler has it."""
        asked = f"{name} {next(_names)}"
        rid = f"~{len(tenant)}:{tenant}:{asked}" if tenant else asked
        self._names[rid] = name
        answer = self._pool.submit(
            self._serving.generate, priority, prompt, tokens, asked, tenant=tenant
        )
        self._serving.gate.arrived(rid)
        return rid, answer


class Stream:
    """Clients that each send one request after another until told to stop."""

    def __init__(self, clients: int, send: Callable[[], object]) -> None:
        self._send = send
        self._ends = threading.Event()
        self._pool = ThreadPoolExecutor(clients)
        self._all = [self._pool.submit(self._run) for _ in range(clients)]

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._pool.shutdown()
        for one in self._all:
            one.result()

    def _run(self) -> None:
        while not self._ends.is_set():
            self._send()


def is_overtaken(gate: Gate, rid: str) -> bool:
    """Whether one that arrived after a request was answered before it."""
    events = gate.events.copy()
    order = [(event.kind, event.rid) for event in events]
    between = order[order.index(("arrived", rid)) : order.index(("left", rid))]
    return any(("arrived", other) in between for kind, other in between if kind == "left")


def raw(prompt: str, tokens: int) -> dict[str, Any]:
    sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return {"text": prompt, "sampling_params": sampling}


@contextmanager
def serving(
    nursery: Nursery,
    model: Path,
    folder: Path,
    settings: EngineSettings,
    *flags: str,
    **environ: str,
) -> Iterator[Serving]:
    checks = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**settings.to_environment(), **checks, **environ}.items():
            patch.setenv(name, value)
        log = folder / "engine.log"
        flags = ("--chunked-prefill-size", "512", *flags)
        with running_engine(nursery, model, log, *flags) as started:
            yield Serving(started, log)


@pytest.fixture(scope="module")
def one_rank(
    nursery: Nursery, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Serving]:
    """Two slots, and nothing ages while a test runs."""
    settings = EngineSettings(
        max_priority=CEILING,
        tenants=(Tenant("people", CEILING + 20), Tenant("batch", -5), Tenant("three", 0, 3.0)),
        aging_s=3600.0,
        preemption_threshold=THRESHOLD,
    )
    flags = ("--max-running-requests", str(SLOTS))
    folder = tmp_path_factory.mktemp("one")
    with serving(nursery, tiny_model, folder, settings, *flags) as started:
        yield started


@pytest.fixture(scope="module")
def two_ranks(
    nursery: Nursery, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Serving]:
    """More slots than memory, and a request rises while it waits."""
    settings = EngineSettings(aging_s=AGING_S, preemption_threshold=THRESHOLD)
    flags = ("--max-running-requests", str(SLOTS_OF_TWO_RANKS), "--tp-size", "2")
    binding = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    folder = tmp_path_factory.mktemp("two")
    with serving(nursery, tiny_model, folder, settings, *flags, **binding) as started:
        yield started


@pytest.fixture
def slots(one_rank: Serving) -> Iterator[Serving]:
    yield from sound(one_rank)


@pytest.fixture
def memory(two_ranks: Serving) -> Iterator[Serving]:
    yield from sound(two_ranks)


def sound(serving: Serving) -> Iterator[Serving]:
    """Begins with an empty cache, and ends with an engine that lacks nothing."""
    serving.flush()
    serving.generate(0, text(5), 1)
    until(serving.is_level)
    yield serving
    until(serving.is_level)
    serving.assert_sound()


def test_the_more_important_is_served_first_though_it_came_last(slots: Serving) -> None:
    # No gap is as wide as the threshold, so they wait for a slot.
    with Answers(slots) as answers, slots.held(SLOTS, priority=THRESHOLD // 2) as held:
        for priority in (0, 5, 10):
            answers.arrive(str(priority), priority, text(20))
        assert answers.order == []
        slots.abort(held[0])
        slots.gate.open()
        until(lambda: len(answers.order) == 3)
    assert answers.order == ["10", "5", "0"]


def test_of_equals_the_one_whose_prompt_is_cached_is_served_first(slots: Serving) -> None:
    cached, other = text(400), text(400)
    slots.generate(0, cached, 1)
    with Answers(slots) as answers, slots.held(SLOTS, priority=0) as held:
        answers.arrive("computed", 0, f"{other} {text(5)}")
        answers.arrive("cached", 0, f"{cached} {text(5)}")
        answers.arrive("long", 0, f"{other} {text(100)}", 100)
        slots.abort(held[0])
        slots.gate.open()
        until(lambda: len(answers.order) == 3)
    assert answers.order == ["cached", "computed", "long"]


def test_for_a_much_more_important_one_a_slot_is_freed_and_no_answer_changes(
    slots: Serving,
) -> None:
    prompts = [text(100) for _ in range(SLOTS)]
    with ThreadPoolExecutor(SLOTS) as pool:
        undisturbed = list(pool.map(lambda prompt: slots.generate(0, prompt, 100), prompts))
    slots.flush()
    with Answers(slots) as answers:
        with slots.gate.closed():
            batch = [answers.arrive("batch", 0, prompt, 100) for prompt in prompts]
            slots.gate.answer(*(rid for rid, _ in batch), tokens=20)
            answers.arrive("not enough", THRESHOLD - 1, text(20))
            urgent, answer = answers.arrive("interactive", THRESHOLD, text(20))
            slots.gate.finish(urgent)
            answer.result()
            assert answers.order == ["interactive"]
        assert [answer.result() for _, answer in batch] == undisturbed
        until(lambda: len(answers.order) == SLOTS + 2)
    assert sorted(answers.order) == ["batch", "batch", "interactive", "not enough"]


def test_what_a_victim_had_computed_is_not_computed_again_while_there_is_memory(
    slots: Serving,
) -> None:
    def counted(name: str) -> float:
        return slots.counted(f"sgl_ext_{name}_total")

    lost, again = counted("preempted_tokens"), counted("recomputed_tokens")
    with Answers(slots) as answers:
        with slots.gate.closed():
            batch = [answers.arrive("batch", 0, text(20), 100) for _ in range(SLOTS)]
            slots.gate.answer(*(rid for rid, _ in batch), tokens=60)
            urgent, answer = answers.arrive("interactive", THRESHOLD, text(20), 1)
            slots.gate.finish(urgent)
            answer.result()
            assert answers.order == ["interactive"]
        assert [len(answer.result()) for _, answer in batch] == [100] * SLOTS
    assert counted("preempted_tokens") - lost > 50
    assert counted("recomputed_tokens") - again <= 1  # the last token has no successor yet


def test_a_prefill_in_chunks_stands_back_and_no_answer_changes(slots: Serving) -> None:
    prompts = [text(1200) for _ in range(3)]
    undisturbed = [slots.generate(0, prompt, 20) for prompt in prompts]
    slots.flush()
    before, disturbed = slots.counted("sgl_ext_prefills_interrupted_total"), []
    with Answers(slots) as answers:
        for prompt in prompts:
            with slots.gate.closed():
                long, answer = answers.arrive("long", 0, prompt, 20)
                (first,) = slots.gate.step()
                assert 0 < first.computed(long) < 1000, "it has more than a chunk"
                urgent, _ = answers.arrive("interactive", THRESHOLD, text(5), 1)
                slots.gate.begin(urgent)
            disturbed.append(answer.result())
    assert slots.counted("sgl_ext_prefills_interrupted_total") == before + len(prompts)
    assert disturbed == undisturbed


def label(slots: Serving, path: str, body: Any, headers: Any, expected: int) -> None:
    """Asserts that a request is answered, and had this priority as SGLang counts it."""

    def served() -> float:
        return slots.counted("sglang:num_requests_total", priority=str(expected))

    before = served()
    answer = slots.post(path, body, headers)
    assert answer.ok, answer.text
    until(lambda: served() == before + 1)


ROUTES: dict[str, Callable[[], dict[str, Any]]] = {
    "/v1/messages": lambda: {**ONE, "messages": [user(5)]},
    "/v1/chat/completions": lambda: {**ONE, "messages": [user(5)]},
    "/v1/completions": lambda: {**ONE, "prompt": text(5)},
    "/v1/responses": lambda: {"model": "tiny", "max_output_tokens": 3, "input": text(5)},
    "/generate": lambda: raw(text(5), 1),
}


@pytest.mark.parametrize("path", ROUTES)
def test_any_route_carries_a_priority_and_none_is_above_the_ceiling(
    slots: Serving, path: str
) -> None:
    def hinted(priority: int) -> dict[str, Any]:
        return {**ROUTES[path](), "nvext": {"agent_hints": {"priority": priority}}}

    label(slots, path, ROUTES[path](), {}, 0)
    label(slots, path, ROUTES[path](), {HEADER: "7"}, 7)
    label(slots, path, hinted(8), {}, 8)
    label(slots, path, hinted(8), {HEADER: "-6"}, -6)
    label(slots, path, ROUTES[path](), {HEADER: str(CEILING + 1)}, CEILING)
    label(slots, path, hinted(2**63), {}, CEILING)
    label(slots, path, hinted(-(2**63)), {}, -1000)
    label(slots, path, {**ROUTES[path](), "priority": 9}, {}, 9)
    label(slots, path, {**ROUTES[path](), "priority": 2**63}, {}, CEILING)
    label(slots, path, hinted(8), {HEADER: str(2**63)}, CEILING)


@pytest.mark.parametrize("path", ROUTES)
def test_each_tenant_has_its_ceiling_and_requests_for_more_are_answered_and_counted(
    slots: Serving, path: str
) -> None:
    def clamped() -> float:
        return slots.counted("sgl_ext_priority_clamped_total", path=path)

    highest, before = CEILING + 20, clamped()
    asks = {**ROUTES[path](), "nvext": {"agent_hints": {"priority": highest}}}
    label(slots, path, asks, {TENANT: "people"}, highest)
    label(slots, path, ROUTES[path](), {TENANT: "batch"}, -5)
    assert clamped() == before
    label(slots, path, ROUTES[path](), {TENANT: "people", HEADER: str(highest + 1)}, highest)
    label(slots, path, asks, {TENANT: "batch"}, -5)
    label(slots, path, asks, {TENANT: "another", HEADER: "1000"}, CEILING)
    label(slots, path, {**ROUTES[path](), "priority": 0}, {TENANT: "batch"}, -5)
    assert clamped() == before + 4


def test_a_tenant_of_weight_three_gets_three_of_four_turns(slots: Serving) -> None:
    with Answers(slots) as answers, slots.held(SLOTS, priority=0) as held:
        for tenant in ["one"] * 4 + ["three"] * 4:
            answers.arrive(tenant, 0, text(300), tenant=tenant)
        slots.abort(held[0])
        slots.gate.open()
        until(lambda: len(answers.order) == 8)
    assert sorted(answers.order[:4]) == ["one", "three", "three", "three"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_a_service_tier_is_a_priority(slots: Serving, path: str) -> None:
    for tier, priority in (("priority", 10), ("flex", -10), ("default", 0)):
        label(slots, path, {**ROUTES[path](), "service_tier": tier}, {}, priority)


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("value", ["5", 5.0, True, [5]])
def test_a_priority_that_is_no_integer_is_rejected_by_name(
    slots: Serving, path: str, value: Any
) -> None:
    refused = slots.post(path, {**ROUTES[path](), "nvext": {"agent_hints": {"priority": value}}})
    assert refused.status_code == 400
    assert "nvext.agent_hints.priority" in told(path, refused)
    refused = slots.post(path, ROUTES[path](), {HEADER: str(value) if value != "5" else "high"})
    assert refused.status_code == 400
    assert HEADER in told(path, refused)
    refused = slots.post(path, {**ROUTES[path](), "priority": 5}, {HEADER: "high"})
    assert HEADER in told(path, refused)
    both = {**ROUTES[path](), "nvext": {"agent_hints": {"priority": value}}}
    for text_of_header in ("5", "high"):
        refused = slots.post(path, both, {HEADER: text_of_header})
        assert "nvext.agent_hints.priority" in told(path, refused)


_CONVERTS = needs_newest("/generate converts it, too")


@pytest.mark.parametrize(
    "path", [pytest.param(one, marks=_CONVERTS if one == "/generate" else ()) for one in ROUTES]
)
def test_in_sglangs_own_field_it_refuses_what_is_no_whole_number_and_the_rest_says_nothing(
    slots: Serving, path: str
) -> None:
    def ignored() -> float:
        return slots.counted("sgl_ext_priority_hints_ignored_total", path=path)

    refused, converted = ["high", 1.5, [5]], ["5", 5.0, True]
    if path == "/generate":  # it converts nothing
        refused, converted = refused + converted, []
    elif path == "/v1/messages":  # it has no such field
        refused, converted = [], refused + converted
    for value in refused:
        assert slots.post(path, {**ROUTES[path](), "priority": value}).status_code == 400
    before = ignored()
    for value in converted:
        label(slots, path, {**ROUTES[path](), "priority": value}, {}, 0)
        label(slots, path, {**ROUTES[path](), "priority": value}, {HEADER: "3"}, 3)
    assert ignored() == before + 2 * len(converted)


def told(path: str, refused: requests.Response) -> str:
    """What the refusal says, in its protocol's shape."""
    body = refused.json()
    if path == "/v1/messages":
        assert body["type"] == "error"
        assert body["error"]["type"] == "invalid_request_error"
    return str(body["error"]["message"])


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    "field", ['"nvext": {"agent_hints": {"priority": NaN}}', '"priority": NaN']
)
def test_a_priority_that_is_no_number_is_rejected(slots: Serving, path: str, field: str) -> None:
    body = f'{{"model": "tiny", {field}}}'
    refused = requests.post(
        slots.url + path, data=body, headers={"content-type": "application/json"}, timeout=HANG_S
    )
    assert refused.status_code == 400


async def test_half_of_a_long_queue_leaves_and_the_other_half_is_answered(
    slots: Serving,
) -> None:
    source = random.Random(3)

    async def send(session: aiohttp.ClientSession) -> int:
        body, headers = raw(text(20), 2), {HEADER: str(source.choice((-10, 0, 5, 9)))}
        async with session.post(f"{slots.url}/generate", json=body, headers=headers) as answer:
            assert answer.status == 200
            return len((await answer.json())["output_ids"])

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        with slots.held(SLOTS, priority=5):
            at = slots.gate.mark()
            waiting = [asyncio.create_task(send(session)) for _ in range(300)]
            await asyncio.to_thread(slots.gate.count, 300, "arrived", at)
            leaving = set(source.sample(waiting, 150))
            for one in leaving:
                one.cancel()
            await asyncio.wait(leaving)
            slots.gate.open()
            await asyncio.to_thread(slots.gate.count, 150, "left", at)
        staying = [one for one in waiting if one not in leaving]
        assert await asyncio.wait_for(asyncio.gather(*staying), HANG_S) == [2] * 150


BATCH = 4


@pytest.mark.slow
def test_for_a_much_more_important_one_memory_is_taken_and_no_answer_changes(
    memory: Serving,
) -> None:
    prompts = [text(300) for _ in range(BATCH)]
    with ThreadPoolExecutor(BATCH) as pool:
        undisturbed = list(pool.map(lambda prompt: memory.generate(0, prompt, 400), prompts))
    memory.flush()
    assert memory.counted("sgl_ext_preempted_requests_total") == 0
    for priority, is_enough in ((THRESHOLD // 2, False), (THRESHOLD, True)):
        with Answers(memory) as answers:
            with memory.gate.closed():
                batch = [answers.arrive("batch", 0, prompt, 400) for prompt in prompts]
                memory.gate.answer(*(name for name, _ in batch))
                urgent, answer = answers.arrive("interactive", priority, text(1500), 5)
                memory.gate.finish(urgent)
            assert (answers.order[0] == "interactive") == is_enough
            assert [answer.result() for _, answer in batch] == undisturbed
            assert answer.result()
            until(lambda answers=answers: len(answers.order) == BATCH + 1)  # type: ignore[misc]
        assert (memory.counted("sgl_ext_preempted_requests_total") > 0) == is_enough
        assert (memory.counted("sgl_ext_preempted_tokens_total") > 0) == is_enough
        memory.flush()


def test_one_that_waits_is_served_though_more_important_ones_keep_coming(memory: Serving) -> None:
    with Stream(3 * SLOTS_OF_TWO_RANKS, lambda: memory.generate(1, text(20), 24)):
        memory.gate.until(lambda step: len(step.waiting) > SLOTS_OF_TWO_RANKS, memory.gate.mark())
        memory.generate(0, text(20), 1, "patient")
        memory.gate.until(lambda event: (event.kind, event.rid) == ("left", "patient"))
        # It is not that they ceased to come.
        memory.gate.count(1, "arrived", memory.gate.mark())
    assert is_overtaken(memory.gate, "patient")


def test_one_that_does_not_fit_lets_small_ones_pass_and_is_served_though_they_keep_coming(
    memory: Serving,
) -> None:
    source = random.Random(4)

    def small() -> None:
        memory.generate(0, text(250), source.randrange(20, 60))

    def are_all_running(step: Event) -> bool:
        return len(step.requests) == SLOTS_OF_TWO_RANKS

    with Stream(SLOTS_OF_TWO_RANKS, small), ThreadPoolExecutor(1) as pool:
        with memory.gate.closed():
            memory.gate.run_until(are_all_running)
            # It takes the memory of all of them, and one of them always runs.
            big = pool.submit(memory.generate, 3, text(3000), 2, "big")
            memory.gate.arrived("big")
        assert len(big.result()) == 2
        memory.gate.until(lambda event: (event.kind, event.rid) == ("left", "big"))
        memory.gate.count(1, "arrived", memory.gate.mark())
    assert is_overtaken(memory.gate, "big")
