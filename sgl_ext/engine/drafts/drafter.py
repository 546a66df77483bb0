"""The drafts of a scheduler's requests: what is looked through for each, and what came of it."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from radix.draft_memory import NO_DRAFT, NOTHING, Draft, DraftMemory, TokenLog, Tokens, find_draft
from radix.draft_rewriting import Rewriter
from scheduler.draft_length import Acceptance, DraftLengths, Offer
from sgl_ext.engine.core.counters import counter, gauge
from sgl_ext.engine.scheduler.state import is_entry_rank, state_of

MEMORY_BYTES = 64 * 1024 * 1024
"""The tokens of finished requests that an engine keeps to draft from."""

_TABLE = "draft_memory"


@dataclass(slots=True)
class Drafting:
    """What is known of one request, for as long as SGLang has it.

    log: its tokens; None until its first step of decoding. rewritten: those of its prompt, as the
        model would write them again. may: whether drafts are looked for.
    key: under which it leaves its tokens, and finds those of others; None: under none.
    """

    may: bool
    key: Hashable | None
    labels: tuple[str, str]
    log: TokenLog | None = None
    rewritten: Tokens = field(default_factory=lambda: NOTHING)
    acceptance: Acceptance = field(default_factory=Acceptance)
    draft: Draft = NO_DRAFT


class Plan(NamedTuple):
    """What a step verifies. width: the tokens of each request, with the one that is due. lengths:
    how many of each request's are drafted. tokens: of each request, the due one and the draft."""

    width: int
    lengths: list[int]
    tokens: list[list[int]]


