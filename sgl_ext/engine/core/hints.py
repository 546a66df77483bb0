"""What the HTTP process knows of a request, on its way to the scheduler.

    HTTP process   attach          writes an action into the request's kv_hints
    scheduler      decode_hints    reads it once, into the request's state

SGLang carries `kv_hints` from one process to the other and reads none of them. The action's id is
the engine's name, which no client knows, so no client can forge an action.
"""

import time
from collections.abc import Sequence
from typing import NamedTuple

from sgl_ext.engine import sglang_api
from sgl_ext.engine.core.folder import engine_name
from sgl_ext.engine.core.request_context import RequestContext, conversation_name
from sgl_ext.engine.core.slices import digest
from sgl_ext.engine.sglang_http_types import GenerateReqInput, KvHintAction, KvHintsEnvelope
from sgl_ext.reading.segments import Chain

_ACTION = "sgl_ext.hints"
_HASH_BYTES = 16


class Hints(NamedTuple):
    """What the scheduler knows of a request. `hashes` and `ends` are those of its `Chain`.

    pins: as in `RequestContext`. sent_s: the HTTP process's monotonic clock when it was sent.
    queued_s: how long it had waited in the balancer by then. window_s: how long a window of the
        balancer's queue was.
    is_reusable: whether the client may come back for the prompt's prefix.
    is_demoted: whether the session's pins on this prompt are to end.
    output_tokens: the length of answer that the client expects, None if it does not say.
    conversation: its `digest`; "" if it is unknown.
    """

    hashes: Sequence[int]
    ends: Sequence[int]
    pins: tuple[tuple[int, float], ...]
    owner: str
    session: str
    sent_s: float
    is_reusable: bool
    is_last: bool
    is_answer_reusable: bool
    output_tokens: int | None = None
    priority: int = 0
    queued_s: float = 0.0
    is_demoted: bool = False
    conversation: str = ""
    window_s: float = 0.0


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
        is_answer_reusable=context.is_answer_reusable,
        output_tokens=context.importance.output_tokens,
        priority=context.importance.priority,
        queued_s=context.queued_s,
        is_demoted=context.is_demoted,
        conversation=digest(conversation) if conversation else "",
        window_s=context.window_s,
    )
    packed = b"".join([segment.to_bytes(_HASH_BYTES) for segment in hints.hashes])
    return sglang_api.KvHintAction(
        action_id=engine_name(),
        action_type=_ACTION,
        action_version="1",
        payload=hints._asdict() | {"hashes": packed.hex()},
    )


def decode_hints(envelope: KvHintsEnvelope | None) -> Hints | None:
    """The hints in the `kv_hints` of a scheduler's request, if there are any."""
    for action in envelope.actions if envelope is not None else ():
        if action.action_type == _ACTION and action.action_id == engine_name():
            hints = Hints(**action.payload)
            packed = bytes.fromhex(action.payload["hashes"])
            starts = range(0, len(packed), _HASH_BYTES)
            return hints._replace(
                hashes=tuple([int.from_bytes(packed[s : s + _HASH_BYTES]) for s in starts]),
                pins=tuple((tokens, ttl_s) for tokens, ttl_s in hints.pins),
            )
    return None
