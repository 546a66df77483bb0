"""Whose prefixes SGLang's own trees lose first. Without an engine."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest

from scheduler.programs.programs import PARENT, Programs, Request
from sgl_ext.engine.core.folder import Answered
from sgl_ext.engine.core.hints import Hints
from sgl_ext.engine.core.request_context import WHOLE_PROMPT
from sgl_ext.engine.scheduler.agents import request_of
from sgl_ext.engine.scheduler.state import RequestState
from sgl_ext.requests.client_facts import CLAUDE_CODE, NO_FACTS, ClientFacts, read_client
from tests.engine.core.test_shared_prefixes import TOKENS, Tree, loaded, sglang

pytestmark = pytest.mark.filterwarnings("ignore")  # SGLang warns while it is imported

LENGTH = 100
TOOL, TASK, TEXT = ("Read",), ("Task",), ()
NUMBERS = count(1)
CHILD = ClientFacts(CLAUDE_CODE, agent_id="child", is_subagent=True)


class Engine(Tree):
    """A tree that serves agents one after the other, on a clock of its own."""

    now_s = 0.0

    def turn(
        self,
        name: str,
        ids: list[int],
        calls: tuple[str, ...] | None,
        *,
        after_s: float = 0.1,
        facts: ClientFacts = NO_FACTS,
        **more: Any,
    ) -> int:
        """Serves a request whose answer calls these tools, None if that is not known; how much of
        its prompt was cached."""
        req = self.request(name, ids, after_s=after_s, facts=facts, **more)
        self.cache.agents.queued([req])
        self.admit(req)
        req.finished_reason = sglang("managers.schedule_batch").FINISH_LENGTH(0)
        sglang("mem_cache.common").release_kv_cache(req, self.cache, checkpoint=True)
        self.cache.agents.queued([])
        if calls is not None:
            self.cache.agents.answered([Answered(name, calls, self.now_s)])
        return int(req.cached_tokens)

    def request(self, name: str, ids: list[int], *, after_s: float, **more: Any) -> Any:
        batch = sglang("managers.schedule_batch")
        self.now_s += after_s
        req = batch.Req(str(next(NUMBERS)), "", array("q", ids), batch.SamplingParams())
        pins = ((WHOLE_PROMPT, 300.0),) if more.pop("is_marked", False) else ()
        session = more.pop("session", "session")
        hints = Hints(
            *((), (), pins, "", session, self.now_s, True, False, True),
            conversation=name,
            **more,
        )
        req.sgl_ext = RequestState(hints)
        return req

    def held(self, ids: list[int]) -> int:
        return self.matched(ids, None)

    def take(self, tokens: int) -> None:
        """Has eviction free so much."""
        self.evict(tokens)
        assert self.cache.full_protected_size() == self.cache.pins.tokens
        self.cache.sanity_check()


def prompt(length: int = LENGTH) -> list[int]:
    """A prompt of which no other has any token."""
    return [next(NUMBERS) for _ in range(length)]


@pytest.fixture(autouse=True)
def _entry_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaded("sgl_ext.engine.scheduler.state"), "is_entry_rank", lambda: True)


@pytest.fixture(params=["rust", "python"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with sglang("runtime_context").get_context().override_server_args():
        made = Engine(request.param, eviction_policy="priority")
        made.cache.agents.policy = "expected"
        yield made


CLAUDE = {b"user-agent": b"claude-cli/2.1.330", b"x-claude-code-session-id": b"s"}
TURN = b"x-codex-turn-metadata"


@pytest.mark.parametrize(
    ("session", "lead", "child"),
    [
        ("s", CLAUDE, {**CLAUDE, b"x-claude-code-agent-id": b"child"}),
        (
            "s",
            {TURN: b'{"thread_id": "lead", "thread_source": "user", "request_kind": "turn"}'},
            {
                TURN: b'{"thread_id": "child", "thread_source": "subagent",'
                b' "parent_thread_id": "lead"}'
            },
        ),
        (
            "lead",
            {b"user-agent": b"opencode/1.18.33", b"x-session-id": b"lead"},
            {
                b"user-agent": b"opencode/1.18.33",
                b"x-session-id": b"child",
                b"x-parent-session-id": b"lead",
            },
        ),
    ],
    ids=["claude-code", "codex", "opencode"],
)
def test_each_harness_says_whose_subagent_sends_a_request(
    session: str, lead: dict[bytes, bytes], child: dict[bytes, bytes]
) -> None:
    programs = Programs()
    for name, headers, own in (("lead", lead, session), ("child", child, "")):
        stated = headers.get(b"x-session-id", own.encode() or session.encode()).decode()
        usual = ((), (), (), "", stated, 0.0, True, False, True)
        hints = Hints(*usual, conversation=name, facts=read_client(headers, {}))
        programs.request(request_of(hints), 1.0)
        programs.computed(name, 2.0)
        programs.answered(name, TASK if name == "lead" else TEXT, 2.0)
    found = programs.agent("child")
    assert found is not None
    assert (found.parent, found.is_subagent) == ("lead", True)
    back = programs.request(Request("lead", session=session, brings_results=True), 3.0)
    assert back.ended == (("child", PARENT),)


def test_an_auxiliary_request_is_its_agents_last() -> None:
    headers = {**CLAUDE, b"x-claude-code-request-class": b"auxiliary"}
    usual = ((), (), (), "", "s", 0.0, True, False, True)
    hints = Hints(*usual, conversation="title", facts=read_client(headers, {}))
    assert request_of(hints).is_last


def test_an_ended_subagents_own_part_goes_first_and_what_it_shares_stays(engine: Engine) -> None:
    shared = prompt()
    lead, child = [*shared, *prompt()], [*shared, *prompt()]
    engine.turn("lead", lead, TASK)
    engine.turn("child", child, TEXT, facts=CHILD)
    going_on = [*lead, *prompt()]
    engine.turn("lead", going_on, TEXT, brings_results=True)
    engine.turn("talks", talks := prompt(), TEXT, after_s=300)
    engine.take(LENGTH)
    assert [engine.held(ids) for ids in (going_on, child, talks)] == [3 * LENGTH, LENGTH, LENGTH]


def test_a_parent_that_goes_on_ends_its_subagents(engine: Engine) -> None:
    lead, child = prompt(), prompt()
    engine.turn("lead", lead, TASK)
    engine.turn("child", child, TEXT, facts=CHILD)
    assert not engine.cache.agents.outlook("child").has_ended
    engine.turn("lead", lead, TOOL, brings_results=True)
    assert engine.cache.agents.outlook("child").has_ended


def test_an_agent_that_waits_for_a_person_goes_before_one_that_runs_a_tool(engine: Engine) -> None:
    runs, talks = prompt(), prompt()
    engine.turn("runs", runs, TOOL)
    engine.turn("talks", talks, TEXT)
    engine.take(LENGTH)
    assert (engine.held(runs), engine.held(talks)) == (LENGTH, 0)


@pytest.mark.parametrize("policy", ["off", "ended"])
def test_without_expectations_the_least_recently_used_goes(engine: Engine, policy: str) -> None:
    engine.cache.agents.policy = policy
    runs, talks = prompt(), prompt()
    engine.turn("runs", runs, TOOL)
    engine.turn("talks", talks, TEXT)
    engine.take(LENGTH)
    assert (engine.held(runs), engine.held(talks)) == (0, LENGTH)


def test_an_agent_whose_request_waits_keeps_its_prefix(engine: Engine) -> None:
    waits, runs = prompt(), prompt()
    engine.turn("waits", waits, TEXT)
    engine.turn("runs", runs, TOOL)
    engine.cache.agents.queued([engine.request("waits", waits, after_s=0.1)])
    engine.take(LENGTH)
    assert (engine.held(waits), engine.held(runs)) == (LENGTH, 0)


def test_a_request_gets_all_memory_whatever_agents_are_worth(engine: Engine) -> None:
    prompts = [prompt() for _ in range(TOKENS // LENGTH)]
    for number, ids in enumerate(prompts):
        engine.turn(f"agent {number}", ids, TOOL)
    engine.take(TOKENS)
    assert [engine.held(ids) for ids in prompts] == [0] * len(prompts)
    assert engine.memory.available_size() == TOKENS


def test_what_is_left_of_a_prefix_is_still_its_agents(engine: Engine) -> None:
    long, runs = prompt(), prompt()
    engine.turn("long", long, TEXT)
    engine.turn("long", [*long, *prompt()], TEXT)
    engine.turn("runs", runs, TOOL)
    engine.take(LENGTH)
    assert engine.held(long) == LENGTH
    engine.take(LENGTH)
    assert (engine.held(long), engine.held(runs)) == (0, LENGTH)


def test_the_pins_of_an_ended_subagent_end_and_shared_ones_stay(engine: Engine) -> None:
    lead, child = prompt(), prompt()
    engine.turn("lead", lead, TASK, is_marked=True)
    engine.turn("child", child, TEXT, facts=CHILD, is_marked=True)
    engine.turn("child", lead, TEXT, facts=CHILD)
    assert engine.cache.pins.tokens == 2 * LENGTH
    engine.turn("lead", lead, TOOL, brings_results=True)
    assert engine.cache.pins.tokens == LENGTH
    engine.take(LENGTH)
    assert (engine.held(lead), engine.held(child)) == (LENGTH, 0)


@pytest.mark.parametrize("name", ["before", "after"])
def test_what_a_compacted_conversation_had_is_let_go_without_a_header(
    engine: Engine, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of some harnesses what is left is the same conversation, of others a new one."""
    monkeypatch.setattr("scheduler.programs.compaction.HEAD_TOKENS", 20)
    head, facts = prompt(20), ClientFacts(CLAUDE_CODE)
    before, after = [*head, *prompt(180)], [*head, *prompt(60)]
    engine.turn("before", before, TEXT, facts=facts, is_marked=True)
    engine.turn("runs", runs := prompt(), TOOL, session="another")
    assert engine.cache.pins.tokens == len(before)
    engine.turn(name, after, TOOL, facts=facts, is_marked=True)
    assert engine.cache.pins.tokens == len(after)
    engine.take(len(before) - len(head))
    assert [engine.held(ids) for ids in (before, after, runs)] == [20, 80, LENGTH]


