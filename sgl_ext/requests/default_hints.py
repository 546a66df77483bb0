"""What a request that says nothing itself is given: the operator's default hints.

A default acts like the same hint of the client, and only where the client gives none:

    priority    `nvext.agent_hints.priority`, the headers and the like; never above the ceiling
    osl         `nvext.agent_hints.osl`
    prefill     `nvext.agent_hints.speculative_prefill`
    ttl_s       `nvext.cache_control`: the TTL of marks that state none, and of the whole prompt of
                a request without marks

The balancer decides which defaults a request has, and sends them to the engine in a header.
"""

from collections.abc import Mapping
from dataclasses import replace

import msgspec

from sgl_ext.requests.cache_marks import TtlLimits

DEFAULTS_HEADER = "x-sgl-ext-default-hints"


class DefaultHints(msgspec.Struct, frozen=True, omit_defaults=True):
    """Default hints; None where there is no default. ttl_s: 0 pins no prompt without marks."""

    priority: int | None = None
    osl: int | None = None
    prefill: bool | None = None
    ttl_s: float | None = None

    def over(self, others: "DefaultHints") -> "DefaultHints":
        """These hints, and those of `others` where there are none of these."""
        return DefaultHints(
            self.priority if self.priority is not None else others.priority,
            self.osl if self.osl is not None else others.osl,
            self.prefill if self.prefill is not None else others.prefill,
            self.ttl_s if self.ttl_s is not None else others.ttl_s,
        )

    def ttl_limits(self, limits: TtlLimits) -> TtlLimits:
        """The server's limits for a request with these defaults."""
        if self.ttl_s is None:
            return limits
        if self.ttl_s == 0:
            return replace(limits, unmarked_s=0.0)
        granted_s = limits.granted_s(self.ttl_s)
        return replace(limits, default_s=granted_s, unmarked_s=granted_s)


NO_DEFAULTS = DefaultHints()


def written(hints: DefaultHints) -> bytes:
    """The header line that tells an engine."""
    return b"%b: %b\r\n" % (DEFAULTS_HEADER.encode(), msgspec.json.encode(hints))


def read_written(headers: Mapping[str, str]) -> DefaultHints:
    """The defaults in a balancer's header, if there are any. Raises ValueError if malformed."""
    stated = headers.get(DEFAULTS_HEADER)
    return NO_DEFAULTS if stated is None else msgspec.json.decode(stated, type=DefaultHints)
