"""Who shares the engines, and what each of them may have.

A request is of the tenant that its `x-tenant-id` names. Where API keys are configured, the
balancer sets it, by the key; elsewhere the name is believed, and a proxy has to set it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

from msgspec import Meta, Struct

from sgl_ext.requests.priority import LIMIT
from sgl_ext.requests.session import TENANT_HEADER
from sgl_ext.settings.types import GroupName, Share, TenantName


class Tenant(Struct, frozen=True):
    """A tenant's limits. The tenant "" is every client that names none."""

    name: TenantName
    max_priority: Annotated[
        int,
        Meta(ge=-LIMIT, le=LIMIT),
        "Highest priority that it can request, in place of `max_priority`.",
    ]
    weight: Annotated[
        float, Meta(gt=0, le=1e6), "Its share of turns among requests of the same priority."
    ] = 1.0
    cache_group: Annotated[
        GroupName, "Isolated tenants of the same group share cached prefixes; its name if not set."
    ] = ""
    pin_share: Annotated[
        Share | None, "Share of the pin budget, in place of `pin_owner_share`."
    ] = None

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
