"""The worker that SGLang's scheduler gives its batches where drafts from context are on.

A prompt is computed as ever. A step of decoding first looks for drafts (`drafter`):

    nothing pays    one token for each request, as without drafts
    a draft pays    SGLang's pass of verification: the due token and the drafted ones, a chain

After a chain's pass each of its places has the logits that follow it. The sampler draws a token at
each place as it would alone: with the request's temperature, limits, bias, grammar and seed. The
drafted tokens count up to the first that differs from the one drawn, and the one drawn there takes
its place. So each token is drawn from the distribution that it has without drafts, and with a seed
it is the same token: this is rejection sampling for a draft that is certain.
"""

import time
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from radix.draft_rewriting import Rewriter, writes_json
from sgl_ext.engine import arguments, sglang_api
from sgl_ext.engine.drafts.drafter import PLACE, Drafter, Plan
from sgl_ext.settings.schema import EngineSettings

WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""The widths of steps where each can have its own; a GPU has graphs of one width."""


def worker_class() -> type:
    """The class of the worker: it extends one of SGLang's."""
    torch: Any = import_module("torch")

    class ContextDraftWorker(sglang_api.BaseSpecWorker):  # type: ignore[misc]  # sglang is untyped
        """Verifies drafts with the target model, on the scheduler's way of NGRAM."""

        draft_worker = None

        def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any):
            super().__init__()
            del server_args, gpu_id, nccl_port
            in_effect = arguments.in_effect()
            self._target_worker = target_worker
            self.model_runner = target_worker.model_runner
            self.speculative_num_draft_tokens = in_effect.speculative_num_draft_tokens
            self.device = self.model_runner.device
            self._overlaps = not in_effect.disable_overlap_schedule
            self._stride = most = int(self.speculative_num_draft_tokens or 1)
            is_cpu = torch.device(self.device).type == "cpu"
            widths = {1, most} | ({width for width in WIDTHS if width < most} if is_cpu else set())
            scope = EngineSettings.from_environment().draft_from_context
            rewriter = rewriter_of(target_worker.tokenizer, in_effect.chat_template)
            self.drafter = Drafter(scope, sorted(widths), rewriter)
            self._group = _ranks(torch)
            # The last step, if it decoded: its batch, width, and when it began.
            self._last: tuple[int, int, float] | None = None

        def alloc_memory_pool(self, **kw: Any) -> None:
            del kw
            pool, allocator = self._target_worker.get_memory_pool()
            self.req_to_token_pool, self.token_to_kv_pool_allocator = pool, allocator

        def clear_cache_pool(self) -> None:
            self.drafter.clear()

        def add_external_corpus(self, corpus_id: str, token_chunks: Any) -> int:
            raise ValueError("drafts from context take no external corpus")

        def list_external_corpora(self) -> dict[str, int]:
            return {}

        def forward_batch_generation(
            self, batch: Any, on_publish: Any = None, pp_proxy_tensors: Any = None
        ) -> Any:
            stream = torch.get_device_module(self.device).current_stream()
            sglang_api.record_stream_for_v2_verify(batch, None, stream)
            self.drafter.began(batch.reqs)
            if not batch.forward_mode.is_decode():
                self._last = None
                return self._prefill(batch, on_publish, pp_proxy_tensors)
            self._measure(len(batch.reqs))
            plan = self.drafter.plan(batch.reqs, self._pending(batch))
            assert self._last is not None
            self._last = (*self._last[:1], plan.width, self._last[2])
            step = self._single if plan.width == 1 else self._chain
            return step(batch, plan, on_publish, pp_proxy_tensors)

        def _measure(self, batch: int) -> None:
            """Notes how long the last step took, with all that the scheduler did in it. Ranks
            take the first one's time, so that they decide alike."""
            now_s = time.perf_counter()
            if self._last is not None:
                last_batch, width, began_s = self._last
                seconds = self._agreed(now_s - began_s)
                if last_batch == batch:
                    self.drafter.lengths.took(batch, width, seconds)
            self._last = (batch, 1, now_s)

        def _agreed(self, seconds: float) -> float:
            if self._group is None:
                return seconds
            group, first = self._group
            value = torch.tensor([seconds], dtype=torch.float64)
            torch.distributed.broadcast(value, src=first, group=group)
            return float(value.item())

        def _pending(self, batch: Any) -> list[list[int]]:
            """Of each request the tokens that were accepted and that its output lacks: with
            overlap scheduling those of the last step."""
            if not self._overlaps or batch.grammar_needs_sync():
                return [[] for _ in batch.reqs]
            tokens = batch.spec_info.accept_tokens.tolist()
            lengths = batch.spec_info.accept_lens.tolist()
            starts = range(0, len(tokens), self._stride)
            return [tokens[at : at + n] for at, n in zip(starts, lengths, strict=True)]

        def _prefill(self, batch: Any, on_publish: Any, pp_proxy_tensors: Any) -> Any:
            result = self._target_worker.forward_batch_generation(
                batch, pp_proxy_tensors=pp_proxy_tensors
            )
            ones = torch.ones(len(batch.reqs), dtype=torch.int32, device=self.device)
            lengths = batch.seq_lens.clone()
            return self._result(batch, result, result.next_token_ids, ones, lengths, on_publish)

        def _single(self, batch: Any, plan: Plan, on_publish: Any, pp_proxy_tensors: Any) -> Any:
            before = batch.seq_lens
            batch.input_ids = self._moved([row[0] for row in plan.tokens])
            table = batch.req_to_token_pool.req_to_token
            batch.out_cache_loc = table[batch.req_pool_indices.long(), before.long()].long()
            batch.seq_lens = before + 1
            batch.orig_seq_lens = (before + 1).to(batch.orig_seq_lens.dtype)
            if batch.seq_lens_cpu is not None:
                batch.seq_lens_cpu = batch.seq_lens_cpu + 1
            batch.seq_lens_sum, batch.spec_info = None, None
            if batch.sampling_info.has_custom_logit_processor:
                batch.sampling_info = replace(
                    batch.sampling_info, custom_params=_places(batch.sampling_info, 1)
                )
            result = self._target_worker.forward_batch_generation(
                batch, pp_proxy_tensors=pp_proxy_tensors
            )
            _a_row_each(result.logits_output, len(batch.reqs), 1)
            ones = torch.ones(len(batch.reqs), dtype=torch.int32, device=self.device)
            self.drafter.verified(batch.reqs, plan.lengths, plan.lengths)
            tokens = result.next_token_ids.view(-1, 1)
            return self._result(batch, result, tokens, ones, before + ones, on_publish)

        def _chain(self, batch: Any, plan: Plan, on_publish: Any, pp_proxy_tensors: Any) -> Any:
            width, rows = plan.width, len(batch.reqs)
            before = batch.seq_lens
            sent, mask = list(plan.lengths), None
            chains = [row + row[-1:] * (width - len(row)) for row in plan.tokens]
            if batch.has_grammar:
                mask, sent = self._allowed(batch, chains, sent)
            drafted = self._moved(chains)
            places = torch.arange(width, device=self.device)
            positions = before.long()[:, None] + places
            table = batch.req_to_token_pool.req_to_token
            batch.out_cache_loc = table[batch.req_pool_indices.long()[:, None], positions].view(-1)
            batch.out_cache_loc = batch.out_cache_loc.long()
            batch.forward_mode = sglang_api.ForwardMode.TARGET_VERIFY
            batch.input_ids = drafted.view(-1)
            batch.spec_info = self._verify_input(batch, drafted, positions)
            result = self._target_worker.forward_batch_generation(
                batch, pp_proxy_tensors=pp_proxy_tensors, is_verify=True
            )
            batch.forward_mode = sglang_api.ForwardMode.DECODE
            output = result.logits_output
            drawn = self._draw(batch, output, width, mask, positions.view(-1)).view(rows, width)
            right = right_drafts(drawn, drafted, self._moved(sent))
            _a_row_each(output, rows, width)
            accepted = (right + 1).to(torch.int32)
            # It waits for the pass, as the search for the next drafts would.
            self.drafter.verified(batch.reqs, sent, right.tolist())
            return self._result(batch, result, drawn, accepted, before + accepted, on_publish)

        def _draw(self, batch: Any, output: Any, width: int, mask: Any, positions: Any) -> Any:
            """A token at each place of each chain, as SGLang would sample it there alone."""
            info = _spread(torch, batch, width, mask)
            info.apply_logits_bias(output.next_token_logits)
            numbers = [n for n in batch.top_logprobs_nums or [] for _ in range(width)]
            ids = [n for n in batch.token_ids_logprobs or [] for _ in range(width)]
            return self.model_runner.sampler(
                output, info, batch.return_logprob, numbers, ids, positions
            )

        def _allowed(
            self, batch: Any, chains: list[list[int]], sent: list[int]
        ) -> tuple[Any, list[int]]:
            """The mask of a grammar at each place, and each draft up to what its grammar forbids;
            what comes after is not sent."""
            tree = sglang_api.GrammarTree.from_linear_chain(torch.tensor(chains))
            mask = sglang_api.build_grammar_vocab_mask(
                reqs=batch.reqs,
                tree=tree,
                sampling_info=batch.sampling_info,
                device=self.device,
                barrier=None,
            )
            bits = None if mask is None else mask.vocab_mask
            for at, req in enumerate(batch.reqs):
                if req.grammar is None or bits is None or bits.dtype != torch.int32:
                    continue
                for place in range(sent[at]):
                    token = chains[at][place + 1]
                    word = int(bits[at * len(chains[at]) + place, token // 32])
                    if not word >> (token % 32) & 1:
                        sent[at] = place
                        chains[at][place + 1 :] = chains[at][:1] * (len(chains[at]) - place - 1)
                        break
            return mask, sent

        def _verify_input(self, batch: Any, drafted: Any, positions: Any) -> Any:
            rows, width = drafted.shape
            chain = torch.ones(width, width, dtype=torch.bool, device=self.device).tril()
            if torch.device(self.device).type == "cpu":
                mask = chain  # the attention of the CPU platform sees chains as what they are
            else:
                parts = [
                    torch.cat((chain.new_ones(width, int(seen)), chain), 1).view(-1)
                    for seen in batch.seq_lens_cpu
                ]
                mask = torch.cat(parts)
            following = torch.arange(1, width + 1, device=self.device).repeat(rows, 1)
            following[:, -1] = -1
            index = torch.arange(rows * width, device=self.device).view(rows, width)
            return sglang_api.NgramVerifyInput(
                draft_token=drafted.view(-1),
                custom_mask=mask,
                positions=positions.view(-1),
                retrieve_index=index,
                retrieve_next_token=following,
                retrieve_next_sibling=torch.full_like(following, -1),
                draft_token_num=width,
            )

        def _moved(self, values: Any) -> Any:
            return torch.tensor(values, dtype=torch.int64).to(self.device, non_blocking=True)

        def _result(
            self, batch: Any, result: Any, tokens: Any, accepted: Any, lengths: Any, publish: Any
        ) -> Any:
            """What the scheduler gets: of each request so many tokens, padded to the stride."""
            rows, stride = len(batch.reqs), self._stride
            kept = torch.zeros(rows, stride, dtype=torch.int32, device=self.device)
            drawn = tokens.view(rows, -1)
            kept[:, : drawn.shape[1]] = drawn
            if publish is not None:
                publish(lengths)
            is_prefill = not batch.forward_mode.is_decode()
            return sglang_api.GenerationBatchResult(
                logits_output=result.logits_output,
                next_token_ids=tokens if is_prefill else kept.view(-1),
                can_run_cuda_graph=result.can_run_cuda_graph,
                accept_lens=accepted,
                new_seq_lens=lengths,
                next_draft_input=sglang_api.NgramVerifyInput(
                    draft_token_num=stride,
                    new_seq_lens=lengths,
                    accept_tokens=kept.view(-1),
                    accept_lens=accepted,
                ),
                speculative_num_draft_tokens=stride,
            )

    return ContextDraftWorker


def rewriter_of(tokenizer: Any, chat_template: str | None) -> Rewriter | None:
    """What rewrites prompts of a tokenizer; None for an engine without one.

    chat_template: the flag. The template says in which form the model writes calls."""
    if tokenizer is None:
        return None
    own = {}
    if chat_template is not None and Path(chat_template).is_file():
        own["chat_template"] = Path(chat_template).read_text()

    def render(messages: Any) -> str:
        text: str = tokenizer.apply_chat_template(messages, tokenize=False, **own)
        return text

    texts = [tokenizer.decode([token]) for token in range(len(tokenizer))]
    encode = partial(tokenizer.encode, add_special_tokens=False)
    return Rewriter(texts, encode, escapes=writes_json(render))


def right_drafts(drawn: Any, drafted: Any, sent: Any) -> Any:
    """How many drafted tokens of each chain count: those before the first that is not the token
    drawn at its place. drafted: the chains, with the due token. sent: how many are drafts."""
    same = drawn[:, :-1] == drafted[:, 1:]
    places = same.new_ones(same.shape[1:]).cumsum(0)
    return (same & (places <= sent[:, None])).int().cumprod(1).sum(1)


def _ranks(torch: Any) -> tuple[Any, int] | None:
    """The ranks that must decide alike, as a group on the host, and the first of them."""
    group = sglang_api.get_parallel().tp_group
    return (group.cpu_group, group.ranks[0]) if group.world_size > 1 else None


def _a_row_each(output: Any, rows: int, width: int) -> None:
    """Puts log probabilities into the form that SGLang reads after a verification."""
    if output.next_token_logprobs is not None:
        output.next_token_logprobs = output.next_token_logprobs.view(rows, width)


def _places(info: Any, width: int) -> list[Any]:
    """The parameters of custom processors for each place of each request."""
    return [
        {**one, PLACE: place} if isinstance(one, dict) else one
        for one in info.custom_params
        for place in range(width)
    ]


def _spread(torch: Any, batch: Any, width: int, mask: Any) -> Any:
    """The sampling parameters of a batch for `width` places of each request."""
    info = batch.sampling_info

    def each(values: Any) -> Any:
        return None if values is None else values.repeat_interleave(width, dim=0)

    processors, parameters = info.custom_logit_processor, info.custom_params
    if info.has_custom_logit_processor:
        parameters = _places(info, width)
        processors = {
            name: replace(
                entry,
                rows=[row * width + place for row in entry.rows for place in range(width)],
                indices=(
                    entry.indices[:, None] * width
                    + torch.arange(width, device=entry.indices.device)
                ).view(-1),
            )
            for name, entry in processors.items()
        }
    return replace(
        info,
        temperatures=each(info.temperatures),
        top_ps=each(info.top_ps),
        top_ks=each(info.top_ks),
        min_ps=each(info.min_ps),
        acc_additive_penalties=each(info.acc_additive_penalties),
        acc_scaling_penalties=each(info.acc_scaling_penalties),
        logit_bias=each(info.logit_bias),
        sampling_seed=each(info.sampling_seed),
        custom_params=parameters,
        custom_logit_processor=processors,
        grammars=info.grammars,  # a place that allows no token is then seen to
        grammar_mask=mask,
        penalizer_orchestrator=None,
    )
