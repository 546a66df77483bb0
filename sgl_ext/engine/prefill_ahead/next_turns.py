"""Guesses how a conversation's next turn will begin, and prefills it.

The guess is the request, then the answer as the client will send it back, then a made-up turn that
begins with a nonce. The tokens before the nonce are certain, whatever the next turn says. The
engine itself applies template, tools and adapters (`convert` in `request_context.py`), so what it
leaves out of earlier turns, such as thinking, is left out here.

Each guess is compared with the turn that comes.

While a session runs tools, its prompt is loaded back before it returns. The guess of its next turn
is the prompt, and `scheduler.returns` says when
the session is expected. The prompt is then a job again: while all of it is in device memory,
nothing runs; what is in host memory alone is loaded.
"""

import asyncio
import logging
import secrets
import time
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import xxhash
from cachetools import FIFOCache, TTLCache

from scheduler.prefill import GuessHistory
from scheduler.returns import Return, Returns, UsualGaps
from sgl_ext.engine.core.counters import counter
from sgl_ext.engine.core.request_context import Headers, RequestContext, conversation_name, convert
from sgl_ext.engine.prefill_ahead.prefiller import MOST_JOBS, RETURN, Job, Prefiller
from sgl_ext.engine.sglang_http_types import GenerateReqInput, TokenizerManager
from sgl_ext.reading.client import COMPACTION
from sgl_ext.reading.next_turn import Turn, next_turn, read_answer, tool_names

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


MOST_PENDING = 64
MOST_GUESSES = 256
# After this time a turn is not expected any more, and its prefilled tokens were wasted.
GUESS_TTL_S = 900.0
_TOKEN_BYTES = 8
_MARGIN = 4  # so many tokens before the nonce may depend on it
_logger = logging.getLogger(__name__)


class _Guess(NamedTuple):
    """The tokens of a guess, as a hash: they may be many."""

    length: int
    digest: int
    job: Job


class _Seen(NamedTuple):
    """A conversation's last turn: its hash, and whether a turn ever began with the one before."""

    last_hash: int
    is_growing: bool


