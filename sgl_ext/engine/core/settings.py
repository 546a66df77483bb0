"""What the launcher tells the plugin, carried to every engine process in one variable."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache

import orjson

from sgl_ext.requests.cache_marks import TtlLimits
from sgl_ext.requests.headers import BILLING_HEADER
from sgl_ext.tenants import Tenant

VARIABLE = "SGL_EXT_ENGINE"
MIN_TTL_S = 1.0


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The plugin's settings.

    strip_headers: empty: nothing is stripped.
    sort_tools: a request's tools are put in the order of their names.
    pin_budget: the share of the key-value cache that pins may hold; 0: nothing is pinned.
    pin_owner_share: the share of that which one tenant's pins may hold.
    pin_ttl_s: how long a mark that does not say keeps its prefix; none keeps it for longer
        than `pin_max_ttl_s`, and a request without any mark for `pin_unmarked_ttl_s`.
    max_priority: what a request that asks for more gets.
    tenants: those that have a ceiling of their own in its place, or a weight.
    aging_s: how long a request waits to rise by one step; 0: it never does.
    preemption_threshold: how much more important a request must be to take another one's
        memory, which then is safe for `preemption_grace_s` after it runs again.
    prefill_ahead: whose next turns are prefilled before they come: "off", of nobody; "asked",
        of whoever asks for it; "auto", of sessions that grow as well.
    prefill_ahead_slice: how many tokens of them at once, at most.
    warm: a file of request bodies, one a line, that a new engine prefills; "": none.
    share: a file of request bodies, one a line, whose prompts all cache groups share; "": none.
    token_cache_bytes: for tokens of pieces of prompts; 0: every prompt is tokenized whole.
    """

    strip_headers: tuple[str, ...] = (BILLING_HEADER,)
    sort_tools: bool = False
    pin_budget: float = 1 / 3
    pin_owner_share: float = 1.0
    pin_ttl_s: float = 300.0
    pin_max_ttl_s: float = 3600.0
    pin_unmarked_ttl_s: float = 0.0
    max_priority: int = 100
    tenants: tuple[Tenant, ...] = ()
    aging_s: float = 10.0
    preemption_threshold: int = 10
    preemption_grace_s: float = 2.0
    prefill_ahead: str = "auto"
    prefill_ahead_slice: int = 2048
    warm: str = ""
    share: str = ""
    token_cache_bytes: int = 256 * 1024 * 1024

    @property
    def ttl_limits(self) -> TtlLimits:
        return TtlLimits(
            min_s=MIN_TTL_S,
            max_s=self.pin_max_ttl_s,
            default_s=self.pin_ttl_s,
            unmarked_s=self.pin_unmarked_ttl_s,
        )

    def to_environment(self) -> dict[str, str]:
        return {VARIABLE: orjson.dumps(asdict(self)).decode()}

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> EngineSettings:
        """The settings set, or the defaults. Raises ValueError naming the variable."""
        raw = environ.get(VARIABLE)
        if not raw:
            return cls()
        try:
            told = orjson.loads(raw)
            names = tuple(map(str, told.pop("strip_headers")))
            tenants = tuple(Tenant(**tenant) for tenant in told.pop("tenants"))
            return cls(strip_headers=names, tenants=tenants, **told)
        except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{VARIABLE}={raw!r} is not the plugin's settings: {error}") from error


@cache
def settings() -> EngineSettings:
    """This process's settings, read once."""
    return EngineSettings.from_environment()
