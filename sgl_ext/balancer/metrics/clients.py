"""What clients say about themselves, as metrics. Labels are bounded, whatever clients send."""

from collections.abc import Callable

from sgl_ext.balancer.metrics.instruments import Counter, Histogram
from sgl_ext.reading.client import ClientFacts
from sgl_ext.reading.usage import Usage

_UNSTATED, _MCP, _OTHER = "unstated", "mcp", "other"
# Claude Code's agents and Codex's. People name theirs as they like: other types are one label.
_AGENT_TYPES = (
    *("Explore", "Plan", "claude", "custom", "general-purpose", "statusline-setup", "teammate"),
    *("memory_consolidation", "review", "thread_spawn"),
)
_TOOLS = frozenset(
    ("Agent", "Bash", "Edit", "Glob", "Grep", "Read", "Skill", "WebFetch", "WebSearch", "Write")
)
_TOOLS_S = (0.01, 0.1, 0.5, 1, 5, 15, 60, 300, 900, 3600)


class ClientMetrics:
    """Requests and cached tokens by class of request, and the time that tools take."""

    def __init__(
        self, counter: Callable[..., Counter], histogram: Callable[..., Histogram]
    ) -> None:
        self._requests = counter(
            "client_requests{harness,class,agent}",
            "Answered requests, by the agent program, what it sent them for, and its kind of "
            "sub-agent, as far as it states these.",
        )
        self._prompt_tokens = counter(
            "client_prompt_tokens{harness,class}",
            "Prompt tokens of the requests whose worker reported its cached tokens, by agent "
            "program and class of request.",
        )
        self._cached_tokens = counter(
            "client_cached_tokens{harness,class}",
            "Prompt tokens that workers read from their cache, by agent program and class of "
            "request.",
        )
        self._tool_s = histogram(
            "client_tool_seconds{tool}",
            "Time for which clients ran a tool before they sent its result, as they state it.",
            _TOOLS_S,
        )
        self.hints_ignored = counter(
            "client_hints_ignored{hint}",
            "Headers and fields about the client that were malformed or unknown, and were ignored.",
        )
        self.volatile_lines = counter(
            "volatile_lines{kind}",
            "Volatile lines found in system texts: moved to the first user message, or kept.",
        )

    def count(self, facts: ClientFacts, prompt_tokens: int, usage: Usage | None) -> None:
        """Counts an answered request. prompt_tokens: an estimate, if the usage has none."""
        request_class = facts.request_class or _UNSTATED
        agent = facts.agent_type and agent_label(facts.agent_type)
        self._requests.counts[facts.harness, request_class, agent] += 1
        if usage is not None and usage.cached_tokens is not None:
            prompt_tokens = usage.prompt_tokens or prompt_tokens
            self._prompt_tokens.counts[facts.harness, request_class] += prompt_tokens
            self._cached_tokens.counts[facts.harness, request_class] += usage.cached_tokens
        for tool, duration_ms in facts.prev_tool_durations_ms:
            self._tool_s.observe(tool_label(tool), duration_ms / 1e3)


def agent_label(agent_type: str) -> str:
    """A kind of sub-agent as a label; "" if there is none."""
    return agent_type if agent_type in _AGENT_TYPES else agent_type and _OTHER


def tool_label(tool: str) -> str:
    """A tool of an agent program as a label."""
    if tool in _TOOLS:
        return tool
    return _MCP if tool.startswith("mcp__") else _OTHER
