"""Compares each prompt with earlier ones: which harness sent it, and where it diverges.

Only positions, sizes and kinds of differences leave this process, never a prompt's text.
"""

import logging
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import orjson

from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.balancer.routing.routing_request import RoutingRequest
from sgl_ext.prompts.blocks import (
    CONTEXT_CHANGED,
    MAX_SESSIONS,
    SYSTEM,
    TOOLS,
    Block,
    ContextMoves,
    NamedBlock,
    read_blocks,
)
from sgl_ext.prompts.compare import compare
from sgl_ext.prompts.findings import MOST_ROWS, Findings, is_estimated
from sgl_ext.prompts.heads import LIMIT_BYTES as HEADS_BYTES
from sgl_ext.prompts.heads import NEW_VERSION, VERSION, Found, Heads
from sgl_ext.prompts.memory import LIMIT_BYTES, PromptMemory
from sgl_ext.prompts.prompt import EVICTED, SESSION, Prompt, evicted_tokens
from sgl_ext.protocols.registry import of_path
from sgl_ext.reading.client import (
    COMPACTION,
    MAIN,
    SDK,
    UNKNOWN,
    ClientFacts,
    stated_session,
    thread_key,
)
from sgl_ext.reading.protocol import Json
from sgl_ext.reading.segments import with_sorted_tools
from sgl_ext.reading.strip import HeaderStrip, Stripped, strip_request

log = logging.getLogger(__name__)

# Clients separate caches by these fields.
_SALTS = ("cache_salt", "extra_key")
_LOGGED = ("part", "block", "byte", "bytes", "kind")
_MAX_MODEL_CHARS = 100
# Comparisons may take this share of the process's time, and at most this long at once.
_TIME_SHARE = 0.1
_MAX_BURST_S = 2.0
# Longer prompts are not compared: parsing one again would delay all other requests.
_MAX_BODY_BYTES = 1024 * 1024
QUICK_SHARE = 0.01
"""What the doctor takes of a process's time while it keeps no prompts."""
_QUICK_BURST_S = 0.5


_Found = TypeVar("_Found")


class _Busy(Exception):
    """The time for comparisons is used up."""


class PromptDiagnosis(NamedTuple):
    """A prompt's sender, and where it diverges as the request log has it, None if nowhere.

    It holds no prompt.
    """

    harness: str
    model: str
    divergence: dict[str, Any] | None


_CUT = {
    "scope": SESSION,
    "part": "cache",
    "block": "cache_control.ttl",
    "byte": 0,
    "bytes": 0,
    "kind": "ttl_cut",
    "tokens": 0,
    "estimated": True,
    "earlier_version": None,
}


def cut_ttl(facts: ClientFacts, body: Any) -> dict[str, Any] | None:
    """A finding if a client says that it asks for an hour, and the marks of its instructions ask
    for less: a proxy cut them."""
    if not facts.asks_hour or facts.is_subagent or not isinstance(body, dict):
        return None
    blocks = body.get("system")
    controls = [
        control
        for block in (blocks if isinstance(blocks, list) else ())
        if isinstance(block, dict) and isinstance(control := block.get("cache_control"), dict)
    ]
    if not controls or any(control.get("ttl") not in (None, "5m") for control in controls):
        return None
    return {**_CUT, "version": facts.version or None}


class Budget:
    """The time that comparisons may take.

    share: of the time that passes. burst_s: at once.
    """

    def __init__(self, clock: Callable[[], float], share: float, burst_s: float) -> None:
        self._clock = clock
        self._share = share
        self._burst_s = self.left_s = burst_s
        self._compared_s = clock()

    @contextmanager
    def spent(self) -> Iterator[None]:
        """Counts the time of what runs within."""
        now_s = self._clock()
        earned_s = self._share * (now_s - self._compared_s)
        self.left_s = min(self.left_s + earned_s, self._burst_s)
        try:
            yield
        finally:
            self._compared_s = self._clock()
            self.left_s -= self._compared_s - now_s


