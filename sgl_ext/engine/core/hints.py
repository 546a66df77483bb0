"""What was read off a request, on its way from the HTTP body to the cache that stores its prompt.

    HTTP process   read_body -> keep            what the body says, in the request's own context
                   generate_request -> attach   an action of the request's kv_hints
    scheduler      checkpoint -> carried        read once, and kept on the request

SGLang carries `kv_hints` from the one to the other and reads none of them. The action's
id is the name of the engine's receipts folder, which no client knows: an action that a
client made up is not taken for ours.
"""

from __future__ import annotations

import time
from array import array
from base64 import b64decode, b64encode
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any, NamedTuple

from sgl_ext.engine import sglang_api
from sgl_ext.engine.core import acknowledgements
from sgl_ext.engine.core.counters import counter
from sgl_ext.engine.core.dry_run import stop_copy
from sgl_ext.engine.core.isolation import group_of, isolate
from sgl_ext.engine.core.slices import is_slice
from sgl_ext.requests.cache_marks import Marks
from sgl_ext.requests.chain_header import HASH_BYTES, bytes_of
from sgl_ext.requests.priority import USUAL, Importance
from sgl_ext.requests.segments import Chain

MAX_SEGMENTS = 16_384
WHOLE = -1
"""In place of a number of tokens: all of the prompt."""
_ACTION = "sgl_ext.hints"
_ON_REQUEST = "_sgl_ext_hints"


@dataclass(slots=True)
class Reading:
    """What one HTTP request asks for.

    pins: for each part of the prompt to be kept, the tokens up to its end, and for
        how many seconds; ascending. Known once the prompt is rendered.
    owner, session: who is told to have pinned it. The first is charged for it.
    group: with whom it shares cached prefixes; None: with all who are of no group.
    is_last: the client says that this conversation ends here.
    conversation: a number for it, equal for all its turns; None if nothing tells it.
    ending: why the answer ended, in SGLang's words, and what ended it.
    is_answer_kept: whether the next turn will begin with the answer as it was generated.
    """

    path: str
    body: Any
    chain: Chain
    marks: Marks
    importance: Importance = USUAL
    owner: str = ""
    session: str = ""
    is_last: bool = False
    is_answer_kept: bool = True
    pins: tuple[tuple[int, float], ...] = ()
    is_sent: bool = False
    ending: tuple[str | None, Any] | None = None
    conversation: int | None = None
    group: str | None = None


_current: ContextVar[Reading | None] = ContextVar("sgl_ext_reading", default=None)
_watchers: list[Callable[[Reading, Any], None]] = []


class Hints(NamedTuple):
    """What the scheduler knows of a request. `hashes` and `ends` are as `Chain` means them.

    pins: as `Reading` means them. told_s: the entry rank's monotonic clock, when it was sent.
    is_kept: whether the client may come back for it.
    output_tokens: how long an answer it expects, None if it does not say.
    """

    hashes: Sequence[int]
    ends: Sequence[int]
    pins: tuple[tuple[int, float], ...]
    owner: str
    session: str
    told_s: float
    is_kept: bool
    is_last: bool
    is_answer_kept: bool
    output_tokens: int | None = None
    priority: int = 0


class Unread(Sequence[int]):
    """Numbers that are read when they are first asked for: not before the first token is sent."""

    def __init__(self, read: Callable[[], Sequence[int]]) -> None:
        self._read = read

    @cached_property
    def _numbers(self) -> Sequence[int]:
        return self._read()

    def __getitem__(self, at: Any) -> Any:
        return self._numbers[at]

    def __len__(self) -> int:
        return len(self._numbers)


def keep(reading: Reading) -> None:
    """Remembers what was read of the request whose context this is."""
    if len(reading.chain.hashes) > MAX_SEGMENTS:
        counter("chains_left_out").inc()
        reading.chain = Chain()
    _current.set(reading)


def current() -> Reading | None:
    """What was read of the request whose context this is."""
    return _current.get()


