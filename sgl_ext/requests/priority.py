"""A request's priority and expected output length, as its client states them.

    x-sgl-ext-priority, x-dynamo-request-priority     a header; it overrides the body
    nvext.agent_hints.priority, .osl                  integers in the body
    nvext.agent_hints.speculative_prefill             whether to prefill the next turn ahead
    priority                                          SGLang's own, in the body
    service_tier                                      OpenAI's: "priority" is 10, "flex" is -10

Higher is more important, and the default is 0. Values are clamped to -LIMIT..LIMIT, and to the
tenant's ceiling.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

LIMIT = 1000
HEADERS = ("x-sgl-ext-priority", "x-dynamo-request-priority")
_TIERS = {"priority": 10, "flex": -10}
_KNOWN_TIERS = (None, "auto", "default", "scale", "standard", "standard_only")
_INTEGER = re.compile(r"[+-]?[0-9]{1,20}")


@dataclass(frozen=True, slots=True)
class Importance:
    """A request's priority and related hints.

    output_tokens: the expected length of the answer; None if it is not stated.
    error: a malformed field of our own, or "".
    ignored: other vendors' hints with unknown values.
    is_clamped: the request asked for more than the ceiling, and got the ceiling.
    speculative_prefill: whether to prefill the next turn ahead; None if it is not stated.
    """

    priority: int = 0
    output_tokens: int | None = None
    error: str = ""
    ignored: int = 0
    is_clamped: bool = False
    speculative_prefill: bool | None = None


USUAL = Importance()


def read_importance(headers: Mapping[str, str], body: Any, ceiling: int = LIMIT) -> Importance:
    """A request's priority, at most `ceiling`, and related hints. Never raises.

    The ceiling also limits the default priority. `headers` has lower-case names.
    """
    nvext = body.get("nvext") if isinstance(body, dict) else None
    stated = next(((n, headers[n]) for n in HEADERS if headers.get(n)), None)
    tier = body.get("service_tier") if isinstance(body, dict) else None
    own = body.get("priority") if isinstance(body, dict) else None
    if stated is None and nvext is None and tier is None and own is None:
        return USUAL if ceiling >= 0 else Importance(max(ceiling, -LIMIT))
    hints = nvext.get("agent_hints") if isinstance(nvext, dict) else None
    if hints is not None and not isinstance(hints, dict):
        return Importance(error="nvext.agent_hints: must be an object")
    hints = hints or {}
    for name in ("priority", "osl"):
        if (value := hints.get(name)) is not None and type(value) is not int:
            return Importance(error=f"nvext.agent_hints.{name}: must be an integer, not {value!r}")
    ahead = hints.get("speculative_prefill")
    if ahead is not None and type(ahead) is not bool:
        return Importance(
            error=f"nvext.agent_hints.speculative_prefill: must be true or false, not {ahead!r}"
        )
    if (expected := hints.get("osl")) is not None and expected < 0:
        return Importance(error=f"nvext.agent_hints.osl: must not be negative, as {expected} is")
    ignored = 0
    if own is not None and type(own) is not int:  # SGLang would reject it, or convert it
        own, ignored = None, 1
    priority = hints.get("priority")
    priority = own if priority is None else priority
    if stated is not None:
        name, text = stated
        if _INTEGER.fullmatch(text.strip()) is not None:
            priority = int(text)
        elif name == HEADERS[0]:
            return Importance(error=f"{name}: must be an integer, not {text[:40]!r}")
        else:
            ignored += 1
    if isinstance(tier, str) and tier in _TIERS:
        priority = _TIERS[tier] if priority is None else priority
    elif tier not in _KNOWN_TIERS:
        ignored += 1
    clamped = max(min(priority or 0, LIMIT, ceiling), -LIMIT)
    return Importance(
        clamped,
        expected,
        "",
        ignored,
        is_clamped=priority is not None and priority > ceiling,
        speculative_prefill=ahead,
    )
