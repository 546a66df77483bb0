"""Tenants: the teams that share the engines, and their settings.

`x-tenant-id` names the tenant of a request. With API keys the balancer sets this header by the
key. Without them the header is trusted, and a proxy has to set it.
"""

from collections.abc import Mapping, Sequence

from sgl_ext.reading.hints import LIMIT
from sgl_ext.settings.schema import ANY_ADAPTER, Tenant
from sgl_ext.wire.headers import TENANT_HEADER


class Tenants:
    """The configured tenants, and defaults for all others.

    weights: those of configured tenants; others have 1.
    """

    def __init__(self, named: Sequence[Tenant] = (), max_priority: int = LIMIT) -> None:
        self._weights: dict[str, float] = {}
        self.weights: Mapping[str, float] = self._weights
        self.replace(named, max_priority)

    def replace(self, named: Sequence[Tenant], max_priority: int) -> None:
        """From now on there are these tenants, for everybody who uses this object."""
        self._named = {tenant.name: tenant for tenant in named}
        self._max_priority = max_priority
        self._weights.clear()
        self._weights.update({tenant.name: tenant.weight for tenant in named})

    def of(self, name: str) -> Tenant:
        """The tenant of this name; `max_priority` and weight 1 apply if it is not configured. Then
        it may use no LoRA adapter, and clients that name no tenant may use every one."""
        named = self._named.get(name)
        if named is not None:
            return named
        return Tenant(name, self._max_priority, adapters="" if name else ANY_ADAPTER)

    def of_headers(self, headers: Mapping[str, str]) -> Tenant:
        """The tenant of a request with these headers, whose names are in lower case."""
        return self.of(headers.get(TENANT_HEADER, ""))
