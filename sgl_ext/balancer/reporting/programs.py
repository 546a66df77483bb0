"""Programs: the conversations of one session of a harness, which are a lead and its sub-agents."""

from collections.abc import Iterable, Mapping
from typing import Any

from sgl_ext.reading.client import OF_NO_AGENT, OF_SUBAGENTS, SDK, UNKNOWN

SHOWN_PROGRAMS = 100


def programs_of(agents: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The programs of agents, as `activity.merged` has them, the one with the latest request first.
    A session whose client names none is left out, and so is a single one of no harness that is
    known. What a harness sends beside its agents is part of the program, and no agent of it.
    `cached_share` is the mean of the agents' shares, weighted by the tokens of their last prompts.
    """
    found: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for agent in agents:
        if name := agent["harness_session"]:
            found.setdefault((agent["tenant"], name), []).append(agent)
    programs = [
        _program(tenant, name, agents)
        for (tenant, name), agents in found.items()
        if len(agents) > 1 or agents[0]["harness"] not in (SDK, UNKNOWN)
    ]
    return sorted(programs, key=lambda program: -program["last_s"])


def _program(tenant: str, name: str, agents: list[Mapping[str, Any]]) -> dict[str, Any]:
    shares = [one for one in agents if one["cached_share"] is not None]
    tokens = sum(one["prompt_tokens"] for one in shares)
    cached = sum(one["cached_share"] * one["prompt_tokens"] for one in shares)
    return {
        "session": name,
        "tenant": tenant,
        "harness": agents[0]["harness"],
        "agents": max(sum(one["class"] not in OF_NO_AGENT for one in agents), 1),
        "subagents": sum(one["class"] in OF_SUBAGENTS for one in agents),
        "turns": sum(one["turns"] for one in agents),
        "prompt_tokens": sum(one["prompt_tokens"] for one in agents),
        "cached_share": round(cached / tokens, 4) if tokens else None,
        "engines": len({one["engine"] for one in agents}),
        "last_s": max(one["last_s"] for one in agents),
    }
