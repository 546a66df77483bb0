"""The last prompts of recent conversations, and where the next prompt diverges from them.

    a prompt arrives
      its conversation is known (same tools, instructions and first message)
        it begins with an earlier prompt, or is the beginning of one .... no divergence
        it begins with one, but adds a different turn ................... a branch, no divergence
        otherwise ....................................................... it diverges
      it is a prompt of its session with another cache salt ............. a tenant's field
      it has the tools and instructions of a conversation of its session,
        and a summary in place of most messages ......................... a compaction
      it is a first prompt and begins like one of its fleet ............. no divergence
      otherwise, compared with the last prompts of the session and the fleet:
        same agent, and most of the following text is in both ........... it diverges
        otherwise ....................................................... another prompt

Chained hashes decide the first two cases with one or two lookups. Only for the others bodies
are parsed again, so a conversation that only grows costs almost nothing.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from cachetools import FIFOCache, LRUCache

from sgl_ext.prompts.blocks import ASSISTANT, Block
from sgl_ext.prompts.compare import (
    COMPACTION,
    Difference,
    begins_with_summary,
    compare,
    shrinks_to_head,
)
from sgl_ext.prompts.prompt import (
    FLEET,
    SESSION,
    Divergence,
    Prompt,
    diverged,
    fleet_of,
    salted,
    session_of,
)
from sgl_ext.reading.places import common_prefix
from sgl_ext.reading.segments import Chain

LIMIT_BYTES = 64 * 1024 * 1024
_LIMIT_THREADS = 4096
_LIMIT_SCOPES = 4096
_HEADS = 256
_BRANCHES = 8
_ENDS = 64
_CANDIDATES = 4


@dataclass(slots=True)
class _Thread:
    """A conversation: the latest prompt of each branch, and where all its prompts ended.

    ends: the canonical bytes of prompts, by their last hashes.
    """

    branches: list[Prompt] = field(default_factory=list)
    ends: FIFOCache[int, int] = field(default_factory=lambda: FIFOCache(_ENDS))


class PromptMemory:
    """Bounded by bytes; the least recently active conversation is dropped first.

    read: the blocks of a body for a path, as the engine gets them; empty if it is malformed.
    """

    def __init__(
        self, read: Callable[[str, bytes | bytearray], list[Block]], limit_bytes: int = LIMIT_BYTES
    ) -> None:
        self._read = read
        self._limit_bytes = limit_bytes
        self.size_bytes = 0
        self._threads: OrderedDict[int, _Thread] = OrderedDict()
        self._scopes: LRUCache[Hashable, deque[int]] = LRUCache(_LIMIT_SCOPES)
        self._heads: LRUCache[Hashable, FIFOCache[int, None]] = LRUCache(_LIMIT_SCOPES)

    def compare(self, prompt: Prompt) -> Divergence | None:
        """Where a prompt diverges from earlier ones. Remembers the prompt."""
        if prompt.thread is None or not prompt.chain.hashes:
            return None
        found, before = None, None
        thread = self._threads.get(prompt.thread)
        if thread is None:
            found = self._first_prompt(prompt)
            thread = self._threads[prompt.thread] = _Thread()
            self._enter_scopes(prompt)
        else:
            self._threads.move_to_end(prompt.thread)
            before = _grown_from(thread, prompt.chain)
            if before is None:
                if prompt.chain.hashes[-1] in thread.ends:
                    return None
                found, before = self._diverged(thread, prompt)
            elif found is None:
                prompt.earlier = before.left
        self._keep(thread, prompt, before)
        return found

    def _diverged(self, thread: _Thread, prompt: Prompt) -> tuple[Divergence | None, Prompt | None]:
        """Where a prompt diverges from its conversation, and the branch that it continues."""
        nearest = max(
            thread.branches, key=lambda old: common_prefix(old.chain.hashes, prompt.chain.hashes)
        )
        new = self._read(prompt.path, prompt.body)
        difference = compare(self._read(nearest.path, nearest.body), new)
        if difference is None:
            return None, nearest
        held = (thread.ends.get(segment, 0) for segment in prompt.chain.hashes)
        if 0 < (end := max(held)) <= difference.at_bytes and _turns_after(new, end) <= 1:
            return None, None
        return diverged(SESSION, difference, nearest, prompt), nearest

    def _first_prompt(self, prompt: Prompt) -> Divergence | None:
        """Where a conversation's first prompt diverges from the nearest other conversation."""
        heads = self._heads.setdefault((prompt.group, prompt.salts), FIFOCache(_HEADS))
        count = prompt.chain.head_segments
        head = prompt.chain.hashes[count - 1] if count else 0
        is_known = head in heads or not count
        heads[head] = None
        session = [] if prompt.session is None else self._candidates(session_of(prompt))
        fleet = self._candidates(fleet_of(prompt))
        if not session and not fleet:
            return None
        new = self._read(prompt.path, prompt.body)
        own = [old for old in session if old.salts == prompt.salts]
        for old in session:
            if old.salts != prompt.salts:
                blocks = self._read(old.path, old.body)
                if compare(blocks, new) is None:
                    self._forget(old.thread)
                    return diverged(SESSION, salted(old, prompt, blocks, new), old, prompt)
        if prompt.is_compacted or begins_with_summary(new):
            for old in own:
                blocks = self._read(old.path, old.body)
                if not shrinks_to_head(blocks, new):
                    continue
                if (difference := compare(blocks, new)) is not None:
                    self._forget(old.thread)
                    return diverged(SESSION, difference._replace(kind=COMPACTION), old, prompt)
        if is_known and _turns_after(new, 0) == 0:
            return None
        for scope, prompts in ((SESSION, own), (FLEET, fleet)):
            same: list[tuple[Difference, Prompt]] = []
            for old in prompts:
                difference = compare(self._read(old.path, old.body), new)
                if difference is None:
                    if old.chain.hashes[0] == prompt.chain.hashes[0]:
                        return None
                elif _is_the_same(difference):
                    same.append((difference, old))
            if same:
                difference, nearest = max(same, key=lambda pair: pair[0].lost_bytes)
                if not difference.is_same_conversation:
                    return diverged(scope, difference, nearest, prompt)
                # The conversation continues with this prompt, not from its earlier state.
                self._forget(nearest.thread)
                return diverged(SESSION, difference, nearest, prompt)
        return None

    def _forget(self, thread: int | None) -> None:
        if thread is not None and (gone := self._threads.pop(thread, None)) is not None:
            self.size_bytes -= sum(prompt.size_bytes for prompt in gone.branches)

    def _candidates(self, scope: Hashable) -> list[Prompt]:
        """The last prompts of the conversations of a session or a group, the latest first."""
        threads = [self._threads.get(key) for key in self._scopes.get(scope, ())]
        return [thread.branches[-1] for thread in threads if thread and thread.branches][::-1]

    def _enter_scopes(self, prompt: Prompt) -> None:
        assert prompt.thread is not None
        scopes = [fleet_of(prompt)]
        if prompt.session is not None:
            scopes.append(session_of(prompt))
        for scope in scopes:
            threads = self._scopes.setdefault(scope, deque(maxlen=_CANDIDATES))
            if prompt.thread not in threads:
                threads.append(prompt.thread)

    def _keep(self, thread: _Thread, prompt: Prompt, before: Prompt | None) -> None:
        """Remembers a prompt, in place of `before` if it continues that; drops what is too much."""
        branches = thread.branches
        if before is not None:
            branches.remove(before)
        elif len(branches) >= _BRANCHES:
            before = branches.pop(0)
        branches.append(prompt)
        self.size_bytes += prompt.size_bytes - (before.size_bytes if before is not None else 0)
        thread.ends[prompt.chain.hashes[-1]] = prompt.chain.ends[-1]
        while self.size_bytes > self._limit_bytes or len(self._threads) > _LIMIT_THREADS:
            self._forget(next(iter(self._threads)))


def _grown_from(thread: _Thread, chain: Chain) -> Prompt | None:
    """The branch whose prompt this one begins with."""
    hashes = chain.hashes
    for prompt in reversed(thread.branches):
        old = prompt.chain.hashes
        if len(old) <= len(hashes) and hashes[len(old) - 1] == old[-1]:
            return prompt
    return None


def _turns_after(blocks: Sequence[Block], end_bytes: int) -> int:
    """The number of the model's turns after this offset."""
    parts = (block.part for block in blocks if block.end > end_bytes)
    return sum(part == ASSISTANT for part, _ in groupby(parts))


def _is_the_same(difference: Difference) -> bool:
    """Whether a prompt is an earlier one with a change in it, not an unrelated one."""
    if 2 * difference.lost_bytes < difference.rest_bytes or not difference.lost_bytes:
        return False
    in_head = difference.part != "messages"
    return difference.is_same_conversation or (in_head and difference.is_same_agent)
