"""Who shares the engines, and what each of them may have.

A request is of the tenant that its `x-tenant-id` names, and the name is believed: a proxy in
front has to set it. What finds a tenant otherwise comes to the same record.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sgl_ext.requests.priority import LIMIT
from sgl_ext.requests.session import TENANT_HEADER


@dataclass(frozen=True, slots=True)
class Tenant:
    """One who shares the engines.

    name: "" is all who do not say who they are.
    max_priority: what a request that asks for more gets.
    weight: its share of turns within a step of the queues, relative to the others'.
    """

    name: str
    max_priority: int
    weight: float = 1.0


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
