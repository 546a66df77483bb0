"""Rules between settings, and files and secrets that settings name."""

from __future__ import annotations

from pathlib import Path

import pytest

from sgl_ext.settings.schema import BalancerSettings, EngineSettings, LaunchSettings, SettingsError
from sgl_ext.settings.secrets import read_api_key
from sgl_ext.settings.sources import check_balancer, check_launch

ISOLATING = BalancerSettings(tenant_isolation="on")
NO_JSON = __file__


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        (EngineSettings(pin_ttl_s=4000), r"pin_ttl_s=4000: must be at most pin_max_ttl_s"),
        (EngineSettings(pin_unmarked_ttl_s=0.5), r"pin_unmarked_ttl_s=0.5: must be 0, or"),
        (EngineSettings(pin_unmarked_ttl_s=4000), r"pin_unmarked_ttl_s=4000: must be 0, or"),
        (EngineSettings(warmup_requests="no.such"), r"warmup_requests='no.such': cannot be read"),
        (EngineSettings(warmup_requests=NO_JSON), r"line 1 is not a JSON object"),
        (EngineSettings(shared_prefixes=NO_JSON), r"line 1 is not a JSON object"),
    ],
)
def test_an_engines_setting_that_breaks_a_rule_is_named(
    settings: EngineSettings, error: str
) -> None:
    with pytest.raises(SettingsError, match=error):
        check_launch(LaunchSettings(model_path="m", engine=settings, balancer=ISOLATING))


def test_prefixes_are_shared_only_by_tenants_that_are_isolated() -> None:
    engine = EngineSettings(shared_prefixes=NO_JSON)
    with pytest.raises(SettingsError, match=r"shared_prefixes=.*tenant_isolation to on"):
        check_launch(LaunchSettings(model_path="m", engine=engine))


def test_sglangs_flags_that_the_launcher_sets_are_refused() -> None:
    with pytest.raises(SettingsError, match="--port"):
        check_launch(LaunchSettings(model_path="m", engine_args=("--port", "1")))


def test_sglangs_own_way_onto_ray_is_refused_with_the_reason() -> None:
    with pytest.raises(SettingsError, match=r"--use-ray.*sglang#26723.*ray-address"):
        check_launch(LaunchSettings(model_path="m", engine_args=("--use-ray",)))


def test_engines_on_ray_need_a_secret_and_have_the_addresses_of_their_nodes() -> None:
    with pytest.raises(SettingsError, match=r"ray_address='auto': .*need engine_secret"):
        check_launch(LaunchSettings(model_path="m", ray_address="auto"))
    with pytest.raises(SettingsError, match=r"engine_host='0.0.0.0': on Ray"):
        check_launch(LaunchSettings(model_path="m", ray_address="auto", engine_host="0.0.0.0"))


def test_a_child_names_the_variable_that_it_cannot_read() -> None:
    for bad in ("{", '{"pin_bugdet": 1}', '{"pin_budget": 2}', '{"strip_headers": ["two words"]}'):
        with pytest.raises(SettingsError, match="SGLEXT_SETTINGS"):
            EngineSettings.from_environment({"SGLEXT_SETTINGS": bad})
    assert EngineSettings.from_environment({}) == EngineSettings()


@pytest.mark.parametrize("bytes_", [1, 4096])
def test_a_store_is_of_some_size_or_none(bytes_: int) -> None:
    with pytest.raises(SettingsError, match=f"store_limit_bytes={bytes_}"):
        check_balancer(BalancerSettings(store_limit_bytes=bytes_))
    check_balancer(BalancerSettings(store_limit_bytes=0))


def test_the_api_key_comes_from_a_file_or_a_variable_and_is_never_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "key").write_text("from-file\n")
    monkeypatch.setenv("A_KEY", "from-variable")
    assert read_api_key(f"file:{tmp_path / 'key'}") == "from-file"
    assert read_api_key("env:A_KEY") == "from-variable"
    assert read_api_key(None) is None
    (tmp_path / "empty").write_text("\n")
    for bad in ("sk-secret", "file:/nowhere", "env:UNSET_KEY", f"file:{tmp_path / 'empty'}"):
        with pytest.raises(SettingsError, match="api_key") as caught:
            check_balancer(BalancerSettings(api_key=bad))
        assert "sk-secret" not in str(caught.value)


def test_an_engine_beyond_loopback_needs_a_secret(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("0123456789abcdef\n")
    for host in ("0.0.0.0", "10.0.0.1", "::", "engine.example"):
        with pytest.raises(SettingsError, match=f"engine_host='{host}': .*engine_secret"):
            check_launch(LaunchSettings(model_path="m", engine_host=host))
        given = BalancerSettings(engine_secret=f"file:{tmp_path / 'secret'}")
        check_launch(LaunchSettings(model_path="m", engine_host=host, balancer=given))
    for host in ("127.0.0.1", "127.1.2.3", "::1", "localhost"):
        check_launch(LaunchSettings(model_path="m", engine_host=host))


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "::", "node.example"])
def test_a_node_without_keys_listens_on_loopback_unless_it_may_be_insecure(
    tmp_path: Path, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEY", "sesame")
    with pytest.raises(SettingsError, match=f"host='{host}': .*--api-key or --keys.*--insecure"):
        check_balancer(BalancerSettings(host=host))
    keys = tmp_path / "keys.toml"
    keys.write_text("")
    for settings in (
        BalancerSettings(host=host, insecure=True),
        BalancerSettings(host=host, api_key="env:KEY"),
        BalancerSettings(host=host, keys=str(keys)),
        BalancerSettings(host="127.0.0.1"),
        BalancerSettings(host="localhost"),
    ):
        check_balancer(settings)


def test_engines_that_speak_tls_are_refused_with_the_reason() -> None:
    with pytest.raises(SettingsError, match=r"--ssl-certfile.*plain HTTP to engines"):
        check_launch(LaunchSettings(model_path="m", engine_args=("--ssl-certfile=c",)))
    with pytest.raises(SettingsError, match=r"workers='https://e:1': .*plain HTTP to engines"):
        check_balancer(BalancerSettings(workers=("https://e:1",)))
    with pytest.raises(SettingsError, match=r"workers='e:1': must be http://HOST:PORT$"):
        check_balancer(BalancerSettings(workers=("e:1",)))


def test_a_secret_that_stands_where_its_source_belongs_is_not_shown() -> None:
    for bad in ('{"engine_secret": "hush-hush"}', '{"api_key":"hush-hush", "engine_secret": 1}'):
        with pytest.raises(SettingsError, match=r"SGLEXT_SETTINGS.*engine_secret") as caught:
            EngineSettings.from_environment({"SGLEXT_SETTINGS": bad})
        assert "hush" not in str(caught.value)


def test_the_former_name_of_the_variable_is_not_ignored() -> None:
    """It may hold a secret without which an engine believes everyone."""
    with pytest.raises(SettingsError, match=r"SGL_EXT_SETTINGS.*SGLEXT_SETTINGS"):
        EngineSettings.from_environment({"SGL_EXT_SETTINGS": "{}"})
