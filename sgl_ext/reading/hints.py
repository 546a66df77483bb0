"""The hints of a request: its priority, the expected length of its answer, and what the operator
gives a request that states none."""

import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from sgl_ext.reading.cache_marks import TtlLimits
from sgl_ext.reading.field_types import as_integer
from sgl_ext.wire.headers import NO_DEFAULTS, DefaultHints

# What a request that says nothing itself is given: the operator's default hints.
#
# A default acts like the same hint of the client, and only where the client gives none:
#
#     priority    `nvext.agent_hints.priority`, the headers and the like; never above the ceiling
#     osl         `nvext.agent_hints.osl`
#     prefill     `nvext.agent_hints.speculative_prefill`
#     ttl_s       `nvext.cache_control`: the TTL of marks that state none, and of the whole prompt
#                 of a request without marks
#
# The balancer decides which defaults a request has, and sends them to the engine in a header.


def limits_with(defaults: DefaultHints, limits: TtlLimits) -> TtlLimits:
    """The server's limits of TTLs for a request with these defaults."""
    if defaults.ttl_s is None:
        return limits
    if defaults.ttl_s == 0:
        return replace(limits, unmarked_s=0.0)
    granted_s = limits.granted_s(defaults.ttl_s)
    return replace(limits, default_s=granted_s, unmarked_s=granted_s)


BRIEF_TTL_S = 60.0
"""How long at most to keep what a sub-agent gives back: from one of its turns to the next."""


def brief(limits: TtlLimits) -> TtlLimits:
    """The limits for a request whose client lets its cache go when its agent ends."""
    most_s = min(limits.max_s, BRIEF_TTL_S)
    return replace(
        limits,
        min_s=min(limits.min_s, most_s),
        max_s=most_s,
        unmarked_s=min(limits.unmarked_s, most_s),
    )


# A request's priority and expected output length, as its client states them.
#
#     x-sgl-ext-priority, x-dynamo-request-priority     a header; it overrides the body
#     nvext.agent_hints.priority                        an integer in the body
#     nvext.agent_hints.strict_priority                 Dynamo's tier; the higher of both counts
#     nvext.agent_hints.due                             in how many ms the answer is due
#     nvext.agent_hints.osl                             the expected length of the answer, in tokens
#     nvext.agent_hints.speculative_prefill             whether to prefill the next turn ahead
#     nvext.agent_hints.mark_complete_calls             whether a chat's stream marks them
#     nvext.agent_hints.draft_from_context              false: the answer is not drafted
#     priority                                          SGLang's own, in the body
#     service_tier                                      OpenAI's: "priority" is 10, "flex" is -10
#
# Higher is more important, and the default is 0. Values are clamped to -LIMIT..LIMIT, and to the
# tenant's ceiling.

LIMIT = 1000
LIMIT_DUE_MS = 86_400_000
_PRIORITIES = ("priority", "strict_priority")
PRIORITY_HEADERS = ("x-sgl-ext-priority", "x-dynamo-request-priority")
_TIERS = {"priority": 10, "flex": -10}
_KNOWN_TIERS = (None, *_TIERS, "auto", "default", "scale", "standard", "standard_only")
_HINTS = (
    ("priority", int, "an integer"),
    ("strict_priority", int, "an integer"),
    ("due", int, "an integer"),
    ("osl", int, "an integer"),
    ("speculative_prefill", bool, "true or false"),
    ("mark_complete_calls", bool, "true or false"),
    ("draft_from_context", bool, "true or false"),
)
_OUTPUT_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_INTEGER = re.compile(r"[+-]?[0-9]{1,20}")


@dataclass(frozen=True, slots=True)
class Importance:
    """A request's priority and related hints.

    output_tokens: the expected length of the answer, at most what the request allows; None if it
        is not stated.
    error: a malformed field of our own, or "".
    ignored: other vendors' hints with unknown values.
    is_clamped: the request asked for more than the ceiling, and got the ceiling.
    speculative_prefill: whether to prefill the next turn ahead; None if it is not stated.
    drafts: whether the answer may be drafted from its context.
    due_s: how long after it arrived the answer is due; None if it is not stated.
    """

    priority: int = 0
    output_tokens: int | None = None
    error: str = ""
    ignored: int = 0
    is_clamped: bool = False
    speculative_prefill: bool | None = None
    drafts: bool = True
    due_s: float | None = None


USUAL = Importance()