class NextTurns:
    """The conversations of one engine. `policy` is `EngineSettings.prefill_ahead`.

    returns: the sessions that run tools; None on an engine without host memory.
    """

    def __init__(
        self,
        app: Any,
        manager: TokenizerManager,
        prefiller: Prefiller,
        policy: str,
        returns: SessionReturns | None = None,
    ) -> None:
        self._app = app
        self._manager = manager
        self.prefiller = prefiller
        self.policy = policy
        self.returns = returns
        self._history = GuessHistory()
        self._seen: FIFOCache[str, _Seen] = FIFOCache(16 * MOST_GUESSES)
        self._pending: dict[str, asyncio.Task[None]] = {}
        self._guesses: TTLCache[str, _Guess] = TTLCache(MOST_GUESSES, GUESS_TTL_S)

    def tables(self) -> Iterator[tuple[str, str, int, int]]:
        """Name, unit, size and bound of its tables."""
        yield "prefills_ahead", "entries", len(self.prefiller), MOST_JOBS
        yield "guesses", "entries", len(self._guesses), MOST_GUESSES
        yield "guesses_in_work", "entries", len(self._pending), MOST_PENDING
        if self.returns is not None:
            yield from self.returns.tables()

    def drop_all(self, reason: str) -> None:
        """Prefills nothing of what is known now."""
        self.prefiller.drop_all(reason)
        if self.returns is not None:
            self.returns.drop_all(reason)

    def compare(self, context: RequestContext, request: Any) -> None:
        """Compares the guess for a conversation with the request that came."""
        name = conversation_name(context)
        if name is None:
            return
        if (pending := self._pending.pop(name, None)) is not None:
            pending.cancel()
        if self.returns is not None:
            self.returns.came(name, context)
        self.prefiller.drop(name, "came")
        if (guess := self._guesses.pop(name, None)) is not None:
            self._judge(name, guess, getattr(request, "input_ids", None))
        self._note_growth(name, context)

    def wants(self, context: RequestContext) -> bool:
        """Whether the turn after this request should be guessed."""
        name = conversation_name(context)
        hint = context.importance.speculative_prefill
        if name is None or hint is False or context.is_last or self.policy == "off":
            return False
        if context.facts.request_class == COMPACTION or context.facts.compaction:
            return False  # the next turn does not begin with this one
        seen = self._seen.get(name)
        if not hint and not (self.policy == "auto" and seen is not None and seen.is_growing):
            return False
        if not self._history.should_guess(name):
            return False
        if not self.prefiller.is_supported:
            counter("next_turns_not_guessed").labels("unsupported").inc()
        return self.prefiller.is_supported

    def predict(
        self, headers: Headers, context: RequestContext, data: bytes, is_stream: bool
    ) -> None:
        """Guesses the turn after a request that was answered with `data`."""
        name = conversation_name(context)
        if name is None or name in self._pending:
            return
        if len(self._pending) >= MOST_PENDING:
            counter("next_turns_not_guessed").labels("crowded").inc()
            return
        answered_s = time.monotonic()
        work = self._guess(name, list(headers), context, data, is_stream, answered_s)
        task = self._pending[name] = asyncio.create_task(work)
        task.add_done_callback(lambda _: self._pending.pop(name, None))

    async def _guess(
        self,
        name: str,
        headers: Headers,
        context: RequestContext,
        data: bytes,
        is_stream: bool,
        answered_s: float,
    ) -> None:
        await self.prefiller.idle()  # the conversion would delay real requests
        answer = await asyncio.to_thread(read_answer, context.protocol, data, is_stream)
        turn = None
        if answer is not None:
            turn = next_turn(context.protocol, context.body, answer, secrets.token_hex(8))
        if turn is None:
            counter("next_turns_not_guessed").labels("not certain").inc()
            return
        dry_run = await convert(self._app, context.path, headers, turn.body)
        ids = certain_ids(dry_run.request, turn, self._manager.tokenizer.decode)
        if ids is None or dry_run.request is None:
            counter("next_turns_not_guessed").labels("not converted").inc()
            return
        dry_run.context.pins = ()  # the real request sets its pins
        is_guess = not context.importance.speculative_prefill
        job = Job(name, ids, dry_run.request, dry_run.context, is_guess=is_guess, purpose="ahead")
        self._add(name, _Guess(len(ids), _digest(ids, len(ids)), job))
        if self.returns is not None and answer and (tools := tool_names(answer)):
            self.returns.expect(job, tools, answered_s)
        self.prefiller.put(job)

    def _add(self, name: str, guess: _Guess) -> None:
        expired = self._guesses.expire()
        if len(self._guesses) >= MOST_GUESSES:
            expired.append(self._guesses.popitem())
        self._guesses[name] = guess
        tokens = sum(old.job.prefilled_tokens for _, old in expired)
        counter("prefilled_ahead_tokens_wasted").inc(tokens)

    def _judge(self, name: str, guess: _Guess, ids: Any) -> None:
        length = guess.length
        is_long = isinstance(ids, (list, array)) and len(ids) >= length
        is_right = is_long and _digest(ids, length) == guess.digest
        self._history.note(name, is_right=is_right)
        counter("next_turns_guessed").labels("right" if is_right else "wrong").inc()
        tokens = guess.job.prefilled_tokens
        if not is_right:
            counter("prefilled_ahead_tokens_wasted").inc(tokens)
            return
        counter("prefilled_ahead_tokens_used").inc(tokens)
        counter("prefilled_ahead_saved_seconds").inc(guess.job.computed_s if tokens else 0.0)

    def _note_growth(self, name: str, context: RequestContext) -> None:
        """Notes whether a conversation grows: its turn begins with all of the turn before."""
        hashes = context.chain.hashes
        if not hashes:
            return
        before = self._seen.get(name)
        grows = before is not None and (before.is_growing or before.last_hash in hashes[:-1])
        self._seen[name] = _Seen(hashes[-1], grows)


def _digest(ids: "list[int] | array[int]", length: int) -> int:
    """The hash of the first tokens. It copies no array of eight bytes a token."""
    if not (isinstance(ids, array) and ids.itemsize == _TOKEN_BYTES):
        ids = array("q", ids[:length])
    with memoryview(ids) as view:
        return xxhash.xxh3_128_intdigest(view[:length])


def certain_ids(
    request: GenerateReqInput | None, turn: Turn, decode: Callable[[Sequence[int]], str]
) -> "array[int] | None":
    """The tokens of a converted turn up to its first nonce; None if the nonce is not found."""
    ids = getattr(request, "input_ids", None)
    if not isinstance(ids, (list, array)) or not ids or not isinstance(ids[0], int):
        return None
    ids = array("q", ids)
    if not turn.nonces:
        return ids
    end = _begin_of(turn.nonces[0], ids, decode)
    return None if end is None or end <= _MARGIN else ids[: end - _MARGIN]


def _begin_of(word: str, ids: "array[int]", decode: Callable[[Sequence[int]], str]) -> int | None:
    """The token in which the last occurrence of a word begins. It decodes as little as possible."""

    def has(tail: int) -> bool:
        return word in decode(ids[len(ids) - tail :].tolist())

    most = 64
    while most < len(ids) and not has(most):
        most *= 2
    tails = range(min(most, len(ids)) + 1)
    tail = bisect_left(tails, True, key=has)
    return len(ids) - tail if tail in tails else None
