"""What bench.restarts counts, and what its day of recorded sessions sends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import cast

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from bench.lib.clients import MESSAGES, Answer
from bench.lib.restarted_servers import Servers
from bench.lib.restarts_day import DAYS, Day, DaySeen, plays
from bench.lib.restarts_day import compared as compared_days
from bench.lib.script import InvariantBroken
from bench.recorded.real_engines import Step
from bench.recorded.sessions import made_sessions
from bench.restarts import Seen, compared


def answered(text: str = "a", cached: int = 0, *, is_whole: bool = True) -> Answer:
    return Answer(
        prompt_tokens=100, cached_tokens=cached, ttft_ms=10.0, is_whole=is_whole, content=text
    )


def seen(cached_share: float = 0.9, probes: str = "ab") -> Seen:
    read = [answered(cached=90)]
    probed = [answered(text) for text in probes]
    return Seen(cached_share, {(0, 0): answered()}, 1.0, [100.0], read, probed, [1.0])


def test_answers_after_kills_are_compared_with_stock_s() -> None:
    found = compared({"stock": seen(0.5), "ours": seen()}, are_exact=True)
    assert (found["answers_after_kills"], found["answers"], found["wrong_answers"]) == (3, 8, 0)
    assert found["ttft_after_node_restart_over_prefill"] == 0.1
    with pytest.raises(InvariantBroken):
        compared({"stock": seen(0.5), "ours": seen(probes="ac")}, are_exact=True)


def test_an_answer_that_broke_is_lost_and_not_wrong() -> None:
    ours = seen()
    ours.probed[0] = answered("", is_whole=False)
    found = compared({"stock": seen(0.5), "ours": ours}, are_exact=True)
    assert (found["lost"], found["wrong_answers"]) == (1, 0)


def test_a_day_is_the_same_for_every_arm() -> None:
    plan = DAYS["smallest"]
    one, other = (plays(made_sessions(60), plan) for _ in range(2))
    assert one == other
    assert [len(own) for own in one] == [plan.turns] * plan.agents
    assert len({step.id for own in one for step in own}) == plan.turns * plan.agents


def step(id: str, *texts: str) -> Step:
    system, *messages = ([{"type": "text", "text": text}] for text in texts)
    return Step(id, {"system": system, "messages": [{"content": one} for one in messages]}, 0.0)


def test_cached_tokens_are_counted_against_what_two_turns_have_in_common() -> None:
    turns = step("0", "head", "aaaa"), step("1", "head", "bbbb", "cccc")
    one = DaySeen({"0": answered(), "1": answered(cached=40)})
    other = DaySeen({"0": answered("x"), "1": answered(cached=90)}, sent_again=2)
    found = compared_days({"stock": one, "ours": other}, [turns], ours="ours", stock="stock")
    assert found["arms"]["stock"]["cached_over_ideal"] == 0.8  # 40 of half of 100
    assert (found["cached_over_ideal"], found["wrong_answers"], found["lost"]) == (1.0, 1, 0)


class OneServer:
    """Servers that stop answering after half of the turns, until they are killed."""

    def __init__(self, turns: int) -> None:
        self._half, self._killed = turns // 2, asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._server = TestServer(web.Application())
        self._server.app.router.add_post(MESSAGES, self._answer)
        self.events: list[str] = []
        self.answered = 0

    async def __aenter__(self) -> OneServer:
        await self._server.start_server()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.close()

    def url(self, session: int) -> str:
        return str(self._server.make_url("")).rstrip("/")

    async def restart_one_by_one(self, is_idle: Callable[[str], bool]) -> None:
        self.events.append("restarted")

    def kill(self) -> None:
        self.events.append("killed")
        self._loop.call_soon_threadsafe(self._killed.set)

    def start(self) -> None:
        self.events.append("started")

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if self.answered >= self._half and not self._killed.is_set():
            await self._killed.wait()
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        self.answered += 1
        usage = {"input_tokens": 100}
        events = ({"type": "message_start", "message": {"usage": usage}}, {"type": "message_stop"})
        lines = b"".join(b"data: %s\n\n" % json.dumps(event).encode() for event in events)
        return web.Response(body=lines, content_type="text/event-stream")


async def test_what_a_kill_breaks_is_sent_again_and_is_not_lost() -> None:
    played = [[step(f"{agent} {turn}", "head", "a") for turn in range(6)] for agent in range(3)]
    async with OneServer(18) as server:
        found = await Day(cast(Servers, server), played).run()
        assert server.events == ["restarted", "killed", "started", "restarted"]
    assert (len(found.answers), found.lost, found.sent_again) == (18, 0, 3)
