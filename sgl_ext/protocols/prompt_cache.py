"""Vendors' fields about the prompt cache: OpenAI's, and SGLang's `kv_hints`."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from sgl_ext.reading.cache_marks import LIMIT_MARKS, seconds_of
from sgl_ext.reading.protocol import CacheFields, FoundMark, Json, MalformedMark, Place

# OpenAI's fields about the prompt cache, on chat completions, responses and completions.
#
#     prompt_cache_options      {"mode", "ttl"}, for every breakpoint of the request
#     prompt_cache_breakpoint   {"mode": "explicit", "ttl"}, on a part of a message: a prefix ends
#                               here; without a TTL, it is that of the options
#     prompt_cache_retention    how long at most to keep the whole prompt; superseded by the first
#
# The mode "implicit" keeps the whole prompt, too. The mode "explicit" without a breakpoint keeps
# nothing. A request writes at most four breakpoints, the last ones. Earlier ones were written by
# the requests that had them last, and reading a prefix renews its lease. Of a conversation, OpenAI
# considers the last LIMIT_BREAKPOINTS; earlier ones are counted as ignored.
#
# They are part of the protocol, so a malformed one makes the request invalid, as it does at OpenAI.

FIELD = "prompt_cache_breakpoint"
LIMIT_BREAKPOINTS = 80
_OPTIONS, _RETENTION = "prompt_cache_options", "prompt_cache_retention"
_MODES = ("implicit", "explicit")
# `comparison_response_id` names a response to compare with, and keeps nothing.
_KNOWN = frozenset({"mode", "ttl", "comparison_response_id"})
_DEFAULT_TTL_S = 1800.0
_RETENTIONS_S = {"in_memory": None, "in-memory": None, "24h": 86_400.0}


def breakpoints_in(parts: Any, place: Place, field: str) -> Iterator[FoundMark]:
    """The breakpoints on a list's parts. `place` and `field` are those of the list."""
    for j, part in enumerate(parts if isinstance(parts, list) else ()):
        if isinstance(part, dict) and (control := part.get(FIELD)) is not None:
            yield FoundMark((*place, j), f"{field}.{j}.{FIELD}", part, control)


def read_fields(find: Callable[[Json], Iterable[FoundMark]], body: Json) -> CacheFields:
    """What a body's fields say; `find` yields its breakpoints in prompt order.

    Raises MalformedMark, which names the field.
    """
    options, retention = body.get(_OPTIONS), body.get(_RETENTION)
    if options is not None and retention is not None:
        raise MalformedMark(f"{_RETENTION}: must not be given together with {_OPTIONS}")
    mode, ttl_s = _read_options(options)
    found = list(find(body))
    for mark in found:
        if not isinstance(mark.control, dict) or mark.control.get("mode") != "explicit":
            raise MalformedMark(f"{mark.field}: must be an object whose `mode` is 'explicit'")
    is_whole = mode == "implicit"
    own_s = [_ttl_s(mark.field, mark.control, ttl_s) for mark in found]
    written = [*zip(found, own_s, strict=True)][-(LIMIT_MARKS - is_whole) :]
    fields = CacheFields(
        tuple((mark.place, each_s) for mark, each_s in written),
        ttl_s if is_whole else 0.0,
        keep=bool(found) or mode != "explicit",
        ignored=max(len(found) - LIMIT_BREAKPOINTS, 0),
    )
    if retention is None:
        return fields
    if not isinstance(retention, str) or retention not in _RETENTIONS_S:
        return fields._replace(ignored=fields.ignored + 1)
    return fields._replace(whole_s=_RETENTIONS_S[retention], is_least=False)


NO_PARTS = partial(read_fields, lambda body: ())
"""`read_fields` for a protocol whose prompt has no parts."""


def _read_options(options: Any) -> tuple[str, float]:
    """The mode, "" if there are no options, and the TTL of each breakpoint."""
    if options is None:
        return "", _DEFAULT_TTL_S
    if not isinstance(options, dict):
        raise MalformedMark(f"{_OPTIONS}: must be an object")
    for key, value in options.items():
        if key not in _KNOWN and value is not None:
            raise MalformedMark(f"{_OPTIONS}.{key[:40]}: is not supported")
    mode = options.get("mode")
    if mode is not None and mode not in _MODES:
        raise MalformedMark(f"{_OPTIONS}.mode: must be 'implicit' or 'explicit'")
    return mode or "implicit", _ttl_s(_OPTIONS, options, _DEFAULT_TTL_S)


