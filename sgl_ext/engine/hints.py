"""A request's chain of segments on its way from the HTTP body to the cache that stores it.

    HTTP process   read_body -> keep            the chain, in the request's own context
                   generate_request -> attach   an action of the request's kv_hints
    scheduler      checkpoint -> carried        read once, and kept on the request

SGLang carries `kv_hints` from the one to the other and reads none of them. The action's
id is the name of the engine's receipts folder, which no client knows: an action that a
client made up is not taken for ours.
"""

from __future__ import annotations

from array import array
from base64 import b64decode, b64encode
from contextvars import ContextVar
from functools import cache
from typing import Any, NamedTuple

from sgl_ext.engine import receipts
from sgl_ext.engine.counters import counter
from sgl_ext.requests.segments import Chain

MAX_SEGMENTS = 16_384
_ACTION = "sgl_ext.segments"
_ON_REQUEST = "_sgl_ext_chain"
_HASH_BYTES = 16

# A list, because tasks that the request starts copy its context: whoever takes
# the chain out takes it from all of them.
_kept: ContextVar[list[Chain] | None] = ContextVar("sgl_ext_chain", default=None)


class Carried(NamedTuple):
    """A chain as the scheduler sees it; as `Chain` means them."""

    hashes: tuple[int, ...]
    ends: tuple[int, ...]


def keep(chain: Chain) -> None:
    """Remembers the chain of the request whose context this is."""
    if len(chain.hashes) > MAX_SEGMENTS:
        counter("chains_left_out").inc()
        chain = Chain()
    _kept.set([chain] if chain.hashes else None)


def attach(_: Any, request: Any, *__: Any, **___: Any) -> None:
    """Before `TokenizerManager.generate_request`: puts the chain kept here on its request.

    The first generation of an HTTP request takes it: later ones (a tool loop
    inside the engine) have another prompt.
    """
    kept = _kept.get()
    # A session's prompt is more than the body says.
    if not kept or not hasattr(request, "kv_hints") or request.session_params is not None:
        return
    chain = kept.pop()
    from sglang.srt.managers.kv_hints import KvHintsEnvelope, decode_kv_hints_envelope

    own = request.kv_hints
    if isinstance(own, list):  # of a batch: one prompt has one envelope
        return
    try:
        envelope = decode_kv_hints_envelope(own) if own else None
    except ValueError:
        return  # SGLang refuses the request in its own words
    request.kv_hints = KvHintsEnvelope(
        protocol_version=envelope.protocol_version if envelope else "1",
        message_id=envelope.message_id if envelope else "",
        actions=[*(envelope.actions if envelope else ()), _packed(chain)],
    )


@cache
def _secret() -> str:
    return receipts.folder().name


def _packed(chain: Chain) -> Any:
    from sglang.srt.managers.kv_hints import KvHintAction

    hashes = b"".join(segment.to_bytes(_HASH_BYTES, "big") for segment in chain.hashes)
    return KvHintAction(
        action_id=_secret(),
        action_type=_ACTION,
        action_version="1",
        payload={
            "hashes": b64encode(hashes).decode(),
            "ends": b64encode(array("Q", chain.ends).tobytes()).decode(),
        },
    )


def carried(request: Any) -> Carried | None:
    """The chain that the scheduler's request `request` carries, if any."""
    if not hasattr(request, _ON_REQUEST):
        setattr(request, _ON_REQUEST, _unpacked(request.kv_hints))
    found: Carried | None = getattr(request, _ON_REQUEST)
    return found


def _unpacked(envelope: Any) -> Carried | None:
    for action in envelope.actions if envelope is not None else ():
        if action.action_type == _ACTION and action.action_id == _secret():
            hashes = b64decode(action.payload["hashes"])
            starts = range(0, len(hashes), _HASH_BYTES)
            return Carried(
                tuple(int.from_bytes(hashes[s : s + _HASH_BYTES], "big") for s in starts),
                tuple(array("Q", b64decode(action.payload["ends"]))),
            )
    return None
