"""Prompts as the doctor remembers them, and how one diverges from another."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sgl_ext.doctor.blocks import Block
from sgl_ext.doctor.compare import COMPACTION, Difference
from sgl_ext.doctor.eviction import Left
from sgl_ext.doctor.labels import TENANT_FIELD
from sgl_ext.requests.segments import Chain

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