def _is_compared(path: str, body: Json, raw: bytes | bytearray, metrics: Metrics) -> bool:
    """Whether a request's prompt is compared with others. One that is too long is counted."""
    if of_path(path).turns_field is None or body.get("previous_response_id") is not None:
        return False
    if len(raw) > _MAX_BODY_BYTES:
        metrics.prompts_not_compared.counts[("long",)] += 1
        return False
    return True


def _agent_of(facts: ClientFacts) -> tuple[tuple[str, str, str], bool]:
    """An agent's kind, whose prompts are compared with each other, and whether the prompt was
    compacted. A compaction continues the main agent's. Programs that are no known harness have
    nothing in common, and their versions neither."""
    is_compaction = facts.request_class == COMPACTION
    program = facts.program if facts.harness in (SDK, UNKNOWN) else ""
    kind = (program, MAIN if is_compaction else facts.request_class, facts.agent_type)
    return kind, is_compaction or bool(facts.compaction or facts.context_compacted)


class QuickDetector:
    """The doctor at its cheapest, which is always on: it keeps hashes, and no text of a prompt.

    Nearly all prompts cost it two look-ups. What it has to look at takes QUICK_SHARE of the time.
    The request log fills `findings`.
    """

    def __init__(
        self,
        strip: HeaderStrip,
        metrics: Metrics,
        *,
        sort_tools: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._strip = strip
        self._metrics = metrics
        self._sorts_tools = sort_tools
        self._heads = Heads()
        self._budget = Budget(clock, QUICK_SHARE, _QUICK_BURST_S)
        self._usual: dict[str, list[int]] = {}
        self.findings = Findings()
        tables = metrics.tables
        size = lambda: self._heads.size_bytes  # noqa: E731
        tables.add("compared_prompts", size, lambda: HEADS_BYTES, "bytes")
        tables.add("findings", lambda: self.findings.row_count, lambda: MOST_ROWS)

    def as_json(self) -> dict[str, Any]:
        """The findings so far, with the prompts in which nothing was found."""
        usual, self._usual = self._usual, {}
        for harness, (prompts, tokens) in usual.items():
            self.findings.add_prompts(harness, "", prompts, tokens)
        return self.findings.as_json()

    def diagnose(
        self,
        path: str,
        facts: ClientFacts,
        hints: Mapping[str, str],
        stripped: Stripped,
        routing: RoutingRequest,
        raw: bytes | bytearray,
        context: tuple[NamedBlock, ...] = (),
    ) -> tuple[PromptDiagnosis | None, None]:
        """Compares a prompt with earlier ones. Never raises. The diagnosis is None if it diverges
        nowhere. The arguments are those of `DivergenceDetector.diagnose`."""
        chain = routing.chain
        conversation = (routing.session, chain.opening) if routing.session is not None else None
        cut = cut_ttl(facts, stripped.body)
        if self._heads.is_usual(conversation, chain):
            if cut is not None:
                return PromptDiagnosis(facts.harness, "", cut), None
            try:
                sums = self._usual[facts.harness]
            except KeyError:
                sums = self._usual[facts.harness] = [0, 0]
            sums[0] += 1
            sums[1] += routing.prompt_tokens
            return None, None
        found = self._look(path, facts, stripped, routing, raw, conversation)
        return found if found.divergence else found._replace(divergence=cut), None

    def _look(
        self,
        path: str,
        facts: ClientFacts,
        stripped: Stripped,
        routing: RoutingRequest,
        raw: bytes | bytearray,
        conversation: Hashable,
    ) -> PromptDiagnosis:
        """Compares a prompt that is not the usual one."""
        harness, counts = facts.harness, self._metrics.prompts_not_compared.counts
        unknown = PromptDiagnosis(harness, "", None)
        body = stripped.body if isinstance(stripped.body, dict) else {}
        if not _is_compared(path, body, raw, self._metrics):
            return unknown
        agent, is_compacted = _agent_of(facts)
        model = body.get("model")
        group = (routing.tenant, harness, *agent, str(model)[:_MAX_MODEL_CHARS], path)
        with self._budget.spent():
            if self._budget.left_s <= 0:
                counts[("busy",)] += 1
                return unknown
            try:
                found = self._heads.find(
                    conversation,
                    hash(group),
                    routing.chain,
                    facts.version,
                    lambda: read_prompt(path, raw, self._strip, sorts_tools=self._sorts_tools),
                    is_compacted=is_compacted,
                )
            except Exception as error:  # its text might quote the prompt
                log.error("a prompt was not compared: %s", type(error).__name__)
                counts[("error",)] += 1
                return unknown
        if found is None:
            return unknown
        return PromptDiagnosis(harness, "", logged(found, routing, facts.version))


def logged(found: Found, routing: RoutingRequest, version: str) -> dict[str, Any]:
    """What `Heads` found, as the request log has it. version: of the client."""
    place = found.place
    tokens = place.lost_bytes * routing.prompt_tokens // max(routing.chain.ends[-1], 1)
    part = place.part if place.part in (TOOLS, SYSTEM) else "messages"
    return {
        **{"scope": found.scope, "part": part, "block": place.block, "byte": place.byte},
        **{"bytes": found.bytes, "kind": found.kind, "tokens": tokens, "estimated": True},
        "version": version or None,
        "earlier_version": found.earlier_version or None,
    }


@dataclass(eq=False)
class DivergenceDetector:
    """Remembers recent prompts. The request log fills `findings`."""

    strip: HeaderStrip
    metrics: Metrics
    sort_tools: bool = False
    clock: Callable[[], float] = time.perf_counter

    def __post_init__(self) -> None:
        self._budget = Budget(self.clock, _TIME_SHARE, _MAX_BURST_S)
        self._heads = Heads()
        self._memory = PromptMemory(self._read, LIMIT_BYTES)
        self._contexts = ContextMoves()
        self.findings = Findings()
        size, limit = (lambda: self._memory.size_bytes), (lambda: LIMIT_BYTES)
        self.metrics.tables.add("compared_prompts", size, limit, "bytes")
        self.metrics.tables.add(
            "sessions_with_contexts", lambda: len(self._contexts), lambda: MAX_SESSIONS
        )
        self.metrics.tables.add("findings", lambda: self.findings.row_count, lambda: MOST_ROWS)

    def as_json(self) -> dict[str, Any]:
        """The findings so far."""
        return self.findings.as_json()

    def diagnose(
        self,
        path: str,
        facts: ClientFacts,
        hints: Mapping[str, str],
        stripped: Stripped,
        routing: RoutingRequest,
        raw: bytes | bytearray,
        context: tuple[NamedBlock, ...] = (),
    ) -> tuple[PromptDiagnosis, Prompt | None]:
        """Compares a prompt with earlier ones. Never raises, so a request cannot fail by it.

        facts: of its client. hints: the headers that `hints_of` reads. raw: its body, which is
        remembered as it is. context: the blocks of the context that it names. The prompt is None
        if it is not compared.
        """
        harness = facts.harness
        body = stripped.body if isinstance(stripped.body, dict) else {}
        model = body.get("model")
        model = model[:_MAX_MODEL_CHARS] if isinstance(model, str) else ""
        if not _is_compared(path, body, raw, self.metrics):
            return PromptDiagnosis(harness, model, None), None
        agent, is_compacted = _agent_of(facts)
        group = (routing.tenant, harness, *agent, model, path, str(body.get("lora_path")))
        session = stated_session(hints, body)
        moved = None
        if context and session is not None:
            moved = self._contexts.note((routing.tenant, session), context)
        thread = thread_key(routing.session, routing.chain)
        prompt = Prompt(group, session, thread, path, routing.chain, raw)
        prompt.salts = tuple((name, str(body[name])) for name in _SALTS if body.get(name))
        prompt.version = facts.version
        prompt.is_compacted = is_compacted
        found = self._timed(lambda: self._memory.compare(prompt))
        of_version = self._of_version(prompt, routing, is_compacted=is_compacted)
        if of_version is not None and (found is None or found.scope == SESSION):
            shown = logged(of_version, routing, prompt.version)
            return PromptDiagnosis(harness, model, shown), prompt
        if found is None:
            return PromptDiagnosis(harness, model, cut_ttl(facts, body)), prompt
        difference = found.difference
        tokens = difference.lost_bytes * routing.prompt_tokens // max(routing.chain.ends[-1], 1)
        place = {key: getattr(difference, key) for key in _LOGGED}
        divergence = {"scope": found.scope, **place, "tokens": tokens, "estimated": True}
        divergence |= {"version": prompt.version or None, "earlier_version": found.version or None}
        if of_version is not None:  # the text says the byte, and what changes
            kind = NEW_VERSION if of_version.kind == NEW_VERSION else difference.kind
            divergence |= {"scope": VERSION, "kind": kind}
            divergence |= {"earlier_version": of_version.earlier_version}
        if moved is not None:
            divergence |= {"kind": CONTEXT_CHANGED, "block": moved}
        return PromptDiagnosis(harness, model, divergence), prompt

    def _of_version(
        self, prompt: Prompt, routing: RoutingRequest, *, is_compacted: bool
    ) -> Found | None:
        """What a new version of the client changes."""
        chain = routing.chain
        conversation = (routing.session, chain.opening) if routing.session is not None else None
        if self._heads.is_usual(conversation, chain):
            return None
        found = None
        # A prompt that cannot be read is counted where its text is compared.
        with self._budget.spent(), suppress(Exception):
            found = self._heads.find(
                conversation,
                prompt.group,
                chain,
                prompt.version,
                lambda: self._read(prompt.path, prompt.body),
                is_compacted=is_compacted,
            )
        return found if found is not None and found.scope == VERSION else None

    def with_eviction(
        self,
        diagnosis: PromptDiagnosis,
        prompt: Prompt,
        held_tokens: int | None,
        cached_tokens: int | None,
    ) -> PromptDiagnosis:
        """The diagnosis of a prompt that was answered: a prompt that diverges nowhere may have been
        evicted.

        held_tokens: as `held_by` says of the engine that answered the earlier prompt.
        """
        if diagnosis.divergence is not None:
            return diagnosis
        tokens = evicted_tokens(prompt.earlier, held_tokens, cached_tokens)
        if not tokens:
            return diagnosis
        evicted = {"scope": SESSION, "part": "cache", "block": "cache", "byte": 0, "bytes": 0}
        evicted |= {"kind": EVICTED, "tokens": tokens, "estimated": is_estimated(EVICTED)}
        evicted |= {"version": prompt.version or None, "earlier_version": None}
        return diagnosis._replace(divergence=evicted)

    def place(self, old: Prompt, new: Prompt) -> dict[str, Any]:
        """The block and the byte where a prompt diverges from an earlier one, and the kind of the
        difference; empty if they are not known. Never raises."""
        found = self._timed(lambda: compare(*(self._read(p.path, p.body) for p in (old, new))))
        if found is None:
            return {}
        return {"block": found.block, "byte": found.byte, "cause": found.kind}

    def _timed(self, comparison: Callable[[], _Found | None]) -> _Found | None:
        """What a comparison finds; None if it fails, or if there is no time for it."""
        with self._budget.spent():
            try:
                return comparison()
            except _Busy:
                self.metrics.prompts_not_compared.counts[("busy",)] += 1
            except Exception as error:
                # The error's text might quote the prompt.
                what = "a prompt could not be compared with earlier ones"
                log.error("%s: %s", what, type(error).__name__)
                self.metrics.prompts_not_compared.counts[("error",)] += 1
        return None

    def _read(self, path: str, raw: bytes | bytearray) -> list[Block]:
        """A body's blocks as the engine gets them."""
        if self._budget.left_s <= 0:
            raise _Busy
        return read_prompt(path, raw, self.strip, sorts_tools=self.sort_tools)


def read_prompt(
    path: str, raw: bytes | bytearray, strip: HeaderStrip, *, sorts_tools: bool
) -> list[Block]:
    """The blocks of a request's body as the engine gets them."""
    protocol = of_path(path)
    body = strip_request(protocol, orjson.loads(raw), strip).body
    return read_blocks(protocol, with_sorted_tools(body) if sorts_tools else body)


Detector = QuickDetector | DivergenceDetector


def remembering(detector: Detector | None) -> DivergenceDetector | None:
    """The detector if it remembers prompts."""
    return detector if isinstance(detector, DivergenceDetector) else None
