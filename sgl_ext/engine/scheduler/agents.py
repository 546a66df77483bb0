"""Whose memory eviction takes first: that of agents which are not expected back soon.

    a request comes, or its answer ends     `scheduler.programs.programs` learns what agents do
    SGLang evicts                           `scheduler.programs.eviction` chooses whose prefixes may
                                            go; all other agents' are locked until it is done

SGLang keeps its own order among what may go, so nothing depends on its eviction. A prefix that
several agents share is locked as long as one of them is. What belongs to no agent, such as single
prompts, may always go.

All ranks lock alike: nothing here reads a clock or is in an order of its own.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

from radix.pin import Pin
from scheduler.eviction_priority import EVICT_FIRST, EvictionPriority
from scheduler.programs.agent import Doing
from scheduler.programs.compaction import head_of
from scheduler.programs.eviction import Held, Policy, first_to_go, is_wanted, worth
from scheduler.programs.programs import LIMIT, Change, Outlook, Programs, Request
from sgl_ext.engine.core.counters import counter
from sgl_ext.engine.core.folder import Answered
from sgl_ext.engine.core.hints import Hints
from sgl_ext.engine.core.slices import is_slice
from sgl_ext.engine.scheduler.state import compare, state_of
from sgl_ext.engine.sglang_types import Req
from sgl_ext.requests.client_facts import OPENCODE, SDK, UNKNOWN

if TYPE_CHECKING:
    from sgl_ext.engine.scheduler.radix_cache import ExtendedRadixCache

_MOST_NODES = 64
# Each takes some 20 us of an eviction. Those that were used least recently are looked at, and those
# that have ended: eviction by recency would take no others.
_MOST_COMPARED = 256
_KNOWN_S = 1.0
_SINGLE = ("auxiliary", "side_reply")
_COMPACTED = " (compacted)"


class _End(NamedTuple):
    """Where an agent's prefix ends: the last nodes of its path, from the top, and when it was last
    used. A node that is evicted ends at the one before it."""

    nodes: tuple[Any, ...]
    used_s: float


class Agents:
    """The agents of one scheduler. policy: `EngineSettings.agent_eviction`."""

    def __init__(self, cache: "ExtendedRadixCache", policy: Policy, is_entry_rank: bool) -> None:
        self.policy = policy
        self.programs = Programs()
        self._cache = cache
        self._is_entry_rank = is_entry_rank
        self._ends: OrderedDict[str, _End] = OrderedDict()
        self._waiting: frozenset[str] = frozenset()
        self._wanted: dict[str, tuple[float, bool]] = {}

    def queued(self, queue: Iterable[Req]) -> None:
        """Takes the queue of a scheduling pass: its agents are here, and wait for the engine."""
        if self.policy == "off":
            return
        waiting = []
        for req in queue:
            hints = None if is_slice(req) else state_of(req).hints
            if hints is not None and hints.conversation:
                self._arrived(req, hints)
                waiting.append(hints.conversation)
        self._waiting = frozenset(waiting)

    def stored(self, req: Req, hints: Hints, priority: EvictionPriority) -> None:
        """A request's answer was computed, and is in the tree as far as it will be read again."""
        name = hints.conversation
        if self.policy == "off" or not name or is_slice(req):
            return
        self._arrived(req, hints)
        now_s = self._cache.pins.now_s
        self.programs.computed(name, now_s)
        if priority.prompt == EVICT_FIRST:  # it goes first by itself
            self._ends.pop(name, None)
            return
        prompt = len(req.origin_input_ids)
        (path,) = self._cache.tree_core.collect_path_info([req.last_node])
        is_kept = priority.answer != EVICT_FIRST
        nodes = tuple(one.node_id for one in path if is_kept or one.path_end <= prompt)
        self._ends[name] = _End(nodes[-_MOST_NODES:], now_s)
        self._ends.move_to_end(name)
        while len(self._ends) > LIMIT:
            self._ends.popitem(last=False)

    def answered(self, answers: Iterable[Answered]) -> None:
        """The HTTP process knows what answers call."""
        for one in answers:
            self.programs.answered(one.conversation, one.tools, one.at_s)
            self._wanted.pop(one.conversation, None)

    def forget_all(self) -> None:
        """The tree was emptied."""
        self._ends.clear()

    @contextmanager
    def sparing(self, wanted_tokens: int) -> Iterator[bool]:
        """Inside the block nothing is evicted of agents whose memory is worth more than that of
        others, from which so many tokens can be taken. Yields whether something is spared."""
        if self.policy == "off" or not self._ends or wanted_tokens <= 0:
            yield False
            return
        ends = self._resident()
        going = first_to_go(
            (Held(name, self._worth(name), self._ends[name].used_s) for name in ends),
            wanted_tokens,
            partial(self._own_tokens, ends, self._cache.pins.nodes()),
        )
        spared = [name for name in ends if name not in going]
        compare("agents whose memory goes: %s", sorted(going))
        locks = [self._cache.lock(ends[name]) for name in spared]
        try:
            yield bool(locks)
        finally:
            for lock in reversed(locks):
                self._cache.unlock(lock)

    def outlook(self, name: str) -> Outlook | None:
        """What is expected of an agent, by the digest of its conversation."""
        return self.programs.outlook(name, self._cache.pins.now_s)

    def counts(self) -> dict[str, int]:
        """How many agents do each thing, for the load; empty while nothing is learned."""
        if self.policy == "off":
            return {}
        found = self.programs.doing()
        return {f"agents_{doing}": found[doing] for doing in Doing}

    def is_wanted(self, pin: Pin) -> bool:
        """Whether a pin is likely to be read again. Pins of several agents are. It may be known for
        up to a second: there may be thousands of pins."""
        name, now_s = pin.label.conversation, self._cache.pins.now_s
        if self.policy == "off" or not name or name in self._waiting:
            return True
        known_s, found = self._wanted.get(name, (-inf, True))
        if now_s - known_s > _KNOWN_S:
            found = is_wanted(self.outlook(name), self.policy)
            if len(self._wanted) > LIMIT:
                self._wanted.clear()
            self._wanted[name] = now_s, found
        return found

    def _arrived(self, req: Req, hints: Hints) -> None:
        """Notes a request once, whichever way it takes."""
        state = state_of(req)
        if state.is_agent_noted:
            return
        state.is_agent_noted = True
        self._wanted.pop(hints.conversation, None)
        self._cache.pins.advance(hints.sent_s)
        seen = request_of(hints, req.origin_input_ids)
        change = self.programs.request(seen, self._cache.pins.now_s)
        for name, _ in change.ended:
            if name in self._ends:
                self._ends.move_to_end(name, last=False)
        ended = [name for name, _ in change.ended]
        if change.is_shorter:  # what it pins now is pinned when it is computed
            ended.append(hints.conversation)
            self._compacted(hints.conversation)
        if ended:
            self._cache.pins.end_agents(ended)
        if self._is_entry_rank:
            _count(change, is_last=hints.is_last, request_class=hints.facts.request_class)

    def _compacted(self, name: str) -> None:
        """What a conversation had belongs to no agent any more, and goes first."""
        if (end := self._ends.pop(name, None)) is not None:
            self._ends[name + _COMPACTED] = end
            self._ends.move_to_end(name + _COMPACTED, last=False)

    def _worth(self, name: str) -> float:
        if name in self._waiting:
            return inf if self.policy == "expected" else 1.0
        return worth(self.outlook(name), self.policy)

    def _resident(self) -> dict[str, Any]:
        """The node at which what is left of each agent's prefix ends; forgets those without."""
        found: dict[str, Any] = {}
        for name, end in list(islice(self._ends.items(), _MOST_COMPARED)):
            nodes = end.nodes
            while nodes and self._cache.is_evicted(nodes[-1]):
                nodes = nodes[:-1]
            if not nodes:
                del self._ends[name]
                continue
            if len(nodes) < len(end.nodes):
                self._ends[name] = end._replace(nodes=nodes)
            found[name] = nodes[-1]
        return found

    def _own_tokens(self, ends: Mapping[str, Any], pinned: Collection[Any], name: str) -> int:
        """How many tokens of an agent's prefix eviction could take and no other agent shares: those
        after the last fork and the last pin."""
        (path,) = self._cache.tree_core.collect_path_info([ends[name]])
        kept = [
            one.path_end
            for one in path
            if one.node_id in pinned or (one.num_children > 1 and one is not path[-1])
        ]
        return int(path[-1].path_end) - max(kept, default=0) if path else 0


