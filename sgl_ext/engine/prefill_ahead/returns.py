"""In the HTTP process: loads a session's prompt back before the session does, while it runs tools.

The guess of the next turn (`next_turns`) is the prompt, and `scheduler.programs.returns` says when
the session is expected. The prompt is then a job again: while all of it is in device memory,
nothing runs; what is in host memory alone is loaded.
"""

import time
from array import array
from collections.abc import Callable, Iterator
from typing import NamedTuple

from scheduler.programs.returns import Return, Returns, UsualGaps
from sgl_ext.engine.core.counters import counter
from sgl_ext.engine.core.request_context import RequestContext
from sgl_ext.engine.prefill_ahead.prefiller import RETURN, Job, Prefiller

LIMIT_BYTES = 64 << 20
LIMIT = 1024
_SEGMENT_BYTES = 64


class _Prompt(NamedTuple):
    """ids: of a guess. job: that prefilled it, and has dropped its own tokens since."""

    ids: "array[int]"
    job: Job


class SessionReturns:
    """The sessions of one engine that run tools."""

    def __init__(self, prefiller: Prefiller, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._prefiller = prefiller
        self._clock_s = clock_s
        self._gaps = UsualGaps()
        self._returns: Returns[_Prompt] = Returns(LIMIT_BYTES, LIMIT)

    def tables(self) -> Iterator[tuple[str, str, int, int]]:
        """Name, unit, size and bound of its table."""
        yield "expected_sessions", "bytes", self._returns.used_bytes, LIMIT_BYTES

    def expect(self, job: Job, tools: tuple[str, ...], answered_s: float) -> None:
        """Expects a session whose answer called tools. job: prefills what is known of its turn."""
        owner = job.context.owner
        rounds_s = self._gaps.rounds(owner, job.name, tools)
        segments = _SEGMENT_BYTES * len(job.context.chain.hashes)
        size_bytes = job.ids.itemsize * len(job.ids) + segments
        one = Return(owner, tools, answered_s, rounds_s, _Prompt(job.ids, job), size_bytes)
        counter("returns_expected").inc()
        _count("crowded", self._returns.expect(job.name, one, self._clock_s()))

    def came(self, name: str, context: RequestContext) -> None:
        """Notes that a session sent its next request. Call it before its job is dropped."""
        one = self._returns.came(name)
        if one is None:
            return
        stated_s: dict[str, float] = {}
        for tool, ran_ms in context.facts.prev_tool_durations_ms:
            stated_s[tool] = max(ran_ms / 1000, stated_s.get(tool, 0.0))
        gap_s = self._clock_s() - one.answered_s
        self._gaps.note(context.owner, name, one.tools, gap_s, stated_s)
        _count(_result(one.load))

    def load_due(self) -> None:
        """Puts the jobs whose time has come."""
        now_s = self._clock_s()
        _count("never", self._returns.expire(now_s))
        for prompt, one in self._returns.due(now_s):
            guess = prompt.job
            if guess.name in self._prefiller:  # it waits itself, or the client's own job does
                continue
            one.load = Job(
                guess.name,
                prompt.ids,
                guess.request,
                guess.context,
                is_guess=guess.is_guess,
                purpose=RETURN,
            )
            self._prefiller.put(one.load)

    def drop_all(self, reason: str, are_meant: Callable[[Job], bool] = lambda _: True) -> int:
        """Expects none of the sessions any more, or of those that are meant; how many there
        were."""
        dropped = self._returns.drop(lambda prompt: are_meant(prompt.job))
        _count(reason, dropped)
        return dropped


def _result(load: Job | None) -> str:
    """What the wait for a session came to that has just come."""
    if load is None:
        return "early"
    if not load.done.is_set():
        return "late"
    return "dropped" if load.reason else "ready"


def _count(result: str, amount: int = 1) -> None:
    if amount:
        counter("returns").labels(result).inc(amount)
