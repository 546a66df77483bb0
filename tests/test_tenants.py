"""Who shares the engines: what each may have, and how a request's tenant is found."""

from __future__ import annotations

from pathlib import Path

import pytest

from sgl_ext.reading.hints import LIMIT
from sgl_ext.settings.schema import SettingsError, Tenant
from sgl_ext.settings.sources import balancer_settings
from sgl_ext.tenants import Tenants

PEOPLE = Tenant("people", 200, 3.0)
TENANTS = Tenants((PEOPLE, Tenant("batch", -5)), max_priority=50)


def test_configured_tenants_have_their_settings_and_others_the_defaults() -> None:
    assert TENANTS.of("people") is PEOPLE
    assert TENANTS.of("another") == Tenant("another", 50, 1.0)
    assert TENANTS.of("") == Tenant("", 50, 1.0, adapters="*")
    assert TENANTS.weights == {"people": 3.0, "batch": 1.0}
    assert Tenants().of("x") == Tenant("x", LIMIT)


def test_the_header_names_the_tenant_of_a_request() -> None:
    assert TENANTS.of_headers({"x-tenant-id": "people"}) is PEOPLE
    assert TENANTS.of_headers({}) == TENANTS.of("")


def test_a_tenant_shares_its_cache_with_its_group() -> None:
    assert Tenant("people", 0).group == "people"
    assert Tenant("people", 0, cache_group="all").group == "all"
    for bad in ("a b", "x" * 65):
        with pytest.raises(SettingsError, match=r"\[tenants\.a\] cache_group"):
            balancer_settings(["--tenant", f"a:cache_group={bad}"])
    for share in ("-0.1", "1.1", "nan"):
        with pytest.raises(SettingsError, match=r"\[tenants\.a\] pin_share"):
            balancer_settings(["--tenant", f"a:pin_share={share}"])


def test_tenants_with_keys_are_isolated_by_default(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.touch()
    for isolation, alone, with_keys in (
        ("auto", False, True),
        ("on", True, True),
        ("off", False, False),
    ):
        flags = ["--tenant-isolation", isolation]
        assert balancer_settings(flags).isolates_tenants is alone
        assert balancer_settings([*flags, "--keys", str(keys)]).isolates_tenants is with_keys
    with pytest.raises(SettingsError, match="--tenant-isolation='maybe'"):
        balancer_settings(["--tenant-isolation", "maybe"])