def watch_requests(action: Callable[[Reading, Any], None]) -> None:
    """Has `action` called with what was read of each HTTP request, and with SGLang's request,
    before its first generation."""
    _watchers.append(action)


def attach(manager: Any, request: Any, raw_request: Any = None, *_: Any, **__: Any) -> None:
    """Before `TokenizerManager.generate_request`: puts what was read on its request.

    The first generation of an HTTP request takes it: later ones (a tool loop
    inside the engine) have another prompt. A copy of a request goes no further. All
    are put into the name space of their cache group.
    """
    reading = _current.get()
    if not is_slice(request):  # which has it from the request it is a slice of
        isolate(manager, request, group_of(reading, raw_request))
    stop_copy(request, reading)
    if reading is None:
        return
    if not reading.is_sent and not is_slice(request):
        for watch in _watchers:
            watch(reading, request)
    if manager is not None and manager.enable_priority_scheduling and hasattr(request, "priority"):
        request.priority = reading.importance.priority
    # A session's prompt is more than the body says.
    if not hasattr(request, "kv_hints") or request.session_params is not None:
        return
    # Tasks that the request starts copy its context, so it is marked and not taken out.
    if reading.is_sent or not (reading.chain.hashes or reading.pins or reading.owner):
        return
    reading.is_sent = True
    own = request.kv_hints
    if isinstance(own, list):  # of a batch: one prompt has one envelope
        return
    try:
        envelope = sglang_api.decode_kv_hints_envelope(own) if own else None
    except ValueError:
        return  # SGLang refuses the request in its own words
    request.kv_hints = sglang_api.KvHintsEnvelope(
        protocol_version=envelope.protocol_version if envelope else "1",
        message_id=envelope.message_id if envelope else "",
        actions=[*(envelope.actions if envelope else ()), _packed(reading)],
    )


@cache
def _secret() -> str:
    return acknowledgements.folder().name


def _packed(reading: Reading) -> Any:
    return sglang_api.KvHintAction(
        action_id=_secret(),
        action_type=_ACTION,
        action_version="1",
        payload={
            "hashes": b64encode(bytes_of(reading.chain.hashes)).decode(),
            "ends": b64encode(array("Q", reading.chain.ends).tobytes()).decode(),
            "pins": [list(pin) for pin in reading.pins],
            "owner": reading.owner,
            "session": reading.session,
            "told_s": time.monotonic(),
            "is_kept": reading.marks.keep,
            "is_last": reading.is_last,
            "is_answer_kept": reading.is_answer_kept,
            "output_tokens": reading.importance.output_tokens,
            "priority": reading.importance.priority,
        },
    )


def carried(request: Any) -> Hints | None:
    """The hints that the scheduler's request `request` carries, if any."""
    if not hasattr(request, _ON_REQUEST):
        setattr(request, _ON_REQUEST, _unpacked(request.kv_hints))
    found: Hints | None = getattr(request, _ON_REQUEST)
    return found


def _unpacked(envelope: Any) -> Hints | None:
    for action in envelope.actions if envelope is not None else ():
        if action.action_type == _ACTION and action.action_id == _secret():
            told = action.payload
            return Hints(
                Unread(partial(_hashes, told["hashes"])),
                Unread(partial(_ends, told["ends"])),
                tuple((int(tokens), float(ttl_s)) for tokens, ttl_s in told["pins"]),
                told["owner"],
                told["session"],
                told["told_s"],
                told["is_kept"],
                told["is_last"],
                told["is_answer_kept"],
                told["output_tokens"],
                told["priority"],
            )
    return None


def _hashes(packed: str) -> tuple[int, ...]:
    hashes = b64decode(packed)
    starts = range(0, len(hashes), HASH_BYTES)
    return tuple(int.from_bytes(hashes[s : s + HASH_BYTES], "big") for s in starts)


def _ends(packed: str) -> tuple[int, ...]:
    return tuple(array("Q", b64decode(packed)))
