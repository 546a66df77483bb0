"""Who shares the engines: what each may have, and how a request's tenant is found."""

from __future__ import annotations

from pathlib import Path

import pytest

from sgl_ext.config import BalancerConfig, ConfigError, balancer_config, launch_config
from sgl_ext.launch import with_own_key
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


def test_a_tenant_shares_its_cache_with_its_group() -> None:
    assert Tenant("people", 0).group == "people"
    assert Tenant("people", 0, cache_group="all").group == "all"
    config = balancer_config(
        BalancerConfig(),
        {"tenant": ["a:cache_group=7,pin_share=0", "b:weight=2,cache_group=all"]},
        {"b": {"cache-group": "some", "max-priority": 3, "pin-share": 0.25}},
    )
    first = Tenant("b", 3, 2.0, "all", 0.25)
    assert config.tenants == (first, Tenant("a", 100, 1.0, "7", 0.0))
    said = [word for word in config.to_argv() if word.startswith("--tenant=")]
    flags = [word.partition("=")[2] for word in said]
    assert balancer_config(BalancerConfig(), {"tenant": flags}).tenants == config.tenants
    for bad in ("a,b", "a b", "a:b", "x" * 65):
        with pytest.raises(ConfigError, match=r"tenants\.a\.cache_group"):
            BalancerConfig(tenants=(Tenant("a", 0, cache_group=bad),)).check()
    for share in (-0.1, 1.1, float("nan")):
        with pytest.raises(ConfigError, match=r"tenants\.a\.pin_share"):
            BalancerConfig(tenants=(Tenant("a", 0, pin_share=share),)).check()


def test_tenants_are_kept_apart_where_they_have_keys_unless_told_otherwise(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.touch()
    for isolation, alone, with_keys in (
        ("auto", False, True),
        ("on", True, True),
        ("off", False, False),
    ):
        told = BalancerConfig(tenant_isolation=isolation)
        assert told.isolates_tenants is alone
        told = BalancerConfig(tenant_isolation=isolation, keys=str(keys))
        told.check()
        assert told.isolates_tenants is with_keys
        assert ("--keys" in told.to_argv()) is True
    with pytest.raises(ConfigError, match="tenant_isolation='maybe'"):
        BalancerConfig(tenant_isolation="maybe").check()


def test_a_node_whose_tenants_have_keys_has_one_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SGL_EXT_OPERATOR_KEY", raising=False)
    monkeypatch.setenv("MINE", "mine")
    (tmp_path / "keys.toml").touch()
    keys = ["--model-path", "m", "--keys", str(tmp_path / "keys.toml")]
    own = with_own_key(launch_config(keys)).balancer
    assert own.api_key == "env:SGL_EXT_OPERATOR_KEY"
    assert len(own.read_api_key() or "") > 40
    assert str(own.read_api_key()) not in " ".join(own.to_argv())
    given = with_own_key(launch_config([*keys, "--api-key", "env:MINE"])).balancer
    assert given.read_api_key() == "mine"
    assert with_own_key(launch_config(["--model-path", "m"])).balancer.api_key is None
