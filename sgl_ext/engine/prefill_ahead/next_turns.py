"""Guesses what a conversation's next turn will begin with, and has it prefilled.

The request and the answer that it was given, as the client will send that back, and a turn of
the client's behind it that begins with a word nobody else says: what comes before that word in
the tokens is certain, whatever the next turn says. Template, tools and adapters are the
engine's own work (`sgl_ext.engine.core.dry_run`), so what it leaves out of earlier turns, such as
thinking, is left out here.

Each guess is compared with the turn that comes.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import xxhash
from cachetools import FIFOCache

from scheduler.prefill import GuessHistory
from sgl_ext.engine.core.counters import counter
from sgl_ext.engine.core.dry_run import Conversion, Headers, convert
from sgl_ext.engine.core.request_context import RequestContext
from sgl_ext.engine.prefill_ahead.prefiller import Job, Prefiller
from sgl_ext.protocols.registry import of_path
from sgl_ext.requests.answers import read_answer
from sgl_ext.requests.next_turn import Turn, next_turn

MOST_PENDING = 64
MOST_REMEMBERED = 256
# A turn that has not come by then will hardly come: its tokens were wasted.
REMEMBERED_S = 900.0
_MARGIN = 4  # what tokens before the unknown may become part of
_logger = logging.getLogger(__name__)


class _Guess(NamedTuple):
    """The tokens of a guess, as a hash: many are remembered, and each may be long."""

    length: int
    digest: int
    job: Job
    made_s: float


class _Seen(NamedTuple):
    """A conversation's last turn: its hash, and whether a turn ever began with the one before."""

    last_hash: int
    is_growing: bool


