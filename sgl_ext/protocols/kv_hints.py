"""SGLang's `kv_hints`: an envelope of versioned actions on the cached prefix of a request's prompt.

    {"protocol_version": "0.1", "message_id": "m", "actions": [
        {"action_id": "a", "action_type": "kv.pin", "action_version": "0.1", "payload": {...}}]}

SGLang carries it and acts on none of it. Here these actions work, on every path with cache marks:

    pin, retain   {"ttl"}: a lease on the whole prompt, as `nvext.cache_control` grants one
    prefetch      {}: the conversation's next turn is prefilled after the answer
    demote        {}: the session's pins on this prompt end, and what it adds is evicted first

The type may have the prefix `kv.` or `kv_hint.`, and the suffix `.v1`. Other actions belong to
other components, so they are counted and left in the envelope.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from sgl_ext.requests.cache_marks import seconds_of
from sgl_ext.requests.protocol import MalformedMark

FIELD = "kv_hints"
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
    envelope = body.get(FIELD) if isinstance(body, dict) else None
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
        raise MalformedMark(f"{FIELD}: must be an object with a list of `actions`")
    if len(actions) > LIMIT_ACTIONS:
        raise MalformedMark(f"{FIELD}.actions: must not be more than {LIMIT_ACTIONS}")
    return actions


def _read(actions: list[Any]) -> KvHints:
    counts: Counter[str] = Counter()
    leases: list[float | None] = []
    for i, action in enumerate(actions):
        place = f"{FIELD}.actions.{i}"
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
