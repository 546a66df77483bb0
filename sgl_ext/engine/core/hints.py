"""What the HTTP process knows of a request, on its way to the scheduler.

    HTTP process   attach          writes an action into the request's kv_hints
    scheduler      decode_hints    reads it once, into the request's state

SGLang carries `kv_hints` from one process to the other and reads none of them. The action's id is
the name of the engine's own folder, which no client knows, so no client can forge an action.
"""

from __future__ import annotations

import time
from array import array
from base64 import b64decode, b64encode
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

from sgl_ext.engine import sglang_api
from sgl_ext.engine.core import acknowledgements
from sgl_ext.engine.core.request_context import RequestContext
from sgl_ext.engine.sglang_http_types import GenerateReqInput, KvHintAction, KvHintsEnvelope

_ACTION = "sgl_ext.hints"
_HASH_BYTES = 16


class Hints(NamedTuple):
    """What the scheduler knows of a request. `hashes` and `ends` are those of its `Chain`.

    pins: as in `RequestContext`. sent_s: the HTTP process's monotonic clock when it was sent.
    queued_s: how long it had waited in the balancer by then.
    is_reusable: whether the client may come back for the prompt's prefix.
    output_tokens: the length of answer that the client expects, None if it does not say.
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


class LazyNumbers(Sequence[int]):
    """Numbers that are decoded at first use, which is after the first token was sent."""

    def __init__(self, decode: Callable[[], Sequence[int]]) -> None:
        self._decode = decode

    @cached_property
    def _numbers(self) -> Sequence[int]:
        return self._decode()

    def __getitem__(self, at: Any) -> Any:
        return self._numbers[at]

    def __len__(self) -> int:
        return len(self._numbers)


def attach(request: GenerateReqInput, context: RequestContext) -> None:
    """Adds the hints of `context` to the actions of SGLang's request.

    A batch, whose prompts have one envelope each, and malformed hints, which SGLang rejects, stay
    as they are.
    """
    own = request.kv_hints
    if isinstance(own, list):
        return
    try:
        envelope = sglang_api.decode_kv_hints_envelope(own) if own else None
    except ValueError:
        return
    request.kv_hints = sglang_api.KvHintsEnvelope(
        protocol_version=envelope.protocol_version if envelope else "1",
        message_id=envelope.message_id if envelope else "",
        actions=[*(envelope.actions if envelope else ()), _encode(context)],
    )


def _secret() -> str:
    return acknowledgements.folder().name


def _encode(context: RequestContext) -> KvHintAction:
    return sglang_api.KvHintAction(
        action_id=_secret(),
        action_type=_ACTION,
        action_version="1",
        payload={
            "hashes": _packed(context.chain.hashes),
            "ends": b64encode(array("Q", context.chain.ends).tobytes()).decode(),
            "pins": [list(pin) for pin in context.pins],
            "owner": context.owner,
            "session": context.session,
            "sent_s": time.monotonic(),
            "is_reusable": context.marks.keep,
            "is_last": context.is_last,
            "is_answer_reusable": context.is_answer_reusable,
            "output_tokens": context.importance.output_tokens,
            "priority": context.importance.priority,
            "queued_s": context.queued_s,
        },
    )


def decode_hints(envelope: KvHintsEnvelope | None) -> Hints | None:
    """The hints in the `kv_hints` of a scheduler's request, if there are any."""
    for action in envelope.actions if envelope is not None else ():
        if action.action_type == _ACTION and action.action_id == _secret():
            fields = dict(action.payload)
            return Hints(
                hashes=LazyNumbers(partial(_hashes, fields.pop("hashes"))),
                ends=LazyNumbers(partial(_ends, fields.pop("ends"))),
                pins=tuple((int(tokens), float(ttl_s)) for tokens, ttl_s in fields.pop("pins")),
                **fields,
            )
    return None


def _packed(hashes: Sequence[int]) -> str:
    return b64encode(b"".join([segment.to_bytes(_HASH_BYTES) for segment in hashes])).decode()


def _hashes(encoded: str) -> tuple[int, ...]:
    hashes = b64decode(encoded)
    starts = range(0, len(hashes), _HASH_BYTES)
    return tuple(int.from_bytes(hashes[s : s + _HASH_BYTES]) for s in starts)


def _ends(encoded: str) -> tuple[int, ...]:
    return tuple(array("Q", b64decode(encoded)))
