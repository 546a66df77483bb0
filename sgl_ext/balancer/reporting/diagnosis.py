"""Compares each prompt with earlier ones: which harness sent it, and where it diverges.

Only positions, sizes and kinds of differences leave this process, never a prompt's text.
"""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import orjson

from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.balancer.routing.routing_request import RoutingRequest
from sgl_ext.prompts.blocks import (
    CONTEXT_CHANGED,
    MAX_SESSIONS,
    Block,
    ContextMoves,
    NamedBlock,
    read_blocks,
)
from sgl_ext.prompts.compare import compare
from sgl_ext.prompts.findings import MOST_ROWS, Findings, is_estimated
from sgl_ext.prompts.memory import LIMIT_BYTES, PromptMemory
from sgl_ext.prompts.prompt import EVICTED, SESSION, Prompt, evicted_tokens
from sgl_ext.protocols.registry import of_path
from sgl_ext.reading.client import COMPACTION, MAIN, ClientFacts, stated_session, thread_key
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


@dataclass(eq=False)
class DivergenceDetector:
    """Remembers recent prompts. The request log fills `findings`."""

    strip: HeaderStrip
    metrics: Metrics
    sort_tools: bool = False
    clock: Callable[[], float] = time.perf_counter

    def __post_init__(self) -> None:
        self._compared_s = self.clock()
        self._budget_s = _MAX_BURST_S
        self._memory = PromptMemory(self._read, LIMIT_BYTES)
        self._contexts = ContextMoves()
        self.findings = Findings()
        size, limit = (lambda: self._memory.size_bytes), (lambda: LIMIT_BYTES)
        self.metrics.tables.add("compared_prompts", size, limit, "bytes")
        self.metrics.tables.add(
            "sessions_with_contexts", lambda: len(self._contexts), lambda: MAX_SESSIONS
        )
        self.metrics.tables.add("findings", lambda: self.findings.row_count, lambda: MOST_ROWS)

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
        if of_path(path).turns_field is None or body.get("previous_response_id") is not None:
            return PromptDiagnosis(harness, model, None), None
        if len(raw) > _MAX_BODY_BYTES:
            self.metrics.prompts_not_compared.counts[("long",)] += 1
            return PromptDiagnosis(harness, model, None), None
        # An agent's prompts are compared with those of its own kind; a compaction continues one.
        is_compaction = facts.request_class == COMPACTION
        agent = (MAIN if is_compaction else facts.request_class, facts.agent_type)
        group = (routing.tenant, harness, *agent, model, path, str(body.get("lora_path")))
        session = stated_session(hints, body)
        moved = None
        if context and session is not None:
            moved = self._contexts.note((routing.tenant, session), context)
        thread = thread_key(routing.session, routing.chain)
        prompt = Prompt(group, session, thread, path, routing.chain, raw)
        prompt.salts = tuple((name, str(body[name])) for name in _SALTS if body.get(name))
        prompt.version = facts.version
        is_compacted = is_compaction or bool(facts.compaction or facts.context_compacted)
        prompt.is_compacted = is_compacted
        found = self._timed(lambda: self._memory.compare(prompt))
        if found is None:
            return PromptDiagnosis(harness, model, None), prompt
        difference = found.difference
        tokens = difference.lost_bytes * routing.prompt_tokens // max(routing.chain.ends[-1], 1)
        logged = {key: getattr(difference, key) for key in _LOGGED}
        divergence = {"scope": found.scope, **logged, "tokens": tokens, "estimated": True}
        divergence |= {"version": prompt.version or None, "earlier_version": found.version or None}
        if moved is not None:
            divergence |= {"kind": CONTEXT_CHANGED, "block": moved}
        return PromptDiagnosis(harness, model, divergence), prompt

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
        now_s = self.clock()
        self._budget_s = min(
            self._budget_s + _TIME_SHARE * (now_s - self._compared_s), _MAX_BURST_S
        )
        try:
            return comparison()
        except _Busy:
            self.metrics.prompts_not_compared.counts[("busy",)] += 1
        except Exception as error:
            # The error's text might quote the prompt.
            log.error("a prompt could not be compared with earlier ones: %s", type(error).__name__)
            self.metrics.prompts_not_compared.counts[("error",)] += 1
        finally:
            self._compared_s = self.clock()
            self._budget_s -= self._compared_s - now_s
        return None

    def _read(self, path: str, raw: bytes | bytearray) -> list[Block]:
        """A body's blocks as the engine gets them."""
        if self._budget_s <= 0:
            raise _Busy
        protocol = of_path(path)
        body = strip_request(protocol, orjson.loads(raw), self.strip).body
        return read_blocks(protocol, with_sorted_tools(body) if self.sort_tools else body)
