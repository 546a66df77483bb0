"""Jobs of coding agents: what each agent reads, calls and answers, decided by a seed.

    lead       prompt -> call, result, call, result ... -> text | person thinks | prompt -> ...
    sub-agent           `-> Task: prompt -> call, result ... -> text: the result of the lead's call

The shape is the published one (TraceLab, arXiv 2606.30560): per session a median of 43 calls, 142K
tokens in and 444 out, and 44% of the sessions send out sub-agents. Here all is smaller: a job has
fewer calls, each of which brings the results of several, and every size is scaled. Results are
texts of the standard library's source. An engine with a script answers as the job says, but for
each agent's last answer, which is the model's own.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.lib.pin_load import Texts

LEAD, SUBAGENT = "lead", "subagent"
ROLES = (LEAD, SUBAGENT)
SUBAGENT_SHARE = 0.44
TASK = "Task"
TOOLS = {"Read": 0.4, "Grep": 0.8, "Edit": 1.5, "Bash": 6.0}
"""How long a call of each takes, in seconds, the median."""
_PERSON_S = 30.0
_CALLS_PER_PROMPT = 6
_SPREAD = 0.9
# Tools and instructions, the project's text, the first prompt, and what each result adds.
_LEAD_TOKENS, _SUBAGENT_TOKENS = (32_000, 50_000), (14_000, 30_000)
_FIRST_TOKENS, _RESULT_TOKENS = 1_500, 7_500
# What tools take in a prompt, and what an answer and the frames of messages add to it.
_TOOL_TOKENS, _FRAME_TOKENS = 600, 60


@dataclass(frozen=True)
class Shape:
    """How large jobs are.

    calls: of a lead, the median. scale: of all sizes in tokens.
    most_times: no number of calls, no result and no time is more than this many medians.
    """

    calls: int = 10
    scale: float = 1 / 40
    most_times: float = 6.0


@dataclass(frozen=True)
class Step:
    """One request: what its new message says, and what is answered.

    tool: the one that the answer calls; "" for a text. gap_s: until the next request: the tool's
    time, or the person's. children: the sub-agents that a Task starts, all at once.
    """

    text: str
    tool: str
    gap_s: float
    children: tuple[Plan, ...] = ()


@dataclass(frozen=True)
class Plan:
    """One agent. name: which no other agent has, with which its first message begins.

    first_tokens, own_tokens: about how many tokens of its first and its last prompt no other agent
        has. prompt_tokens: about how many its last prompt has.
    """

    name: str
    role: str
    system: str
    tools: Sequence[dict[str, Any]]
    steps: tuple[Step, ...]
    first_tokens: int
    own_tokens: int
    prompt_tokens: int

    def agents(self) -> Iterator[Plan]:
        """It and all agents below it."""
        yield self
        for step in self.steps:
            for child in step.children:
                yield from child.agents()

    @property
    def live_tokens(self) -> float:
        """About how many tokens only this agent and those below it use, on average over its time:
        a history grows to its length, and sub-agents come and go."""
        below = [sum(c.live_tokens for c in s.children) for s in self.steps if s.children]
        return 0.75 * self.own_tokens + sum(below) / max(len(self.steps), 1)


@dataclass
class Maker:
    """Makes jobs. texts: fitted to the model."""

    texts: Texts
    shape: Shape
    seed: int
    _made: int = field(default=0, init=False)

    def job(self) -> Plan:
        """The next job's lead."""
        self._made += 1
        chance = random.Random(f"job {self.seed} {self._made}")
        has_subagents = chance.random() < SUBAGENT_SHARE
        calls = max(3, round(self._around(chance, self.shape.calls, 0.5)))
        return self._agent(chance, f"Job {self.seed}-{self._made}", LEAD, calls, has_subagents)

    def _agent(
        self, chance: random.Random, name: str, role: str, calls: int, has_subagents: bool
    ) -> Plan:
        harness, project = _LEAD_TOKENS if role == LEAD else _SUBAGENT_TOKENS
        project, first = self._scaled(project), self._scaled(_FIRST_TOKENS)
        about = self.texts.fresh(f"Project of {name}", project)
        text, steps, own = self.texts.fresh(f"[{name}]", first), list[Step](), project + first
        for call in range(1, calls + 1):
            is_prompt = role == LEAD and call % _CALLS_PER_PROMPT == 0
            children: tuple[Plan, ...] = ()
            tool = "" if is_prompt or call == calls else chance.choice(list(TOOLS))
            gap_s = self._around(chance, TOOLS.get(tool, _PERSON_S), _SPREAD)
            if has_subagents and tool and call % _CALLS_PER_PROMPT == 3:
                tool, gap_s = TASK, 0.0
                children = tuple(
                    self._agent(chance, f"{name}.{call}.{n}", SUBAGENT, chance.randint(3, 7), False)
                    for n in range(chance.randint(1, 3))
                )
            steps.append(Step(text, tool, gap_s, children))
            if call < calls:
                size = self._scaled(self._around(chance, _RESULT_TOKENS, 1.0))
                own += size
                text = self.texts.fresh(f"{name}, result {call}", size)
        system = self._harness(role, harness) + about
        prompt = own + self._scaled(harness) + len(steps) * _FRAME_TOKENS + _TOOL_TOKENS
        return Plan(name, role, system, _TOOLS, tuple(steps), project + first, own, prompt)

    def _harness(self, role: str, tokens: int) -> str:
        return self.texts.fresh(f"You are a {role}. Harness", self._scaled(tokens)) + "\n"

    def _scaled(self, tokens: float) -> int:
        return max(8, round(tokens * self.shape.scale))

    def _around(self, chance: random.Random, median: float, sigma: float) -> float:
        return median * min(self.shape.most_times, chance.lognormvariate(0, sigma))


_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{name} in the project.",
            "parameters": {"type": "object", "properties": {}},
        },
    }
    for name in (*TOOLS, TASK)
]


def script_of(jobs: Sequence[Plan]) -> str:
    """The answers of all agents, as lines of JSON: see `sgl_ext_cpu.script`."""
    lines = []
    for agent in (agent for job in jobs for agent in job.agents()):
        for number, step in enumerate(agent.steps[:-1], start=1):
            line: dict[str, Any] = {"after": f"[{agent.name}]"}
            if step.tool:
                count = max(len(step.children), 1)
                line["tool_calls"] = count * [{"name": step.tool, "arguments": {}}]
            else:
                line["text"] = f"Step {number} is done."
            lines.append(json.dumps(line))
    return "\n".join(lines) + "\n"
