"""Runs jobs on an engine: so many leads at once, each with its sub-agents, as their clients do."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from bench.agents.jobs import LEAD, SUBAGENT, Plan, Step
from bench.lib.pin_load import CHAT
from bench.lib.speculative_load import Reply

_OWN_TOKENS = 8
_MOST_TOKENS = 200
_AGENT = "claude-cli/2.1.330 (external, cli)"


@dataclass(frozen=True)
class Sent:
    """One request and its usage. ttft_s: until its first token."""

    role: str
    ttft_s: float
    prompt_tokens: int
    cached_tokens: int
    answer_tokens: int


@dataclass
class Played:
    """What one arm did in one round.

    jobs_s: of each job, from its first request to its last answer, without the time in which its
        person thought. answers: the model's own, by agent.
    faults: what was not as it should be.
    live_tokens: the most tokens that agents had at once which had not ended, each prefix once.
    """

    jobs_s: list[float] = field(default_factory=list)
    sent: list[Sent] = field(default_factory=list)
    answers: dict[str, str] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    span_s: float = 0.0
    live_tokens: int = 0


class Player:
    """Plays jobs against one engine.

    arm: makes the sessions of this arm and round unlike all others. pace: divides the times of
    tools and people. with_session: requests name their agent as SGLang's session, and close it at
    its end.
    """

    def __init__(
        self,
        http: aiohttp.ClientSession,
        url: str,
        arm: str,
        pace: float,
        *,
        with_session: bool = False,
    ) -> None:
        self.seen = Played()
        self._pace = pace
        self._http = http
        self._url = url
        self._arm = arm
        self._with_session = with_session
        self._live: dict[str, int] = {}
        self._shared: dict[str, int] = {}

    async def play(self, jobs: Sequence[Plan], at_once: int) -> Played:
        """Plays all jobs, so many at once, each as soon as there is room for it."""
        waiting, started = iter(jobs), time.perf_counter()

        async def slot() -> None:
            for job in waiting:
                began = time.perf_counter()
                _, thought_s = await self._agent(job, job.name)
                self.seen.jobs_s.append(time.perf_counter() - began - thought_s)

        await asyncio.gather(*(slot() for _ in range(at_once)))
        self.seen.span_s = time.perf_counter() - started
        return self.seen

    async def _agent(self, plan: Plan, session: str) -> tuple[str, float]:
        """Plays one agent; its last answer, and for how long its person thought."""
        messages: list[dict[str, Any]] = [{"role": "system", "content": plan.system}]
        messages.append({"role": "user", "content": plan.steps[0].text})
        durations, thought_s, said = "", 0.0, ""
        for number, step in enumerate(plan.steps):
            is_end = number + 1 == len(plan.steps)
            headers = self._headers(plan, session, durations)
            body = self._body(plan, messages, _OWN_TOKENS if is_end else _MOST_TOKENS)
            reply = await self._ask(plan, body, headers)
            if is_end:
                said = reply.content
                break
            if bool(step.tool) != bool(reply.calls):
                self.seen.faults.append(f"{plan.name}, step {number}: {reply.message}")
            messages.append(reply.message)
            gap_s = step.gap_s / self._pace
            results = await self._act(step, gap_s, session)
            durations = f"{step.tool}={round(gap_s * 1000)}" if step.tool else ""
            text = plan.steps[number + 1].text
            thought_s += 0.0 if step.tool else gap_s
            messages += _next_messages(reply, results, text) if step.tool else [_user(text)]
        self.seen.answers[plan.name] = said
        self._live.pop(plan.name, None)
        if self._with_session:
            await self._close(plan)
        return said, thought_s

    async def _act(self, step: Step, gap_s: float, session: str) -> list[str]:
        """Waits for a tool, a person or sub-agents; the sub-agents' answers."""
        if not step.children:
            await asyncio.sleep(gap_s)
            return []
        playing = (self._agent(child, session) for child in step.children)
        return [said for said, _ in await asyncio.gather(*playing)]

    def _headers(self, plan: Plan, session: str, durations: str) -> dict[str, str]:
        """What Claude Code says about itself."""
        found = {
            "user-agent": _AGENT,
            "x-claude-code-session-id": f"{self._arm} {session}",
            "x-claude-code-request-class": "main" if plan.role == LEAD else "subagent",
        }
        if plan.role == SUBAGENT:
            found["x-claude-code-agent-id"] = plan.name.replace(" ", "-")
        if durations:
            found["x-claude-code-prev-tool-durations"] = durations
        return found

    def _body(self, plan: Plan, messages: list[dict[str, Any]], most_tokens: int) -> dict[str, Any]:
        session = {"session_id": self._session(plan)} if self._with_session else {}
        return {
            "model": "tiny",
            "max_tokens": most_tokens,
            "temperature": 0,
            "messages": messages,
            "tools": plan.tools,
            "chat_template_kwargs": {"enable_thinking": False},
            "stream": True,
            "stream_options": {"include_usage": True},
            **session,
        }

    def _session(self, plan: Plan) -> str:
        return f"{self._arm} {plan.name}"

    async def _close(self, plan: Plan) -> None:
        body = {"session_id": self._session(plan)}
        async with self._http.post(f"{self._url}/close_session", json=body) as answer:
            if answer.status != 200:
                self.seen.faults.append(f"{plan.name} was not closed: {answer.status}")

    async def _ask(self, plan: Plan, body: dict[str, Any], headers: dict[str, str]) -> Reply:
        reply, started = Reply(), time.perf_counter()
        seen, why = reply.seen, ""
        try:
            async with self._http.post(self._url + CHAT, json=body, headers=headers) as response:
                if response.status != 200:
                    why = (await response.text())[:300]
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        seen.ttft_ms = seen.ttft_ms or (time.perf_counter() - started) * 1000
                        reply.take(json.loads(line[6:]))
                    elif line.startswith(b"data: [DONE]"):
                        seen.is_whole = seen.prompt_tokens > 0
        except aiohttp.ClientError as error:
            why = repr(error)
        if not seen.is_whole:
            self.seen.faults.append(f"{plan.name}: {why}")
        one = Sent(
            plan.role,
            seen.ttft_ms / 1000,
            seen.prompt_tokens,
            seen.cached_tokens,
            seen.answer_tokens,
        )
        self.seen.sent.append(one)
        self._note_live(plan, one)
        return reply

    def _note_live(self, plan: Plan, one: Sent) -> None:
        """Counts what live agents have. The part of a first prompt that the plan does not call the
        agent's own is of all agents of its role, and counts once."""
        shared = self._shared.setdefault(plan.role, one.prompt_tokens - plan.first_tokens)
        self._live[plan.name] = one.prompt_tokens + one.answer_tokens - shared
        live = sum(self._live.values()) + sum(self._shared.values())
        self.seen.live_tokens = max(self.seen.live_tokens, live)


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _next_messages(reply: Reply, answers: list[str], text: str) -> list[dict[str, Any]]:
    """The results of an answer's calls: those of sub-agents are their answers; the last is `text`,
    too."""
    found = []
    for number, call in enumerate(reply.calls.values()):
        said = answers[number] if number < len(answers) else ""
        is_end = number + 1 == len(reply.calls)
        content = f"{said}\n{text}" if is_end else said
        found.append({"role": "tool", "tool_call_id": call["id"], "content": content})
    return found