def test_what_is_pinned_is_not_counted_as_memory_to_take(engine: Engine) -> None:
    talks, waits, runs = prompt(), prompt(), prompt()
    engine.turn("talks", talks, TEXT, is_marked=True)
    engine.turn("waits", waits, TEXT)
    engine.turn("runs", runs, TOOL)
    engine.take(LENGTH)
    assert [engine.held(ids) for ids in (talks, waits, runs)] == [LENGTH, 0, LENGTH]


def test_a_new_pin_displaces_that_of_an_agent_that_will_hardly_return(engine: Engine) -> None:
    kept = [prompt() for _ in range(TOKENS // 3 // LENGTH)]
    for number, ids in enumerate(kept):
        engine.turn(f"agent {number}", ids, TOOL, is_marked=True)
        calls = TEXT if number else TOOL
        engine.turn(f"agent {number}", [*ids, *prompt(9)], calls, brings_results=True)
    engine.turn("new", prompt(), TOOL, is_marked=True)
    engine.turn("later", later := prompt(), TOOL, is_marked=True, after_s=250)
    engine.take(2 * LENGTH)
    assert engine.held(kept[0]) == LENGTH, "its tool may still run"
    assert engine.held(later) == LENGTH, "its pin took the place of one whose person went away"
    assert engine.cache.pins.tokens == len(kept) * LENGTH


def test_a_flush_forgets_prefixes_and_no_agent(engine: Engine) -> None:
    engine.turn("agent", prompt(), TOOL)
    engine.cache.reset()
    engine.memory.clear()
    engine.take(LENGTH)
    assert engine.cache.agents.outlook("agent").chance > 0.5
