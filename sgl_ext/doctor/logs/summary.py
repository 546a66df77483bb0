"""What one request log says: the shape of prompts, how stable they begin, and what was computed.

A task is a session: all requests with one `session`. A turn is compared with the one before it of
the same task that was sent for the same kind of agent.
"""

from array import array
from collections.abc import Sequence
from statistics import median
from typing import Any

from sgl_ext.doctor.logs.entry import Entry
from sgl_ext.doctor.logs.families import Families
from sgl_ext.doctor.logs.prices import Prices
from sgl_ext.doctor.logs.tokens import Tokens


class _Task:
    """requests: of the session. latest: the hashes `prefix` and `tools` of the latest prompt of
    each kind of agent."""

    __slots__ = ("latest", "requests")

    def __init__(self) -> None:
        self.requests = 0
        self.latest: dict[str, tuple[str, str]] = {}


class Summary:
    """Sums over the requests of a log. It grows by about 20 bytes a request, 500 a task."""

    def __init__(self, prices: Prices | None = None) -> None:
        self.families = Families()
        self.requests = 0
        self.tokens = Tokens()
        self.cost = 0.0
        self._prices = prices
        self._tasks: dict[str, _Task] = {}
        self._in_tasks = Tokens()
        self._cost_in_tasks = 0.0
        self._later = self._same_prefix = self._same_tools = 0
        self._prompt_tokens, self._tools = array("L"), array("L")
        self._cached, self._ttft_ms = array("d"), array("d")

    def add(self, entry: Entry) -> None:
        """Adds a request."""
        tokens = entry.tokens
        cost = 0.0 if self._prices is None else self._prices.of(entry.model, tokens)
        self.requests += 1
        self.tokens = self.tokens.plus(tokens)
        self.cost += cost
        self.families.add(entry, cost)
        self._prompt_tokens.append(tokens.prompt)
        self._tools.append(entry.tools_count)
        self._cached.append(tokens.read / tokens.prompt)
        self._ttft_ms.append(entry.ttft_ms)
        if entry.session:
            self._in_tasks = self._in_tasks.plus(tokens)
            self._cost_in_tasks += cost
            self._add_to_task(entry)

    def _add_to_task(self, entry: Entry) -> None:
        task = self._tasks.setdefault(entry.session, _Task())
        if (latest := task.latest.get(entry.agent)) is not None:
            prefix, tools = latest
            self._later += 1
            self._same_prefix += prefix == entry.prefix
            self._same_tools += tools == entry.tools
        task.requests += 1
        task.latest[entry.agent] = entry.prefix, entry.tools

    def as_json(self) -> dict[str, Any]:
        """Its figures. Those that have nothing to count are null."""
        tasks = [task.requests for task in self._tasks.values()]
        prompts, cached = sorted(self._prompt_tokens), sorted(self._cached)
        ttfts_ms = sorted(self._ttft_ms)
        tokens, in_tasks = self.tokens, self._in_tasks
        figures: dict[str, Any] = {
            "requests": self.requests,
            "tasks": len(tasks),
            "requests_per_task_p50": median(tasks) if tasks else None,
            "prompt_tokens_p50": _at(prompts, 0.5),
            "prompt_tokens_p90": _at(prompts, 0.9),
            "prompt_tokens_max": prompts[-1] if prompts else None,
            "tools_p50": _at(sorted(self._tools), 0.5),
            "same_prefix_share": _share(self._same_prefix, self._later),
            "same_tools_share": _share(self._same_tools, self._later),
            "cached_share": _share(tokens.read, tokens.prompt),
            "cached_share_p10": _rounded(_at(cached, 0.1)),
            "cached_share_p50": _rounded(_at(cached, 0.5)),
            "cached_share_p90": _rounded(_at(cached, 0.9)),
            "ttft_ms_p50": _at(ttfts_ms, 0.5),
            "ttft_ms_p90": _at(ttfts_ms, 0.9),
            "ttft_ms_p99": _at(ttfts_ms, 0.99),
            "computed_per_task": _per(in_tasks.computed, len(tasks)),
            "read_per_task": _per(in_tasks.read, len(tasks)),
            "output_per_task": _per(in_tasks.output, len(tasks)),
        }
        if self._prices is not None:
            cost_per_task = self._cost_in_tasks / len(tasks) if tasks else None
            figures["cost"] = round(self.cost, 4)
            figures["cost_per_task"] = None if cost_per_task is None else round(cost_per_task, 6)
        return figures


def _at(ordered: Sequence[float], share: float) -> float | None:
    """The value below which this share of the ordered values is, by nearest rank."""
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else None


def _share(part: int, whole: int) -> float | None:
    return round(part / whole, 4) if whole else None


def _per(tokens: int, tasks: int) -> int | None:
    return round(tokens / tasks) if tasks else None


def _rounded(share: float | None) -> float | None:
    return None if share is None else round(share, 4)