class NextTurns:
    """The conversations of one engine. `policy` is as in EngineSettings."""

    def __init__(self, app: Any, manager: Any, prefiller: Prefiller, policy: str) -> None:
        self._app = app
        self._manager = manager
        self._prefiller = prefiller
        self._policy = policy
        self._worth = GuessHistory()
        self._seen: FIFOCache[str, _Seen] = FIFOCache(16 * MOST_REMEMBERED)
        self._pending: dict[str, asyncio.Task[None]] = {}
        self._guesses: OrderedDict[str, _Guess] = OrderedDict()

    def came(self, context: RequestContext, request: Any) -> None:
        """A request is about to be generated from: what was guessed of it has been, or not."""
        name = name_of(context)
        if name is None:
            return
        if (pending := self._pending.pop(name, None)) is not None:
            pending.cancel()
        self._prefiller.drop(name, "came")
        if (guess := self._guesses.pop(name, None)) is not None:
            self._judge(name, guess, getattr(request, "input_ids", None))
        self._note_growth(name, context)

    def wants(self, context: RequestContext) -> bool:
        """Whether the turn after this request should be guessed."""
        name = name_of(context)
        asked = context.importance.speculative_prefill
        if name is None or asked is False or context.is_last or self._policy == "off":
            return False
        seen = self._seen.get(name)
        if not asked and not (self._policy == "auto" and seen is not None and seen.is_growing):
            return False
        return self._worth.should_guess(name)

    def answered(
        self, headers: Headers, context: RequestContext, data: bytes, is_stream: bool
    ) -> None:
        """A request was answered with these bytes."""
        name = name_of(context)
        if name is None or name in self._pending:
            return
        if len(self._pending) >= MOST_PENDING:
            counter("next_turns_not_guessed").labels("crowded").inc()
            return
        work = self._guess(name, list(headers), context, data, is_stream)
        task = self._pending[name] = asyncio.create_task(work)
        task.add_done_callback(lambda _: self._pending.pop(name, None))

    async def _guess(
        self, name: str, headers: Headers, context: RequestContext, data: bytes, is_stream: bool
    ) -> None:
        await self._prefiller.idle()  # to convert takes time from whoever is served
        protocol = of_path(context.path)
        answer = await asyncio.to_thread(read_answer, protocol, data, is_stream)
        turn = None
        if answer is not None:
            turn = next_turn(protocol, context.body, answer, secrets.token_hex(8))
        if turn is None:
            counter("next_turns_not_guessed").labels("not certain").inc()
            return
        conversion = await convert(self._app, context.path, headers, turn.body)
        ids = certain_ids(conversion, turn, self._manager.tokenizer.decode)
        if ids is None:
            counter("next_turns_not_guessed").labels("not converted").inc()
            return
        asked = bool(context.importance.speculative_prefill)
        job = Job(name, ids, conversion.request, quiet(conversion.context), is_guess=not asked)
        self._remember(name, _Guess(len(ids), _digest(ids), job, time.monotonic()))
        self._prefiller.put(job)

    def _remember(self, name: str, guess: _Guess) -> None:
        self._guesses[name] = guess
        forgotten_s = time.monotonic() - REMEMBERED_S
        while len(self._guesses) > MOST_REMEMBERED or self._oldest().made_s < forgotten_s:
            _, forgotten = self._guesses.popitem(last=False)
            counter("prefilled_ahead_tokens_wasted").inc(forgotten.job.prefilled_tokens)

    def _oldest(self) -> _Guess:
        return next(iter(self._guesses.values()))

    def _judge(self, name: str, guess: _Guess, ids: Any) -> None:
        known = ids[: guess.length] if isinstance(ids, (list, array)) else []
        is_right = len(known) == guess.length and _digest(known) == guess.digest
        self._worth.note(name, is_right=is_right)
        counter("next_turns_guessed").labels("right" if is_right else "wrong").inc()
        tokens = guess.job.prefilled_tokens
        counter("prefilled_ahead_tokens_used" if is_right else "prefilled_ahead_tokens_wasted").inc(
            tokens
        )
        if is_right:
            counter("prefilled_ahead_seconds_saved").inc(guess.job.computed_s if tokens else 0.0)

    def _note_growth(self, name: str, context: RequestContext) -> None:
        """A conversation grows whose turn begins with all of the one before it."""
        hashes = context.chain.hashes
        if not hashes:
            return
        before = self._seen.get(name)
        grows = before is not None and (before.is_growing or before.last_hash in hashes[:-1])
        self._seen[name] = _Seen(hashes[-1], grows)


def name_of(context: RequestContext) -> str | None:
    """A conversation's name among all tenants'; None if nothing tells which it is."""
    if context.conversation is None:
        return None
    return f"{context.owner}/{context.conversation:032x}"


def _digest(ids: Sequence[int]) -> int:
    return xxhash.xxh3_128_intdigest(array("q", ids))


def quiet(context: RequestContext) -> RequestContext:
    """What was read of a copy, without the pins: those are the real request's to ask for."""
    context.pins = ()
    return context


def certain_ids(
    conversion: Conversion, turn: Turn, decode: Callable[[Sequence[int]], str]
) -> list[int] | None:
    """The tokens of a converted turn up to where it is not known; None if that is not found."""
    ids = getattr(conversion.request, "input_ids", None)
    if isinstance(ids, array):
        ids = ids.tolist()
    if not isinstance(ids, list) or not ids or not isinstance(ids[0], int):
        return None
    if not turn.nonces:
        return ids
    end = _begin_of(turn.nonces[0], ids, decode)
    return None if end is None or end <= _MARGIN else ids[: end - _MARGIN]


def _begin_of(word: str, ids: list[int], decode: Callable[[Sequence[int]], str]) -> int | None:
    """The token with which the last place of a word begins, by as few decodings as will do."""

    def has(tail: int) -> bool:
        return word in decode(ids[len(ids) - tail :])

    tail = 64
    while tail < len(ids) and not has(tail):
        tail *= 2
    most = min(tail, len(ids))
    if not has(most):
        return None
    least = 0
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (least, middle) if has(middle) else (middle, most)
    return len(ids) - most
