"""Who shares the engines, and what each of them may have.

A request is of the tenant that its `x-tenant-id` names. Where API keys are configured, the
balancer sets it, by the key; elsewhere the name is believed, and a proxy has to set it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sgl_ext.requests.priority import LIMIT
from sgl_ext.requests.session import TENANT_HEADER

TENANT_NAME = re.compile(r"[!-~]([ -~]*[!-~])?")
"""A name is printable ASCII, as it is the value of a header."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """One who shares the engines.

    name: "" is all who do not say who they are.
    max_priority: what a request that asks for more gets.
    weight: its share of turns within a step of the queues, relative to the others'.
    cache_group: where tenants are kept apart, it shares cached prefixes with all of this
        group; "": the group of its own name.
    pin_share: what part of the pins' budget its pins may have; None: what all may.
    """

    name: str
    max_priority: int
    weight: float = 1.0
    cache_group: str = ""
    pin_share: float | None = None

    @property
    def group(self) -> str:
        """With whom it shares cached prefixes."""
        return self.cache_group or self.name


class Tenants:
    """All tenants: those of the configuration, and others, who all may have the same.

    weights: of those that are named; others have 1.
    """

    def __init__(self, named: Sequence[Tenant] = (), max_priority: int = LIMIT) -> None:
        self._named = {tenant.name: tenant for tenant in named}
        self._max_priority = max_priority
        self.weights: Mapping[str, float] = {tenant.name: tenant.weight for tenant in named}

    def of(self, name: str) -> Tenant:
        """The tenant of that name, with `max_priority` and weight 1 if it is not configured."""
        return self._named.get(name) or Tenant(name, self._max_priority)

    def asking(self, headers: Mapping[str, str]) -> Tenant:
        """The tenant whose request has these headers; they have lower-case names."""
        return self.of(headers.get(TENANT_HEADER, ""))
