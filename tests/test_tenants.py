"""Who shares the engines: what each may have, and how a request's tenant is found."""

from __future__ import annotations

from sgl_ext.requests.priority import LIMIT
from sgl_ext.tenants import Tenant, Tenants

PEOPLE = Tenant("people", 200, 3.0)
TENANTS = Tenants((PEOPLE, Tenant("batch", -5)), max_priority=50)


def test_who_is_named_has_its_own_and_all_others_the_same() -> None:
    assert TENANTS.of("people") is PEOPLE
    assert TENANTS.of("another") == Tenant("another", 50, 1.0)
    assert TENANTS.of("") == Tenant("", 50, 1.0)
    assert TENANTS.weights == {"people": 3.0, "batch": 1.0}
    assert Tenants().of("x") == Tenant("x", LIMIT)


def test_a_request_is_of_the_tenant_that_its_header_names() -> None:
    assert TENANTS.asking({"x-tenant-id": "people"}) is PEOPLE
    assert TENANTS.asking({}) == TENANTS.of("")
