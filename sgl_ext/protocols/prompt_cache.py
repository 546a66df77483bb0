"""OpenAI's fields about the prompt cache, on chat completions, responses and completions.

    prompt_cache_options      {"mode", "ttl"}, for every breakpoint of the request
    prompt_cache_breakpoint   {"mode": "explicit"}, on a part of a message: a prefix ends here
    prompt_cache_retention    how long at most to keep the whole prompt; superseded by the first

The mode "implicit" keeps the whole prompt, too. The mode "explicit" without a breakpoint keeps
nothing. A request writes at most four breakpoints, the last ones. Earlier ones were written by the
requests that had them last, and reading a prefix renews its lease. Of a conversation, OpenAI
considers the last LIMIT_BREAKPOINTS; earlier ones are counted as ignored.

They are part of the protocol, so a malformed one makes the request invalid, as it does at OpenAI.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from sgl_ext.requests.cache_marks import LIMIT_MARKS, seconds_of
from sgl_ext.requests.protocol import CacheFields, FoundMark, Json, MalformedMark, Place

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
    written = found[-(LIMIT_MARKS - is_whole) :]
    fields = CacheFields(
        tuple((mark.place, ttl_s) for mark in written),
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
    mode, ttl = options.get("mode"), options.get("ttl")
    if mode is not None and mode not in _MODES:
        raise MalformedMark(f"{_OPTIONS}.mode: must be 'implicit' or 'explicit'")
    return mode or "implicit", _DEFAULT_TTL_S if ttl is None else seconds_of(f"{_OPTIONS}.ttl", ttl)
