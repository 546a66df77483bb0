"""What the HTTP process knows of a request, on its way to the scheduler.

    HTTP process   attach          writes an action into the request's kv_hints
    scheduler      decode_hints    reads it once, into the request's state

SGLang carries `kv_hints` from one process to the other and reads none of them. The action's id is
the engine's name, which no client knows, so no client can forge an action.

Slices of prompts that are prefilled ahead are requests with names that no client can forge.
"""

import time
from typing import Any
from uuid import uuid4

import xxhash

from sgl_ext.engine import sglang_api
from sgl_ext.engine.core.folder import engine_name, secret
from sgl_ext.engine.core.request_context import RequestContext, conversation_name
from sgl_ext.engine.sglang_http_types import GenerateReqInput, KvHintAction, KvHintsEnvelope
from sgl_ext.reading.client import COMPACTION
from sgl_ext.reading.segments import Chain
from sgl_ext.wire.hints import Hints, hints_in, payload_of

_MARK = "~sgl_ext-ahead-"
_DIGEST = 16
_END_DIGITS = 8


def slice_name(
    *,
    is_guess: bool,
    is_forced: bool,
    conversation: str = "",
    prompt: str = "",
    end: int = 0,
    purpose: str = "",
    request_id: str = "",
) -> str:
    """A new name for a slice.

    conversation: whose next request will read it, as `digest` names it; "" if it is not counted.
    prompt: a `digest` that all slices of one prompt share. end: how many of its tokens the slice
        has, however many are sent with it.
    is_guess: the extension guessed the prompt; no client asked for it.
    is_forced: it runs even if all of it is cached, so that its hints are recorded.
    purpose, request_id: why it runs, and for which request; log lines show them.
    """
    kind = f"{'g' if is_guess else 'a'}{'f' if is_forced else '-'}"
    part = f"{prompt:-<{_DIGEST}}{end:0{_END_DIGITS}x}"
    about = f"{uuid4().hex}~{purpose}~{request_id}"
    return f"{secret(_MARK)}{kind}{conversation:-<{_DIGEST}}{part}{about}"


def digest(name: str) -> str:
    """A short name in place of a long one."""
    return xxhash.xxh3_64_hexdigest(name.encode("utf-8", "surrogatepass"))


def conversation_of(slice_: Any) -> str:
    """The conversation whose next request will read a slice; "" if it is not counted."""
    begin = len(secret(_MARK)) + 2
    return str(slice_.rid[begin : begin + _DIGEST]).strip("-")


def part_of(slice_: Any) -> tuple[str, int]:
    """The prompt that a slice is a part of, and how many of its tokens the slice has."""
    begin = len(secret(_MARK)) + 2 + _DIGEST
    end = begin + _DIGEST
    return slice_.rid[begin:end], int(slice_.rid[end : end + _END_DIGITS], 16)


def is_slice_name(name: Any) -> bool:
    """Whether a request of this name is a slice."""
    # The cheap check comes first: most requests are no slices, and this is called often.
    return isinstance(name, str) and name.startswith(_MARK) and name.startswith(secret(_MARK))


def is_slice(request: Any) -> bool:
    """Whether a request, of whatever kind, is a slice."""
    return is_slice_name(getattr(request, "rid", None))


def is_guess(request: Any) -> bool:
    """Whether a request is a slice of a guessed prompt."""
    return is_slice(request) and request.rid[len(secret(_MARK))] == "g"


def is_forced(request: Any) -> bool:
    """Whether a request is a slice that runs even if all of it is cached."""
    return is_slice(request) and request.rid[len(secret(_MARK)) + 1] == "f"


_ACTION = "sgl_ext.hints"


def attach(request: GenerateReqInput, context: RequestContext) -> None:
    """Adds the hints of `context` to the actions of SGLang's request, in a batch to those of each
    prompt.

    A batch whose prompts have one envelope each, and malformed hints, which SGLang rejects, stay
    as they are.
    """
    own = request.kv_hints
    if isinstance(own, list):
        return
    try:
        envelope = sglang_api.decode_kv_hints_envelope(own) if own else None
    except ValueError:
        return
    if context.batch and _prompts_of(request) == len(context.batch):
        request.kv_hints = [_with(envelope, context, chain) for chain in context.batch]
    else:
        request.kv_hints = _with(envelope, context, context.chain)


def _prompts_of(request: GenerateReqInput) -> int:
    prompts = request.text if request.text is not None else request.input_ids
    return len(prompts) if isinstance(prompts, list) else 1


def _with(
    envelope: KvHintsEnvelope | None, context: RequestContext, chain: Chain
) -> KvHintsEnvelope:
    return sglang_api.KvHintsEnvelope(
        protocol_version=envelope.protocol_version if envelope else "1",
        message_id=envelope.message_id if envelope else "",
        actions=[*(envelope.actions if envelope else ()), _encode(context, chain)],
    )


def _encode(context: RequestContext, chain: Chain) -> KvHintAction:
    conversation = conversation_name(context)
    hints = Hints(
        hashes=chain.hashes,
        ends=chain.ends,
        pins=context.pins,
        owner=context.owner,
        session=context.session,
        sent_s=time.monotonic(),
        is_reusable=context.marks.keep,
        is_last=context.is_last,
        # No prompt has a summary behind what it sums up.
        is_answer_reusable=context.is_answer_reusable and context.summary is None,
        output_tokens=context.importance.output_tokens,
        priority=context.importance.priority,
        queued_s=context.queued_s,
        is_demoted=context.is_demoted,
        conversation=digest(conversation) if conversation else "",
        window_s=context.window_s,
        drafts=context.importance.drafts,
        client=context.facts.harness,
        turn=context.facts.request_class if context.summary is None else COMPACTION,
        due_s=context.importance.due_s,
    )
    return sglang_api.KvHintAction(
        action_id=engine_name(),
        action_type=_ACTION,
        action_version="1",
        payload=payload_of(hints),
    )


def decode_hints(envelope: KvHintsEnvelope | None) -> Hints | None:
    """The hints in the `kv_hints` of a scheduler's request, if there are any."""
    for action in envelope.actions if envelope is not None else ():
        if action.action_type == _ACTION and action.action_id == engine_name():
            return hints_in(action.payload)
    return None
