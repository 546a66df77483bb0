"""What each turn left in an engine's cache, and why a later turn did not read it.

    prepare: a turn ----> its answer's first or last event: `find` ----> its end: `end`

At the end the doctor learns whether a prompt was evicted. A request with a field for cache
diagnostics (`protocols/cache_diagnostics.py`) is compared with the request whose answer it names.
For that the balancer stores fingerprints of hashes and counts, by tenant and answer id: those of
requests with the field, and those of all requests on /v1/responses, where the first turn has no
field that opts in. Another tenant's answer is never found.
"""

import weakref
from collections import OrderedDict
from dataclasses import dataclass, field

from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.balancer.reporting.diagnosis import DivergenceDetector, PromptDiagnosis
from sgl_ext.balancer.routing.routing_request import RoutingRequest
from sgl_ext.balancer.routing.worker import Attempt
from sgl_ext.prompts.cache_miss import Fingerprint, Settings, find_miss
from sgl_ext.prompts.prompt import Left, Prompt, left_by
from sgl_ext.protocols.cache_diagnostics import NOT_FOUND, Found, Question, answer_id
from sgl_ext.reading.usage import Usage

LIMIT_BYTES = 32 * 1024 * 1024
# A hash and an offset for each segment, and the objects of an entry.
_SEGMENT_BYTES = 88
_ENTRY_BYTES = 768


@dataclass(slots=True, eq=False)
class CacheTurn:
    """One request, as its cache is concerned.

    question: what it asks about its cache; None if it asks nothing, or after the answer.
    settings: None if no later request can name its answer.
    prompt: what the doctor remembers of it.
    earlier: the prompt that its question names, as `CacheTurns.prompt_before` found it.
    kept_as: the answer's id.
    """

    path: str
    tenant: str
    question: Question | None
    settings: Settings | None
    prompt: Prompt | None
    earlier: Prompt | None = None
    kept_as: str | None = field(default=None, init=False)

    def fingerprint(self, routing: RoutingRequest, left: Left | None) -> Fingerprint | None:
        """Its fingerprint; None if no later request can name its answer."""
        if self.settings is None or not routing.chain.hashes:
            return None
        prompt = None if self.prompt is None else weakref.ref(self.prompt)
        return Fingerprint(self.settings, routing.chain, left, prompt)


class CacheTurns:
    """The fingerprints of recent requests, bounded by bytes; the oldest is dropped first."""

    def __init__(
        self,
        metrics: Metrics,
        detector: DivergenceDetector | None,
        limit_bytes: int = LIMIT_BYTES,
    ) -> None:
        self._metrics = metrics
        self._detector = detector
        self._limit_bytes = limit_bytes
        self._kept: OrderedDict[tuple[str, str], Fingerprint] = OrderedDict()
        self.size_bytes = 0
        metrics.tables.add(
            "cache_fingerprints", lambda: self.size_bytes, lambda: limit_bytes, "bytes"
        )

    def prompt_before(self, tenant: str, question: Question | None) -> Prompt | None:
        """What the doctor still remembers of the prompt that a question names. Call it before the
        doctor sees the new prompt, which can take that one's place."""
        if question is None or question.earlier is None:
            return None
        old = self._kept.get((tenant, question.earlier))
        return None if old is None or old.prompt is None else old.prompt()

    def find(
        self, turn: CacheTurn, attempt: Attempt, usage: Usage | None, data: bytes
    ) -> Found | None:
        """Why a request did not read the prompt of the one that its question names.

        data: the answer, or its event for the diagnosis. Later requests can name this answer.
        """
        question, turn.question = turn.question, None
        assert question is not None, "it has a question"
        new = turn.fingerprint(attempt.routing, None)
        self._keep(turn, new, data)
        if question.earlier is None or new is None:
            return None
        old = self._kept.get((turn.tenant, question.earlier))
        found: Found | None = NOT_FOUND
        if old is not None:
            held_tokens = None if old.left is None else held_by(attempt, old.left.worker)
            cached_tokens = None if usage is None else usage.cached_tokens
            found = find_miss(old, new, attempt.worker.id, held_tokens, cached_tokens)
            if found is not None and not found.place:
                found = found._replace(place=self._place(turn))
        self._metrics.cache_diagnoses.counts[("none" if found is None else found.reason,)] += 1
        return found

    def _place(self, turn: CacheTurn) -> dict[str, object]:
        if self._detector is None or turn.prompt is None or turn.earlier is None:
            return {}
        return self._detector.place(turn.earlier, turn.prompt)

    def end(
        self,
        turn: CacheTurn,
        diagnosis: PromptDiagnosis | None,
        attempt: Attempt,
        usage: Usage | None,
        data: bytes,
    ) -> PromptDiagnosis | None:
        """A complete answer, which begins with `data`. Returns the diagnosis with an eviction."""
        prompt_tokens = None if usage is None else usage.prompt_tokens
        left = left_by(attempt.worker.id, attempt.routing.chain, prompt_tokens)
        self._keep(turn, turn.fingerprint(attempt.routing, left), data)
        if (prompt := turn.prompt) is None:
            return diagnosis
        prompt.left = left
        if self._detector is None or diagnosis is None or usage is None or prompt.earlier is None:
            return diagnosis
        held_tokens = held_by(attempt, prompt.earlier.worker)
        return self._detector.with_eviction(diagnosis, prompt, held_tokens, usage.cached_tokens)

    def _keep(self, turn: CacheTurn, new: Fingerprint | None, data: bytes) -> None:
        turn.kept_as = turn.kept_as or answer_id(data)
        if new is None or turn.kept_as is None:
            return
        key, kept = (turn.tenant, turn.kept_as), self._kept
        if (old := kept.pop(key, None)) is not None:
            self.size_bytes -= _size_of(old)
        kept[key] = new
        self.size_bytes += _size_of(new)
        while self.size_bytes > self._limit_bytes:
            self.size_bytes -= _size_of(kept.popitem(last=False)[1])


def _size_of(kept: Fingerprint) -> int:
    return len(kept.chain.hashes) * _SEGMENT_BYTES + _ENTRY_BYTES


def held_by(attempt: Attempt, worker: str) -> int | None:
    """The prompt tokens that an engine was expected to hold when the attempt was placed; None if
    that is unknown."""
    if attempt.worker.id == worker:
        return attempt.expected_tokens if attempt.worker.publishes else None
    return attempt.held_at(worker)
