"""Sessions of the shape that is published of coding agents: a closed loop, decided by a seed.

    per session   median 43 calls; 44% of the sessions send out sub-agents
    per call      median 142K tokens in, 444 out; 95.8% of the input read from a cache

(vLLM #57103; TraceLab, arXiv 2606.30560: 4,265 sessions of Claude Code and Codex.) What the best
cache could read was published twice, and both are variants:

    published_kind     96.8%: histories grow, and a long one is compacted into a summary
    published_unkind   85.8%: histories are rewritten as well, because thinking or results were
                       dropped, and all tokens after the instructions are computed again
                       (InferenceX #1632)

A rewritten history is another conversation of the same session, which begins when the earlier one
has ended. Tools run for some seconds, and a person thinks for half a minute.
"""

from __future__ import annotations

from bench.trace.agents import Agent, TraceConfig, Turn
from bench.trace.maker import Maker

VARIANTS = ("published_kind", "published_unkind")
MEDIAN_CALLS, MEDIAN_OUTPUT, SUBAGENT_SHARE = 43, 444, 0.44
_MOST_CALLS = 300
_HARNESSES = 4
# tools, instructions, the project's text
_MAIN, _SUBAGENT = (20_000, 12_000, 50_000), (8_000, 6_000, 30_000)
_FIRST, _GROWTH, _SUMMARY = 1_500, 3_000, 6_000
_COMPACTS_AT = 600_000
_TOOL_S, _PERSON_S = 2.5, 30.0
_CALLS_PER_PROMPT = 8
_SUBAGENTS_EVERY = 15
# How likely a call's history is rewritten.
_REWRITES = {"published_kind": 0.005, "published_unkind": 0.19}


def make_published(config: TraceConfig) -> tuple[Agent, ...]:
    """`config.sessions` sessions of people. Their lengths are the shape's, not `config.calls`."""
    maker = _Maker(config)
    for session in range(config.sessions):
        maker.session(session)
    return maker.agents()


class _Maker(Maker):
    def __init__(self, config: TraceConfig) -> None:
        super().__init__(config)
        self._rewrites = _REWRITES[config.variant]

    def session(self, session: int) -> None:
        """A session: one conversation after another, some of whose calls send out sub-agents."""
        calls = min(_MOST_CALLS, max(2, round(self._around(MEDIAN_CALLS, 0.6))))
        has_subagents = self.random.random() < SUBAGENT_SHARE
        number = self.reserve()
        starts_at: float | None = self.random.uniform(0, self.config.ramp_s) / self.config.pace
        turns: list[Turn] = []
        message, history = self._around(_FIRST, 0.8), 0.0
        sent_out: tuple[int, ...] = ()
        for call in range(calls):
            is_last, waits_for, sent_out = call + 1 == calls, sent_out, ()
            answer = self._around(MEDIAN_OUTPUT, 1.0)
            history += message + answer
            follows: tuple[int, ...] = ()
            if has_subagents and call % _SUBAGENTS_EVERY == 4 and not is_last:
                sent_out = self._send_out(session)
            elif not is_last and self._is_rewritten(history):
                follows = (self.reserve(),)
            gap_s = self._gap_s(call)
            starts = sent_out + follows
            turns.append(self._turn(number, call, message, answer, gap_s, starts, waits_for))
            message = self._around(_GROWTH, 1.0)
            if follows:
                self._put(number, "lead", session, _MAIN, turns, starts_at)
                (number,), starts_at, turns = follows, None, []
                # It begins with what is left of the history.
                message += _SUMMARY if history > _COMPACTS_AT else history
                history = 0.0
        self._put(number, "lead", session, _MAIN, turns, starts_at)

    def _is_rewritten(self, history: float) -> bool:
        return history > _COMPACTS_AT or self.random.random() < self._rewrites

    def _send_out(self, session: int) -> tuple[int, ...]:
        """Sub-agents, which share a smaller beginning and have the session's id."""
        numbers = tuple(self.reserve() for _ in range(self.random.randint(1, 3)))
        for number in numbers:
            turns = [
                self._turn(
                    number,
                    call,
                    self._around(_GROWTH, 1.0),
                    self._around(MEDIAN_OUTPUT, 1.0),
                    self._around(_TOOL_S, 0.9),
                )
                for call in range(self.random.randint(4, 14))
            ]
            self._put(number, "subagent", session, _SUBAGENT, turns, None)
        return numbers

    def _gap_s(self, call: int) -> float:
        """A tool's run, or a person's thinking before the next prompt."""
        is_prompt = call > 0 and call % _CALLS_PER_PROMPT == 0
        return self._around(_PERSON_S if is_prompt else _TOOL_S, 0.9)

    def _around(self, median: float, sigma: float) -> float:
        """A value around a median, at most eight times of it."""
        return median * min(8.0, self.random.lognormvariate(0, sigma))

    def _turn(
        self,
        number: int,
        call: int,
        message: float,
        answer: float,
        gap_s: float,
        starts: tuple[int, ...] = (),
        waits_for: tuple[int, ...] = (),
    ) -> Turn:
        tokens, answer_tokens = self.scaled(message), self.scaled(answer)
        gap_s /= self.config.pace
        return Turn(self.tag(number, call), tokens, answer_tokens, gap_s, starts, waits_for)

    def _put(
        self,
        number: int,
        kind: str,
        session: int,
        sizes: tuple[int, int, int],
        turns: list[Turn],
        starts_at: float | None,
    ) -> None:
        harness = f"{kind} {self.config.seed} {session % _HARNESSES}"
        project = f"{kind} {session}"
        self.put(number, kind, self.session_id(session), harness, project, sizes, turns, starts_at)