def request_of(hints: Hints, prompt: Sequence[int] = ()) -> Request:
    """What a request says about its agent. prompt: its tokens."""
    facts, session = hints.facts, hints.session
    has_one_lead = facts.harness not in (SDK, UNKNOWN)
    if facts.harness == OPENCODE and facts.parent_agent_id:
        session = facts.parent_agent_id  # there each agent has a session
    return Request(
        hints.conversation,
        hints.owner,
        session,
        facts.agent_id,
        facts.parent_agent_id,
        facts.is_subagent,
        hints.brings_results,
        {tool: took_ms / 1000 for tool, took_ms in facts.prev_tool_durations_ms},
        is_last=hints.is_last or facts.request_class in _SINGLE,
        is_compacted=bool(facts.context_compacted),
        head=head_of(prompt) if has_one_lead else 0,
        tokens=len(prompt),
    )


def _count(change: Change, *, is_last: bool, request_class: str) -> None:
    if change.after is not None:
        counter("agents_returned").labels(change.after).inc()
    for doing in change.gone:
        counter("agents_gone").labels(doing).inc()
    for _, how in change.ended:
        counter("agents_ended").labels(how).inc()
    if change.is_shorter:
        counter("agents_compacted").inc()
    if is_last or request_class in _SINGLE:
        counter("agents_ended").labels("final" if is_last else "single").inc()
