"""Preemption: which running requests give their slot or memory to a more important one.

`scheduler.preemption` chooses the victims. SGLang preempts for a slot only; the extension also
preempts for memory, and chooses the victims that lose least. A victim is released as SGLang does
it, but its computed tokens stay in the tree, where they can be evicted like any others. While they
are there, the victim continues where it was.
"""

from scheduler.preemption import Running, victims
from sgl_ext.engine import sglang_api
from sgl_ext.engine.arguments import in_effect
from sgl_ext.engine.scheduler.extension import SchedulerExtension, extension_of
from sgl_ext.engine.scheduler.priority import applies
from sgl_ext.engine.scheduler.state import compare, is_plain, state_of
from sgl_ext.engine.sglang_types import Original, PrefillAdder, Req, TreeCache


def preempt_for_slot(original: Original, adder: PrefillAdder, req: Req) -> bool:
    """Around `PrefillAdder.preempt_to_schedule`, which SGLang calls when all slots are taken."""
    extension = extension_of(adder.tree_cache)
    if extension.pins is None or not applies(req):
        return bool(original(adder, req))
    return preempt(extension, adder, req, slots=1)


def preempt_for_memory(extension: SchedulerExtension, adder: PrefillAdder, req: Req) -> bool:
    """Whether running requests were preempted for a request whose prefix was just matched.

    Releasing a victim evicts, so what was matched is locked meanwhile, on the host too. It also
    must not count as memory that the request could take, nor does it in SGLang's own check.
    """
    if not applies(req):
        return False
    on_host = req.needs_host_load_back()
    node = req.best_match_node if on_host else req.last_node
    with adder._lock_node(node, lock_host=on_host):
        return preempt(extension, adder, req)


def preempt(extension: SchedulerExtension, adder: PrefillAdder, req: Req, slots: int = 0) -> bool:
    """Whether running requests were preempted to give `req` the memory that it lacks, and as many
    slots."""
    pins, batch = extension.pins, adder.running_batch
    if pins is None or not applies(req) or batch is None:
        return False
    settings = extension.settings
    highest = req.priority - settings.preemption_threshold
    candidates = [
        (index, one)
        for index, one in enumerate(batch.reqs)
        if (admission := state_of(one).admission) is not None
        and admission.step <= highest
        and not one.finished()
        # With overlap its last token may be computed already. It frees its memory in a step.
        and not one.next_output_finishes_by_length()
        and one not in adder.preempt_list
        and one.beam_group is None
        and extension.preemptions.allows(req.rid, one.rid)
    ]
    chosen = victims(
        [_running(adder, one) for _, one in candidates],
        max(_missing_tokens(adder, req), 0),
        req.priority,  # a request preempts by its priority, not by the step it reached by waiting
        pins.now_s,
        slots=slots,
        threshold=settings.preemption_threshold,
        grace_s=settings.preemption_grace_s,
    )
    if not chosen:
        return False
    for number in chosen:
        extension.preemptions.record(req.rid, candidates[number][1].rid)
    _release(extension, adder, [candidates[number][0] for number in chosen])
    return True


def _missing_tokens(adder: PrefillAdder, req: Req) -> int:
    """How much more memory a request needs: the rest of its prompt and its answer, counted as
    SGLang counts them."""
    answer = max(req.sampling_params.max_new_tokens - len(req.output_ids), 0)
    prompt = len(req.full_untruncated_fill_ids) - req.prefix_len
    wanted = prompt + min(answer, sglang_api.CLIP_MAX_NEW_TOKENS) + adder.per_req_token_overhead
    return int(wanted - adder.rem_total_tokens) + 1


def _release(extension: SchedulerExtension, adder: PrefillAdder, indices: list[int]) -> None:
    """Releases the running requests at these places, as SGLang does for a slot: the scheduler
    queues them again."""
    batch = adder.running_batch
    assert batch is not None, "victims run"
    gone = set(indices)
    for count, index in enumerate(sorted(gone), start=1):
        one = batch.reqs[index]
        compare("preempted %s", one.rid)
        extension.count("preempted_requests")
        extension.count("preempted_tokens", len(one.output_ids))
        state_of(one).times_preempted += 1
        adder.memory_budget.total_offset -= adder._get_running_request_total_token_offset(one)
        adder.preempt_list.append(one)
        _store(adder.tree_cache, one)
        batch.release_req(index, len(batch.reqs) - count)
    batch.filter_batch(keep_indices=[n for n in range(len(batch.reqs)) if n not in gone])


def _store(cache: TreeCache, req: Req) -> None:
    """Stores a victim's computed tokens in the tree, except those that may still be computed."""
    state_of(req).computed_tokens = req.kv.kv_committed_len
    if req.skip_radix_cache_insert or req.input_embeds is not None or not is_plain(cache):
        return
    req.refresh_fill_ids()
    cache.checkpoint(req, up_to=min(req.owned_kv_len(), len(req.full_untruncated_fill_ids)))


def count_recomputed(extension: SchedulerExtension, req: Req) -> None:
    """Counts, as a request is admitted, the tokens that a preemption makes it compute again."""
    state = state_of(req)
    if state.computed_tokens > req.prefix_len:
        extension.count("recomputed_tokens", state.computed_tokens - req.prefix_len)
    state.computed_tokens = 0


def interrupts(extension: SchedulerExtension, adder: PrefillAdder, req: Req) -> bool:
    """Whether a chunked prefill was put back into the queue before its next chunk, because a much
    more important request waits. Its computed tokens are cached, so it loses only its turn."""
    first, admission = extension.first_waiting, state_of(req).admission
    if first is None or admission is None or extension.pins is None or not applies(req):
        return False
    if admission.step > first.priority - extension.settings.preemption_threshold:
        return False
    cache = adder.tree_cache
    if not (_can_be_interrupted(req) and is_plain(cache)):
        return False
    compare("interrupted %s", req.rid)
    extension.count("prefills_interrupted")
    state_of(req).computed_tokens = req.prefix_len
    sglang_api.release_req(
        req=req,
        remaing_req_count=0,
        req_to_token_pool=cache.req_to_token_pool,
        token_to_kv_pool_allocator=cache.token_to_kv_pool_allocator,
        tree_cache=cache,
        hisparse_coordinator=None,
    )
    adder.preempt_list.append(req)
    return True


def _can_be_interrupted(req: Req) -> bool:
    """Not a request with several answers, nor one for which SGLang accounts chunk by chunk."""
    is_alone = req.session is None and req.beam_group is None and not req.skip_radix_cache_insert
    return bool(is_alone and not req.return_logprob and in_effect().pp_size == 1)


def _running(adder: PrefillAdder, req: Req) -> Running:
    state = state_of(req)
    assert state.admission is not None, "only admitted requests are candidates"
    return Running(
        priority=state.admission.step,
        frees_tokens=_freed_tokens(adder, req),
        lost_tokens=len(req.output_ids),
        admitted_s=state.admission.at_s,
        times_preempted=state.times_preempted,
    )


def _freed_tokens(adder: PrefillAdder, req: Req) -> int:
    """The memory that a request alone holds, and the memory that is reserved for it."""
    cache, kv = adder.tree_cache, req.kv
    own = kv.kv_allocated_len - kv.cache_protected_len
    if is_plain(cache):
        before = cache.full_evictable_size()
        cache.unlock(req.lock)
        own += cache.full_evictable_size() - before
        req.lock = cache.lock(req.last_node)
    return int(own + adder._get_running_request_total_token_offset(req))
