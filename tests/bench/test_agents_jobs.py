"""Jobs of agents: their shape, their script, and what their figures say."""

from __future__ import annotations

import json
import statistics

from bench.agents.job_run import Played, Sent
from bench.agents.jobs import LEAD, SUBAGENT, TASK, Maker, Plan, Shape, script_of
from bench.agents_jobs import arm_figures, by_round, differing
from bench.lib.pin_load import Texts


def jobs(count: int, seed: int = 1) -> list[Plan]:
    maker = Maker(Texts(), Shape(scale=1 / 400), seed)
    return [maker.job() for _ in range(count)]


def sent(role: str, *, ttft_s: float = 1.0, cached: int = 50) -> Sent:
    return Sent(role, ttft_s, prompt_tokens=100, cached_tokens=cached, answer_tokens=10)


def played(*jobs_s: float, answer: str = "done") -> Played:
    return Played(list(jobs_s), [sent(LEAD)], {"a": answer}, span_s=30.0)


def test_jobs_are_the_same_for_a_seed_and_have_the_published_shape() -> None:
    made = jobs(200)
    assert made[:5] == jobs(5)
    assert made[0] != jobs(1, seed=2)[0]
    calls = statistics.median(len(job.steps) for job in made)
    assert abs(calls - Shape().calls) <= 1
    with_subagents = sum(any(step.children for step in job.steps) for job in made) / len(made)
    assert 0.3 < with_subagents < 0.5, "short jobs send out none"


def test_agents_of_a_role_share_their_harness_and_nothing_else() -> None:
    agents = [agent for job in jobs(20) for agent in job.agents()]
    names = [agent.name for agent in agents]
    assert len(set(names)) == len(names)
    for role in (LEAD, SUBAGENT):
        systems = [agent.system for agent in agents if agent.role == role]
        assert len({system.partition("\n")[0] for system in systems}) == 1
        assert len(set(systems)) == len(systems)
    firsts = [agent.steps[0].text.split("]")[0] for agent in agents]
    assert firsts == [f"[{name}" for name in names]


def test_the_script_answers_all_but_each_agents_last_request() -> None:
    made = jobs(20)
    lines = [json.loads(line) for line in script_of(made).splitlines()]
    for agent in (agent for job in made for agent in job.agents()):
        own = [line for line in lines if line["after"] == f"[{agent.name}]"]
        assert len(own) == len(agent.steps) - 1
        for line, step in zip(own, agent.steps, strict=False):
            called = [call["name"] for call in line.get("tool_calls", ())]
            assert called == [step.tool] * max(len(step.children), 1) * bool(step.tool)
            assert bool(step.children) == (step.tool == TASK)
            assert bool(called) != bool(line.get("text"))


def test_what_lives_with_an_agent_is_more_with_subagents() -> None:
    made = jobs(60)
    alone = [job for job in made if not any(step.children for step in job.steps)]
    assert all(job.live_tokens == 0.75 * job.own_tokens for job in alone)
    assert any(job.live_tokens > 0.75 * job.own_tokens for job in made)


def test_an_arm_is_reported_by_job_and_by_role() -> None:
    one = played(2.0, 4.0, 9.0)
    one.sent = [sent(LEAD, cached=80), sent(SUBAGENT, cached=20), sent(LEAD, ttft_s=31.0)]
    found = arm_figures([one])
    assert (found["job_p50_s"], found["jobs"], found["starved"]) == (4.0, 3, 1)
    assert found["ttft_max_s"] == 31.0
    assert found["cached_share_by_role"] == {LEAD: 0.65, SUBAGENT: 0.2}
    assert found["read_write_by_role"] == {LEAD: 1.44, SUBAGENT: 0.22}
    assert found["throughput_jobs_per_min"] == 6.0


def test_arms_are_compared_by_their_median_jobs_and_by_their_answers() -> None:
    ours, stock = [played(1.0, 2.0, 9.0), played(3.0)], [played(4.0, 4.0, 4.0), played(4.0)]
    assert by_round(ours, stock)["median"] == statistics.median([0.5, 0.75])
    assert differing({"ours": ours, "stock": stock}) == []
    assert differing({"ours": ours, "stock": [stock[0], played(4.0, answer="")]}) == ["a"]
