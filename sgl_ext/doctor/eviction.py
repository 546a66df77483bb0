"""Whether an engine lost what a turn had left in its cache.

A prompt that continues an earlier one should read the earlier one from the cache. If it reads
less, there are four reasons, and only the last one is an eviction:

    it went to another engine ........... the earlier engine still holds the earlier prompt
    the template changed the history .... the same: the tokens differ, though the messages do not
    the earlier turn was cut ............ what it left is unknown
    it was evicted, flushed, restarted .. the engine no longer reports the earlier prompt

So two sources must agree: the engine's count in the answer, and what the prefix index knew of the
earlier engine when the request was placed.
"""

from typing import NamedTuple

from sgl_ext.requests.segments import Chain

EVICTED = "evicted"
# Less than this is no eviction: pages, and the end of a prompt, which later turns render otherwise.
SLACK_TOKENS = 128


class Left(NamedTuple):
    """What a turn left in the cache of its engine.

    worker: the engine. tokens: the length of the prompt. certain_tokens: the same without its last
        segment, which an engine may report late or not at all.
    """

    worker: str
    tokens: int
    certain_tokens: int


def left_by(worker: str, chain: Chain, prompt_tokens: int | None) -> Left | None:
    """What a complete answer to a prompt left; None if the engine did not count the prompt."""
    if prompt_tokens is None or not chain.ends:
        return None
    before_last = chain.ends[-2] if len(chain.ends) > 1 else 0
    return Left(worker, prompt_tokens, prompt_tokens * before_last // chain.ends[-1])


def evicted_tokens(left: Left | None, held_tokens: int | None, cached_tokens: int | None) -> int:
    """How many tokens of an earlier prompt were gone when this one, which continues it, ran; 0 if
    none were, or if that is not known.

    held_tokens: what the earlier engine was known to hold of this prompt when it was placed.
    cached_tokens: what the engine read from its cache for this prompt.
    """
    if left is None or held_tokens is None or cached_tokens is None:
        return 0
    missing_tokens = left.tokens - max(cached_tokens, held_tokens)
    is_held = held_tokens + SLACK_TOKENS >= left.certain_tokens
    return 0 if is_held or missing_tokens <= SLACK_TOKENS else missing_tokens