def _ttl_s(field: str, given: Json, default_s: float) -> float:
    ttl = given.get("ttl")
    return default_s if ttl is None else seconds_of(f"{field}.ttl", ttl)


# SGLang's `kv_hints`: an envelope of versioned actions on the cached prefix of a request's prompt.
#
#     {"protocol_version": "0.1", "message_id": "m", "actions": [
#         {"action_id": "a", "action_type": "kv.pin", "action_version": "0.1", "payload": {...}}]}
#
# SGLang carries it and acts on none of it. Here these actions work, on every path with cache marks:
#
#     pin, retain   {"ttl"}: a lease on the whole prompt, as `nvext.cache_control` grants one
#     prefetch      {}: the conversation's next turn is prefilled after the answer
#     demote        {}: the session's pins on this prompt end, and what it adds is evicted first
#
# The type may have the prefix `kv.` or `kv_hint.`, and the suffix `.v1`. Other actions belong to
# other components, so they are counted and left in the envelope.

KV_HINTS = "kv_hints"
LIMIT_ACTIONS = 64
_PAYLOADS = {
    "pin": frozenset({"ttl"}),
    "retain": frozenset({"ttl"}),
    "prefetch": frozenset[str](),
    "demote": frozenset[str](),
}
_VERSIONS = ("", "0.1", "1", "1.0", "v1")
OTHER = "other"


@dataclass(frozen=True, slots=True)
class KvHints:
    """What a request's actions ask for.

    lease_s: how long to keep the whole prompt; None for the server's default, 0 for not at all.
    prefetches, demotes: whether there is such an action.
    error: why the request is invalid, or ""; nothing else counts then.
    counts: actions by their type; OTHER counts those that do not work here.
    """

    lease_s: float | None = 0.0
    prefetches: bool = False
    demotes: bool = False
    error: str = ""
    counts: Counter[str] = field(default_factory=Counter)


NO_HINTS = KvHints()


def read_kv_hints(body: Any) -> KvHints:
    """The hints in a parsed request body. Never raises.

    A list has an envelope for each prompt of a batch, which have no pins of their own: its actions
    count as OTHER.
    """
    envelope = body.get(KV_HINTS) if isinstance(body, dict) else None
    if envelope is None or envelope == {}:
        return NO_HINTS
    try:
        if isinstance(envelope, list):
            several = [_actions(each) for each in envelope if each is not None]
            return KvHints(counts=Counter({OTHER: sum(map(len, several))}))
        return _read(_actions(envelope))
    except MalformedMark as error:
        return KvHints(error=str(error))


def _actions(envelope: Any) -> list[Any]:
    actions = envelope.get("actions", []) if isinstance(envelope, dict) else None
    if not isinstance(actions, list):
        raise MalformedMark(f"{KV_HINTS}: must be an object with a list of `actions`")
    if len(actions) > LIMIT_ACTIONS:
        raise MalformedMark(f"{KV_HINTS}.actions: must not be more than {LIMIT_ACTIONS}")
    return actions


def _read(actions: list[Any]) -> KvHints:
    counts: Counter[str] = Counter()
    leases: list[float | None] = []
    for i, action in enumerate(actions):
        place = f"{KV_HINTS}.actions.{i}"
        kind = action.get("action_type") if isinstance(action, dict) else None
        if not isinstance(kind, str):
            raise MalformedMark(f"{place}.action_type: must be a text")
        name = kind.lower().removeprefix("kv_hint.").removeprefix("kv.").removesuffix(".v1")
        if name not in _PAYLOADS or action.get("action_version", "") not in _VERSIONS:
            counts[OTHER] += 1
            continue
        payload = {} if action.get("payload") is None else action["payload"]
        if not isinstance(payload, dict):
            raise MalformedMark(f"{place}.payload: must be an object")
        for key in payload.keys() - _PAYLOADS[name]:
            raise MalformedMark(f"{place}.payload.{key[:40]}: is not supported by {name!r}")
        counts[name] += 1
        if "ttl" in _PAYLOADS[name]:
            ttl = payload.get("ttl")
            leases.append(None if ttl is None else seconds_of(f"{place}.payload.ttl", ttl))
    stated = [lease for lease in leases if lease is not None]
    lease_s = max(stated) if stated else None if leases else 0.0
    return KvHints(lease_s, counts["prefetch"] > 0, counts["demote"] > 0, counts=counts)
