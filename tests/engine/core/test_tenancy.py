"""No tenant's request can have, abort or be kept from another's name, and adapters are granted."""

from __future__ import annotations

from contextlib import suppress
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_ext.engine.core.request_context import RequestContext
from sgl_ext.engine.core.request_names import check_adapters, name_request
from sgl_ext.settings.schema import Tenant
from sgl_ext.tenants import Tenants

NAMES = st.one_of(st.sampled_from(["", "1", "a", "1:a:", "~1:a:1", "2:aa:"]), st.text(max_size=8))
OWNERS = st.sampled_from(["a", "aa", "1", "a:", "~"])


def named(owner: str, rid: Any, field: str = "rid") -> Any:
    request = SimpleNamespace(rid=rid)
    name_request(request, RequestContext(body={field: rid}, owner=owner))
    return request.rid


@given(OWNERS, NAMES, OWNERS, NAMES)
def test_no_name_begins_with_another_tenants(one: str, x: str, other: str, y: str) -> None:
    """SGLang aborts every request whose name begins with that of one whose client left."""
    made = uuid4().hex
    assert not made.startswith(named(one, x))
    assert not named(one, x).startswith(made)
    if one != other:
        assert not named(other, y).startswith(named(one, x))


@given(OWNERS, NAMES)
def test_a_tenants_names_stay_apart_and_are_named_once(owner: str, x: str) -> None:
    assert named(owner, named(owner, x)) == named(owner, x)
    assert named(owner, x).endswith(x)
    assert named(owner, [x, "b"], "request_id") == [named(owner, x), named(owner, "b")]


@given(NAMES)
def test_without_a_tenant_a_name_stays_unless_it_could_be_a_tenants(x: str) -> None:
    if x.startswith("~"):
        with pytest.raises(ValueError, match="rid: must not begin"):
            named("", x)
    else:
        assert named("", x) == x


def test_a_name_that_sglang_made_stays() -> None:
    request = SimpleNamespace(rid="resp_1")
    name_request(request, RequestContext(body={"input": "hi"}, owner="a"))
    assert request.rid == "resp_1"
    for malformed in (None, 7, {}):
        assert named("a", malformed) == malformed


TENANTS = Tenants([Tenant("some", 0, adapters="x y"), Tenant("all", 0, adapters="*")])


@pytest.mark.parametrize(
    ("tenant", "granted"),
    [("some", {"x", "y"}), ("all", {"x", "y", "z"}), ("unknown", set()), ("", {"x", "y", "z"})],
)
def test_a_tenant_names_only_adapters_that_it_was_granted(tenant: str, granted: set[str]) -> None:
    def is_allowed(named: Any) -> bool:
        with suppress(ValueError):
            check_adapters(SimpleNamespace(lora_path=named), TENANTS.of(tenant))
            return True
        return False

    assert {name for name in "xyz" if is_allowed(name)} == granted
    assert {name for name in "xyz" if is_allowed([None, name])} == granted
    assert is_allowed(None)
    assert is_allowed([None])