def read_importance(
    headers: Mapping[str, str],
    body: Any,
    ceiling: int = LIMIT,
    defaults: DefaultHints = NO_DEFAULTS,
) -> Importance:
    """A request's priority, at most `ceiling`, and related hints. Never raises.

    The ceiling also limits the default priority. `headers` has lower-case names. defaults: what
    counts where the request says nothing.
    """
    body = body if isinstance(body, dict) else {}
    name = next((name for name in PRIORITY_HEADERS if headers.get(name)), None) if headers else None
    nvext, tier, own = body.get("nvext"), body.get("service_tier"), body.get("priority")
    says_nothing = name is None and nvext is None and tier is None and own is None
    if says_nothing and defaults is NO_DEFAULTS:
        return USUAL if ceiling >= 0 else Importance(max(ceiling, -LIMIT))
    if nvext is not None and not isinstance(nvext, dict):
        return Importance(error=f"nvext: must be an object, not {reprlib.repr(nvext)}")
    hints = None if nvext is None else nvext.get("agent_hints")
    hints = {} if hints is None else hints
    if error := _error_in(hints):
        return Importance(error=f"nvext.agent_hints{error}")
    # SGLang would reject another type than int, or convert it.
    ignored = (own is not None and type(own) is not int) + (tier not in _KNOWN_TIERS)
    of_hints = [hints[name] for name in _PRIORITIES if hints.get(name) is not None]
    priorities = [
        max(of_hints, default=None),
        own if type(own) is int else None,
        _TIERS.get(tier) if isinstance(tier, str) else None,
    ]
    if name is not None:
        if _INTEGER.fullmatch(headers[name].strip()) is not None:
            priorities.insert(0, int(headers[name]))
        elif name == PRIORITY_HEADERS[0]:
            return Importance(error=f"{name}: must be an integer, not {headers[name][:40]!r}")
        else:
            ignored += 1
    priority = next((each for each in priorities if each is not None), None)
    osl, due_ms, prefill = hints.get("osl"), hints.get("due"), hints.get("speculative_prefill")
    return Importance(
        max(
            min((defaults.priority if priority is None else priority) or 0, LIMIT, ceiling), -LIMIT
        ),
        _expected_output(defaults.osl if osl is None else osl, body),
        ignored=ignored,
        is_clamped=priority is not None and priority > ceiling,
        speculative_prefill=defaults.prefill if prefill is None else prefill,
        drafts=hints.get("draft_from_context") is not False,
        due_s=None if due_ms is None else min(due_ms, LIMIT_DUE_MS) / 1000,
    )


# Fields about the prompt cache at the root of a body.
_CACHE_FIELDS = ("kv_hints", "prompt_cache_options", "prompt_cache_retention")


def honoured_hints(headers: Mapping[str, str], body: Any, ceiling: int) -> tuple[str, ...]:
    """The names of what a request states and counts for it: headers, and fields of its body.

    Sessions, and marks in blocks, are not among them. () for a request with a malformed hint.
    """
    body = body if isinstance(body, dict) else {}
    nvext, tier = body.get("nvext"), body.get("service_tier")
    header = (
        next((name for name in PRIORITY_HEADERS if headers.get(name)), None) if headers else None
    )
    has_none = header is None and nvext is None and tier is None and body.get("priority") is None
    if has_none and body.keys().isdisjoint(_CACHE_FIELDS):
        return ()
    if read_importance(headers, body, ceiling).error:
        return ()
    nvext = nvext if isinstance(nvext, dict) else {}
    hints = nvext.get("agent_hints") or {}
    if header is not None and _INTEGER.fullmatch(headers[header].strip()) is None:
        header = None
    if header == PRIORITY_HEADERS[-1] and "x-agent-hint" in headers:  # it stated that priority
        header = "x-agent-hint"
    of_hints = [name for name in _PRIORITIES if hints.get(name) is not None]
    stated = [f"nvext.agent_hints.{max(of_hints, key=hints.__getitem__)}"] if of_hints else []
    if type(body.get("priority")) is int:
        stated.append("priority")
    if isinstance(tier, str) and tier in _TIERS:
        stated.append("service_tier")
    found = [header] if header is not None else stated[:1]
    for name, *_ in _HINTS:
        if name not in _PRIORITIES and hints.get(name) is not None:
            found.append(f"nvext.agent_hints.{name}")
    if nvext.get("cache_control") is not None:
        found.append("nvext.cache_control")
    found += [name for name in _CACHE_FIELDS if body.get(name)]
    return tuple(found)


def _expected_output(stated: int | None, body: Mapping[str, Any]) -> int | None:
    if stated is None:
        return None
    sampling = body.get("sampling_params")
    limits = [as_integer(body.get(field)) for field in _OUTPUT_LIMITS]
    limits.append(sampling.get("max_new_tokens") if isinstance(sampling, dict) else None)
    return min(stated, *(limit for limit in limits if type(limit) is int and limit >= 0), stated)


def _error_in(hints: Any) -> str:
    if not isinstance(hints, dict):
        return ": must be an object"
    for field, kind, form in _HINTS:
        if (value := hints.get(field)) is not None and type(value) is not kind:
            return f".{field}: must be {form}, not {reprlib.repr(value)}"
    for field in ("osl", "due"):
        if (stated := hints.get(field) or 0) < 0:
            return f".{field}: must not be negative, as {stated} is"
    return ""
