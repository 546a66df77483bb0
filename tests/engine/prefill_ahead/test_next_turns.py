"""Prompts that are loaded back before their sessions, with a clock that the tests move.

Which tokens of a next turn are certain, and which conversations are guessed.
"""

from __future__ import annotations

import warnings
from array import array
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.returns import LEAD_S, LONGEST_S, PRIOR
from sgl_ext.engine.core.counters import counter
from sgl_ext.engine.core.request_context import RequestContext
from sgl_ext.engine.prefill_ahead import next_turns as module
from sgl_ext.engine.prefill_ahead.next_turns import NextTurns, SessionReturns, certain_ids
from sgl_ext.engine.prefill_ahead.prefiller import Job, Prefiller
from sgl_ext.reading.cache_marks import Marks
from sgl_ext.reading.client import NO_FACTS, ClientFacts
from sgl_ext.reading.hints import Importance
from sgl_ext.reading.next_turn import Turn
from sgl_ext.reading.segments import Chain
from tests.engine.prefill_ahead.test_prefiller import ARGS, Manager, Tree, job, refused, worked

FIRST_S = PRIOR[0] - LEAD_S
BASH = ("Bash",)


class Engine:
    """A prefiller, and the sessions that run tools. Its scheduler has all prompts on the device
    until `spill`."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.tree = Tree(4096, cached=5000)
        self.prefiller = Prefiller(Manager(lambda request: self.tree(request)), ARGS, 256)
        self.returns = SessionReturns(self.prefiller, lambda: self.now_s)

    def spill(self) -> None:
        self.tree = Tree(4096, on_host=5000)

    async def answer(self, name: str = "one", tools: tuple[str, ...] = BASH, **fields: Any) -> Job:
        """The engine answers with tool calls, and prefills the next turn."""
        made = job(name, **fields)
        self.returns.expect(made, tools, self.now_s)
        self.prefiller.put(made)
        await worked(self.prefiller, made)
        return made

    def came(self, name: str = "one", **facts: Any) -> None:
        self.returns.came(name, RequestContext(facts=NO_FACTS._replace(**facts)))
        self.prefiller.drop(name, "came")

    def loading(self, now_s: float) -> list[Job]:
        """The jobs that there are at this time."""
        self.now_s = now_s
        self.returns.load_due()
        return list(self.prefiller._jobs.values())


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Engine:
    monkeypatch.setenv("SGLEXT_ENGINE_FOLDER", str(tmp_path))
    with warnings.catch_warnings(action="ignore"):  # SGLang's, while it is imported
        import_module("sglang.srt.managers.io_struct")
    return Engine()


class Counted:
    """How much the waits that came to each result rose by."""

    def __init__(self) -> None:
        self._before = self._now()

    def __call__(self) -> dict[str, float]:
        now = self._now()
        return {name: rose for name in now if (rose := now[name] - self._before.get(name, 0))}

    @staticmethod
    def _now() -> dict[str, float]:
        (metric,) = counter("returns").collect()
        return {s.labels["result"]: s.value for s in metric.samples if s.name.endswith("_total")}


async def test_a_prompt_is_loaded_shortly_before_its_session_is_expected(engine: Engine) -> None:
    made = await engine.answer()
    assert not len(made.ids), "it is over"
    engine.spill()
    assert engine.loading(FIRST_S - 0.01) == []
    (load,) = engine.loading(FIRST_S)
    assert (load.name, list(load.ids), load.purpose) == ("one", list(range(1000)), "return")
    names = ("extra_key", "cache_salt", "lora_path")
    assert [getattr(load.request, name) for name in names] == ["adapter", "salt", None]
    assert load.is_guess == made.is_guess
    await worked(engine.prefiller, load)
    assert (load.is_complete, load.loaded_tokens) == (True, 1000)
    counted = Counted()
    engine.came()
    assert counted() == {"ready": 1}


async def test_nothing_runs_while_the_prefix_is_on_the_device(engine: Engine) -> None:
    await engine.answer()
    (load,) = engine.loading(FIRST_S)
    await worked(engine.prefiller, load)
    assert (load.is_complete, load.loaded_tokens, load.prefilled_tokens) == (True, 0, 0)
    assert len(engine.loading(PRIOR[1])) == 1, "it is looked at again in the second round"


async def test_a_session_that_came_is_not_loaded(engine: Engine) -> None:
    counted = Counted()
    await engine.answer()
    engine.came()
    assert engine.loading(FIRST_S) == []
    assert counted() == {"early": 1}


async def test_a_load_ends_when_its_session_comes_before_it_ran(engine: Engine) -> None:
    counted = Counted()
    await engine.answer()
    (load,) = engine.loading(FIRST_S)
    engine.came()
    assert (load.reason, len(engine.prefiller)) == ("came", 0)
    assert counted() == {"late": 1}


async def test_a_load_that_finds_no_memory_is_counted(engine: Engine) -> None:
    counted = Counted()
    await engine.answer()
    engine.tree = lambda _: refused("memory", 0, 1000)  # type: ignore[assignment]
    (load,) = engine.loading(FIRST_S)
    await worked(engine.prefiller, load)
    engine.came()
    assert counted() == {"dropped": 1}


async def test_a_job_of_the_conversation_that_waits_stays(engine: Engine) -> None:
    await engine.answer()
    asked = job("one")
    engine.prefiller.put(asked)
    assert engine.loading(FIRST_S) == [asked]


async def test_what_is_learned_moves_the_load(engine: Engine) -> None:
    for _ in range(4):
        await engine.answer()
        engine.now_s += 40
        engine.came()
    await engine.answer()
    start_s = engine.now_s
    assert engine.loading(start_s + 40 - LEAD_S - 0.1) == []
    assert len(engine.loading(start_s + 40 - LEAD_S)) == 1


async def test_what_a_client_states_tells_tools_apart(engine: Engine) -> None:
    for _ in range(4):
        await engine.answer(tools=("Bash", "Read"))
        engine.now_s += 40
        engine.came(prev_tool_durations_ms=(("Bash", 40), ("Read", 3000), ("Bash", 39_000)))
    await engine.answer(tools=("Read",))
    assert len(engine.loading(engine.now_s + 3)) == 1


async def test_a_session_that_never_comes_is_counted(engine: Engine) -> None:
    counted = Counted()
    await engine.answer()
    assert engine.loading(LONGEST_S) == []
    assert counted() == {"never": 1}


async def test_prompts_are_bounded_and_the_newest_stay(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LIMIT_BYTES", 100_000)
    engine.returns = SessionReturns(engine.prefiller, lambda: engine.now_s)
    counted = Counted()
    for name in ("one", "two", "three"):
        await engine.answer(name, tokens=5000)
    assert counted() == {"crowded": 1}
    assert [load.name for load in engine.loading(FIRST_S)] == ["two", "three"]
    for _, _, size, limit in engine.returns.tables():
        assert 0 < size <= limit


async def test_what_is_expected_can_be_dropped(engine: Engine) -> None:
    counted = Counted()
    for name in ("one", "two"):
        await engine.answer(name)
    assert engine.returns.drop_all("deleted", lambda each: each.name == "one") == 1
    assert [load.name for load in engine.loading(FIRST_S)] == ["two"]
    await engine.answer("three")
    assert engine.returns.drop_all("flushed") == 2
    assert counted() == {"deleted": 1, "flushed": 2}


NONCE = "0a1b2c3d4e5f6a7bn0z"


def decode(ids: Sequence[int]) -> str:
    """A text of three characters a token."""
    return b"".join(number.to_bytes(3, "big") for number in ids).decode("latin-1")


def encode(text: str) -> list[int]:
    data = text.encode("latin-1")
    data += b" " * (-len(data) % 3)
    return [int.from_bytes(data[at : at + 3], "big") for at in range(0, len(data), 3)]


def converted(ids: Any) -> Any:
    return SimpleNamespace(input_ids=ids)


@given(before=st.integers(13, 400), after=st.integers(0, 400))
def test_tokens_before_the_nonce_are_certain(before: int, after: int) -> None:
    text = "x" * before + NONCE + "y" * after
    ids = encode(text)
    found = certain_ids(converted(ids), Turn({}, (NONCE,)), decode)
    known = ids[: before // 3]
    if len(known) <= 4:
        assert found is None
    else:
        assert list(found or ()) == known[:-4]


def test_all_tokens_are_certain_without_a_nonce() -> None:
    ids = encode("as it is")
    for given_ids in (ids, array("q", ids)):
        assert list(certain_ids(converted(given_ids), Turn({}, ()), decode) or ()) == ids


@pytest.mark.parametrize("ids", [None, [], [[1, 2]], "text", encode("no such word " * 50)])
def test_no_token_is_certain_if_the_nonce_is_not_found(ids: Any) -> None:
    assert certain_ids(converted(ids), Turn({}, (NONCE,)), decode) is None
    assert certain_ids(None, Turn({}, ()), decode) is None


class NoPrefiller:
    is_supported = True

    def drop(self, name: str, why: str) -> bool:
        return False


def turns(policy: str = "auto") -> NextTurns:
    made: Any = NextTurns(None, SimpleNamespace(), NoPrefiller(), policy)  # type: ignore[arg-type]
    assert isinstance(made, NextTurns)
    return made


def context_of(*hashes: int, hint: bool | None = None, **fields: Any) -> RequestContext:
    return RequestContext(
        "/v1/messages",
        {},
        Chain(hashes=hashes, ends=tuple(range(1, len(hashes) + 1))),
        Marks(),
        Importance(speculative_prefill=hint),
        conversation=7,
        **fields,
    )


NO_REQUEST = SimpleNamespace(input_ids=[1])


def test_a_conversation_that_grows_is_guessed() -> None:
    seen = turns()
    seen.compare(context_of(1, 2), NO_REQUEST)
    assert not seen.wants(context_of(1, 2))
    seen.compare(context_of(1, 2, 3), NO_REQUEST)
    assert seen.wants(context_of(1, 2, 3))


def test_a_repeated_request_is_no_growth() -> None:
    seen = turns()
    for _ in range(3):
        seen.compare(context_of(1, 2), NO_REQUEST)
    assert not seen.wants(context_of(1, 2))


@pytest.mark.parametrize(
    ("policy", "hint", "wanted"),
    [
        ("auto", True, True),
        ("auto", None, False),
        ("auto", False, False),
        ("hinted", True, True),
        ("off", True, False),
    ],
)
def test_a_hinted_turn_is_guessed(policy: str, hint: bool | None, wanted: bool) -> None:
    assert turns(policy).wants(context_of(1, hint=hint)) is wanted


def test_a_growing_conversation_that_opts_out_is_not_guessed() -> None:
    seen = turns()
    seen.compare(context_of(1), NO_REQUEST)
    seen.compare(context_of(1, 2), NO_REQUEST)
    assert not seen.wants(context_of(1, 2, hint=False))
    assert not seen.wants(context_of(1, 2, is_last=True))
    only_asked = turns("hinted")
    only_asked.compare(context_of(1), NO_REQUEST)
    only_asked.compare(context_of(1, 2), NO_REQUEST)
    assert not only_asked.wants(context_of(1, 2))


@pytest.mark.parametrize(
    "facts", [ClientFacts(request_class="compaction"), ClientFacts(compaction="auto")]
)
def test_no_turn_begins_with_the_request_that_asks_for_a_summary(facts: ClientFacts) -> None:
    assert not turns().wants(context_of(1, 2, hint=True, facts=facts))


def test_tenants_do_not_share_a_conversation() -> None:
    seen = turns()
    seen.compare(context_of(1, owner="one"), NO_REQUEST)
    seen.compare(context_of(1, 2, owner="other"), NO_REQUEST)
    assert not seen.wants(context_of(1, 2, owner="one"))
    assert not seen.wants(context_of(1, 2, owner="other"))


def test_where_no_slice_runs_no_turn_is_guessed() -> None:
    seen = turns()
    assert seen.wants(context_of(1, 2, hint=True))
    seen.prefiller.is_supported = False
    assert not seen.wants(context_of(1, 2, hint=True))
