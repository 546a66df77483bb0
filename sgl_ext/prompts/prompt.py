"""A prompt that a session sent, what its turn left in an engine's cache, and how a prompt diverges
from an earlier one."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sgl_ext.prompts.blocks import Block
from sgl_ext.prompts.compare import COMPACTION, TENANT_FIELD, Difference
from sgl_ext.reading.segments import Chain

# Whether an engine lost what a turn had left in its cache.
#
# A prompt that continues an earlier one should read the earlier one from the cache. If it reads
# less, there are four reasons, and only the last one is an eviction:
#
#     it went to another engine ........... the earlier engine still holds the earlier prompt
#     the template changed the history .... the same: the tokens differ, though the messages do not
#     the earlier turn was cut ............ what it left is unknown
#     it was evicted, flushed, restarted .. the engine no longer reports the earlier prompt
#
# So two sources must agree: the engine's count in the answer, and what the prefix index knew of the
# earlier engine when the request was placed.

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


# Prompts as they are remembered, and how one diverges from another.

SESSION, FLEET = "session", "fleet"
# Causes that a compaction does not explain.
_NO_COMPACTION = frozenset({"clock", "id", "header", "tool_order", "tenant_field"})
# The memory of a prompt without its body: a hash and an offset for each segment, and objects.
_SEGMENT_BYTES = 88
_PROMPT_BYTES = 512


@dataclass(slots=True, eq=False, weakref_slot=True)
class Prompt:
    """A request to compare.

    group: prompts of a group should begin alike: tenant, harness and model.
    session: the client's name for the conversation, or None.
    thread: equal for all turns of a conversation until it diverges; None if unknown.
    body: the request's own bytes.
    version: that of the client, "" if it is unknown.
    is_compacted: whether the client says that it compacts its context, or has just done so.
    left: what its turn left in an engine's cache; None until its answer is complete.
    earlier: what the turn that it continues left there. None if it continues none.
    salts: the fields of the request that separate caches, with their values. Prompts of different
        salts share nothing, so only those of one session are compared.
    """

    group: Hashable
    session: str | None
    thread: int | None
    path: str
    chain: Chain
    body: bytes | bytearray
    version: str = ""
    is_compacted: bool = False
    left: Left | None = None
    earlier: Left | None = None
    salts: tuple[tuple[str, str], ...] = ()

    @property
    def size_bytes(self) -> int:
        return len(self.body) + len(self.chain.hashes) * _SEGMENT_BYTES + _PROMPT_BYTES


class Divergence(NamedTuple):
    """A prompt that diverges from an earlier one; scope is SESSION or FLEET.

    version: that of the client that sent the earlier one.
    """

    scope: str
    difference: Difference
    version: str = ""


def session_of(prompt: Prompt) -> Hashable:
    """The scope of a session's prompts."""
    return prompt.group, prompt.session


def fleet_of(prompt: Prompt) -> Hashable:
    """The scope of all prompts that should begin like this one."""
    return prompt.group, prompt.salts, None


def salted(old: Prompt, new: Prompt, left: Sequence[Block], right: Sequence[Block]) -> Difference:
    """The difference of two prompts that differ in a field that separates caches."""
    (name, _), *_ = sorted(set(old.salts) ^ set(new.salts))
    same_bytes = min(sum(len(block.text) for block in blocks) for blocks in (left, right))
    return Difference(
        block=name,
        byte=0,
        bytes=0,
        kind=TENANT_FIELD,
        part="cache",
        at_bytes=0,
        lost_bytes=same_bytes,
        rest_bytes=same_bytes,
        is_same_agent=True,
        is_same_conversation=True,
    )


def diverged(scope: str, difference: Difference, old: Prompt, new: Prompt) -> Divergence:
    """A divergence from an earlier prompt; a client that says so has compacted."""
    if new.is_compacted and scope == SESSION and difference.kind not in _NO_COMPACTION:
        difference = difference._replace(kind=COMPACTION)
    return Divergence(scope, difference, old.version)