class Drafter:
    """The drafts of one scheduler. All ranks of it make the same ones, as long as they are given
    the same times.

    scope: whose tokens a request may draft from beside its own: `request`, none; `session`, those
        of its session; `group`, those of its cache group.
    rewriter: None: prompts are searched as they are.
    """

    def __init__(self, scope: str, widths: Sequence[int], rewriter: Rewriter | None = None) -> None:
        self._rewriter = rewriter
        self.lengths = DraftLengths(widths)
        self.memory = DraftMemory(MEMORY_BYTES)
        self._scope = scope
        self._running: dict[int, Any] = {}
        self._counts: dict[tuple[str, tuple[str, str]], float] = {}
        self._steps = 0
        if is_entry_rank():
            gauge("table_limit").labels(_TABLE, "bytes").set(MEMORY_BYTES)

    def plan(self, reqs: Sequence[Any], pending: Sequence[Sequence[int]]) -> Plan:
        """What the next step verifies of these requests.

        pending: of each, the tokens that are accepted and not in its output yet.
        """
        found = [self._drafting(req) for req in reqs]
        batch = len(reqs)
        searches = not self.lengths.is_resting(batch)
        offers, due = list[Offer](), list[int]()
        for req, drafting, tokens in zip(reqs, found, pending, strict=True):
            due.append(tokens[-1] if tokens else req.output_ids[-1])
            drafting.draft = NO_DRAFT
            if searches and drafting.may:
                drafting.draft = self._search(req, drafting, tokens)
                if drafting.draft.matched:
                    offers.append(self._offer(drafting))
        width = self.lengths.choose(batch, offers) if searches else 1
        lengths, rows = list[int](), list[list[int]]()
        for token, drafting in zip(due, found, strict=True):
            drafted = drafting.draft.tokens[: width - 1].tolist() if width > 1 else []
            lengths.append(len(drafted))
            rows.append([token, *drafted])
        return Plan(width, lengths, rows)

    def verified(self, reqs: Sequence[Any], sent: Sequence[int], right: Sequence[int]) -> None:
        """What came of a step: how many drafted tokens of each request were sent and right."""
        for req, sent_tokens, right_tokens in zip(reqs, sent, right, strict=True):
            drafting = self._drafting(req)
            if sent_tokens:
                matched = drafting.draft.matched
                self.lengths.verified(matched, sent_tokens, right_tokens, drafting.acceptance)
            self._count("draft_steps", drafting, 1)
            self._count("drafted_tokens", drafting, sent_tokens)
            self._count("accepted_drafts", drafting, right_tokens)
        self._steps += 1
        if self._steps % 32 == 0:
            self.show()

    def began(self, reqs: Sequence[Any]) -> None:
        """These requests run in this step. The tokens of those that have ended since are left to
        later ones."""
        now = {id(req): req for req in reqs}
        for key, req in list(self._running.items()):
            if key in now:
                continue
            if req.finished():
                self._leave(self._drafting(req), req)
                del self._running[key]
            elif req.is_retracted:
                del self._running[key]
        self._running |= now

    def clear(self) -> None:
        """Forgets what finished requests left."""
        self.memory.clear()

    def show(self) -> None:
        """Adds what was counted to the metrics. Once for many steps: a step takes less time."""
        if is_entry_rank():
            for (name, labels), amount in self._counts.items():
                counter(name).labels(*labels).inc(amount)
            gauge("table_size").labels(_TABLE, "bytes").set(self.memory.bytes)
        self._counts.clear()

    def _count(self, name: str, drafting: Drafting, amount: int) -> None:
        if amount:
            key = name, drafting.labels
            self._counts[key] = self._counts.get(key, 0.0) + amount

    def _offer(self, drafting: Drafting) -> Offer:
        draft = drafting.draft
        return self.lengths.offer(len(draft.tokens), draft.matched, drafting.acceptance)

    def _search(self, req: Any, drafting: Drafting, pending: Sequence[int]) -> Draft:
        prompt, written = len(req.origin_input_ids_unpadded), len(req.output_ids)
        log = drafting.log
        if log is None or not prompt <= log.total <= prompt + written + len(pending):
            log = drafting.log = TokenLog(req.origin_input_ids_unpadded)
            if self._rewriter is not None:
                drafting.rewritten = self._rewriter.rewrite(log.tokens)
        new = log.total - prompt
        log.extend([*req.output_ids[new:], *pending[max(0, new - written) :]])
        left = req.sampling_params.max_new_tokens - written - len(pending)
        most = min(self.lengths.most, left - 1)
        if most < 1:
            return NO_DRAFT
        recalled = self.memory.recall(drafting.key) if drafting.key else NOTHING
        return find_draft(log, recalled, most, drafting.rewritten)

    def _leave(self, drafting: Drafting, req: Any) -> None:
        log = drafting.log
        if drafting.key is None:
            return
        if log is None:
            log = TokenLog(req.origin_input_ids_unpadded)
        log.extend(req.output_ids[max(0, log.total - len(req.origin_input_ids_unpadded)) :])
        if (gone := self.memory.leave(drafting.key, log)) and is_entry_rank():
            counter("draft_memory_dropped").inc(gone)

    def _drafting(self, req: Any) -> Drafting:
        state = state_of(req)
        if state.drafting is None:
            state.drafting = self._made(req, state)
        found: Drafting = state.drafting
        return found

    def _made(self, req: Any, state: Any) -> Drafting:
        hints = state.hints
        key: Hashable | None = None
        if self._scope == "group":
            key = (req.extra_key, req.cache_salt, req.lora_id)
        elif self._scope == "session" and hints is not None and hints.session:
            key = (req.extra_key, req.cache_salt, req.lora_id, hints.owner, hints.session)
        wants = hints is None or hints.drafts
        labels = ("", "") if hints is None else (hints.client, hints.turn)
        return Drafting(wants and may_draft(req), key if wants else None, labels)


def may_draft(req: Any) -> bool:
    """Whether drafts of a request can be verified as SGLang would have sampled its tokens.

    Penalties depend on the tokens before, and a processor of a client's may. Where they do, a
    step gives one token.
    """
    sampling = req.sampling_params
    return not (
        sampling.frequency_penalty
        or sampling.presence_penalty
        or sampling.repetition_penalty != 1.0
        or sampling.min_new_tokens
        or req.return_sampling_mask
        or req.input_embeds is not None
        or (req.custom_logit_processor and not _takes_places(sampling.custom_params))
    )


PLACE = "sgl_ext_place"
"""Of a custom logit processor's parameters: how many drafted tokens come before this row. That it
reads it, a processor says with PLACES in the parameters of its request."""

PLACES = "sgl_ext_places"


def _takes_places(parameters: Any) -> bool:
    return isinstance(parameters, dict) and PLACES in parameters
