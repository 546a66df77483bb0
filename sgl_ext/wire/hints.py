"""What an engine's HTTP process and its scheduler say to each other about one request.

HTTP process --> scheduler   `Hints`: the payload of an action in SGLang's `kv_hints`, which
                             SGLang carries and does not read (`sgl_ext.engine.core.hints`)
scheduler --> HTTP process   why a slice of a prompt does not run: the message with which it is
                             aborted
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from scheduler.prefill import Rejection

_HASH_BYTES = 16


class Hints(NamedTuple):
    """What the scheduler knows of a request. `hashes` and `ends` are those of its `Chain`.

    pins: as in `RequestContext`. sent_s: the HTTP process's monotonic clock when it was sent.
    queued_s: how long it had waited in the balancer by then. window_s: how long a window of the
        balancer's queue was.
    is_reusable: whether the client may come back for the prompt's prefix.
    is_demoted: whether the session's pins on this prompt are to end.
    output_tokens: the length of answer that the client expects, None if it does not say.
    conversation: a short name of it; "" if it is unknown.
    due_s: how long after it arrived at the balancer its answer is due; None if it is not stated.
    drafts: whether its answer may be drafted from its context. client, turn: the harness that
        sent it, and what for, as metrics show them.
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
    drafts: bool = True
    client: str = ""
    turn: str = ""
    due_s: float | None = None


def payload_of(hints: Hints) -> dict[str, Any]:
    """The payload of an action. The hashes are one text: a number of 128 bits is no JSON."""
    packed = b"".join([segment.to_bytes(_HASH_BYTES) for segment in hints.hashes])
    return hints._asdict() | {"hashes": packed.hex()}


def hints_in(payload: Mapping[str, Any]) -> Hints:
    """The hints of an action of our own. Raises TypeError, KeyError or ValueError for another."""
    hints = Hints(**payload)
    packed = bytes.fromhex(payload["hashes"])
    if len(packed) % _HASH_BYTES:
        raise ValueError("hashes: they were cut")
    starts = range(0, len(packed), _HASH_BYTES)
    return hints._replace(
        hashes=tuple([int.from_bytes(packed[s : s + _HASH_BYTES]) for s in starts]),
        pins=tuple((tokens, ttl_s) for tokens, ttl_s in hints.pins),
    )


def rejection_message(why: Rejection, on_device: int, on_host: int) -> str:
    """Why a slice does not run, how many of its tokens are on the device, and how many after them
    the host would load."""
    return f"{why} {on_device} {on_host}"


def read_rejection(message: str) -> tuple[Rejection, int, int] | None:
    """The same; None for the message of another abort."""
    match message.split(" "):
        case why, on_device, on_host if why in set(Rejection):
            return Rejection(why), int(on_device), int(on_host)
    return None
