"""Who shares the engines, and what each of them may have.

A request is of the tenant that its `x-tenant-id` names. Where API keys are configured, the
balancer sets it, by the key; elsewhere the name is believed, and a proxy has to set it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sgl_ext.requests.priority import LIMIT
from sgl_ext.requests.session import TENANT_HEADER
from sgl_ext.settings.schema import Tenant


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
