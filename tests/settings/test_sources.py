"""Settings from flags and a file: flags win, and an error names the source of a bad value."""

from __future__ import annotations

from pathlib import Path

import pytest

from sgl_ext.reading.strip import BILLING_HEADER
from sgl_ext.settings.fields import TABLES, with_unit, without_unit
from sgl_ext.settings.schema import BalancerSettings, LaunchSettings, SettingsError, Tenant
from sgl_ext.settings.sources import GROUPS, balancer_settings, launch_settings


def read(tmp_path: Path, text: str, *flags: str) -> LaunchSettings:
    path = tmp_path / "node.toml"
    path.write_text(text)
    return launch_settings(["--config", str(path), *flags])


def test_flags_win_over_the_file_and_other_flags_go_to_sglang(tmp_path: Path) -> None:
    text = """
    [launch]
    model-path = "from-file"
    instances = 2
    pin_ttl_s = 60
    [balancer]
    port = 4000
    drain_s = 3
    sort-tools = true
    aging-s = 7
    [engine]
    mem-fraction-static = 0.8
    disable_radix_cache = true
    skip-server-warmup = false
    cuda-graph-bs = [1, 2]
    """
    flags = ["--instances", "3", "--no-sort-tools", "--pin-budget", "0.5", "--tp-size", "2"]
    settings = read(tmp_path, text, *flags, "--mem-fraction-static", "0.9", "--lora", "x")
    assert (settings.model_path, settings.instances, settings.tp) == ("from-file", 3, 2)
    balancer, engine = settings.balancer, settings.engine
    assert (balancer.port, balancer.drain_s, balancer.sort_tools) == (4000, 3, False)
    assert (engine.pin_ttl_s, engine.pin_budget, engine.sort_tools) == (60, 0.5, False)
    assert engine.aging_s == balancer.aging_s == 7
    assert settings.engine_args == (
        *("--mem-fraction-static", "0.8", "--disable-radix-cache", "--cuda-graph-bs", "1", "2"),
        *("--mem-fraction-static", "0.9", "--lora", "x"),
    )


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        ("", [BILLING_HEADER]),
        ("--strip-header x-b --strip-header x-a", [BILLING_HEADER, "x-b", "x-a"]),
        ("--no-strip-headers", []),
        ("--no-strip-headers --strip-header x-a", ["x-a"]),
    ],
)
def test_header_names_add_up_unless_the_list_is_emptied(flags: str, names: list[str]) -> None:
    settings = launch_settings(["--model-path", "m", *flags.split()])
    assert settings.balancer.strip_headers == settings.engine.strip_headers == tuple(names)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("[launch]\ninstances = 0", r"\[launch\] instances=0: must be an integer of at least 1"),
        ("[launch]\ninstances = '2'", r"\[launch\] instances='2': must be an integer"),
        ("[launch]\ninstances = true", r"instances=True: must be an integer"),
        ("[launch]\ninstance = 2", r"\[launch\] instance: unknown key; .* instances\?"),
        ("[launch]\nengine_args = ['--x']", r"engine_args: unknown key"),
        ("[launch]\npin-ttl-s = 4e9", r"pin-ttl-s=4000000000.0: must be a number from 1 to"),
        ("[launch]\npin-ttl-s = 4000", r"pin-ttl-s=4000.0: must be at most pin_max_ttl_s"),
        ("[lunch]\ninstances = 2", r"\[lunch\]: unknown table; did you mean launch\?"),
        ("launch = 3", r"launch=3: must be a table"),
        ("[balancer]\nport = 70000", r"port=70000: must be an integer from 1 to 65535"),
        ("[balancer]\ndrain_s = -1", r"drain_s=-1: must be a number from 0 to"),
        ("[balancer]\nstrip_headers = 'x'", r"strip_headers='x': must be a list"),
        ("[balancer]\nstrip_headers = [3]", r"strip_headers=\[3\]: must be a list"),
        ("[balancer]\nworkers = ['http://a:1']", r"workers: unknown key"),
        ("[balancer]\ntenants = []", r"tenants: unknown key"),
        ("[balancer]\napi-kye = 'sk-secret'", r"\] api-kye: unknown key; did you mean api_key\?"),
        ("[engine", r"config=.*node\.toml"),
        (f"[launch]\ninstances = {'9' * 5000}", r"config=.*node\.toml"),
        ("tenants = 3", r"tenants=3: must be a table"),
        ("[tenants]\nbatch = 3", r"tenants\.batch=3: must be a table"),
        ('[tenants.""]', r"tenants='': must be a name in printable ASCII"),
        ('[tenants."m\u00fc"]', r"tenants='m\u00fc': must be a name"),
        ('[tenants." b"]', r"tenants=' b': must be a name"),
        *(
            (f"[tenants.batch]\n{line}", rf"\[tenants\.batch\] {error}")
            for line, error in (
                ("weight = -1", r"weight=-1: must be a number above 0 and at most 1000000"),
                ("weight = inf", r"weight=inf: must be"),
                ("weight = nan", r"weight=nan: must be"),
                (f"weight = 1{'0' * 400}", r"weight=1(0{400}): must be"),
                ("weight = '2'", r"weight='2': must be"),
                ("weight = true", r"weight=True: must be"),
                ("max-priority = -1001", r"max-priority=-1001: must be an integer from -1000"),
                ("max_priority = 5.0", r"max_priority=5.0: must be an integer"),
                ("pin-share = 1.1", r"pin-share=1.1: must be a number from 0 to 1"),
                ("cache-group = 'a b'", r"cache-group='a b': must be at most 64 letters"),
                ("wieght = 2", r"wieght: unknown key; did you mean weight\?"),
                ("name = 'x'", r"name: unknown key"),
            )
        ),
    ],
)
def test_a_bad_value_in_the_file_is_named(tmp_path: Path, text: str, error: str) -> None:
    with pytest.raises(SettingsError, match=error) as caught:
        read(tmp_path, text, "--model-path", "m")
    assert str(tmp_path / "node.toml") in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        ("--max-priority 5000", r"--max-priority='5000': must be an integer from -1000 to 1000"),
        ("--aging-s -1", r"--aging-s='-1': must be a number from 0"),
        ("--tenant b", r"--tenant='b': must be NAME:max_priority="),
        ("--tenant b:weight", r"--tenant='b:weight': must be NAME:"),
        ("--tenant b:", r"--tenant='b:': must be NAME:"),
        ("--tenant :weight=2", r"--tenant tenants='': must be a name"),
        ("--tenant b:weight=x", r"--tenant \[tenants\.b\] weight='x': must be a number"),
        ("--tenant b:max_priority=2.5", r"max_priority='2.5': must be an integer"),
        ("--tenant b:wieght=2", r"wieght: unknown key; did you mean weight\?"),
        ("--preemption-threshold 0", r"--preemption-threshold='0': must be"),
        ("--response-ttl-s inf", r"--response-ttl-s='inf': must be"),
        ("--prefill-ahead on", r"--prefill-ahead='on': must be auto, hinted or off"),
        ("--pin-budget 1.5", r"--pin-budget='1.5': must be a number from 0 to 1"),
        ("--pin-owner-share 0", r"--pin-owner-share='0': must be"),
        ("--strip-header a/b", r"--strip-header=\['a/b'\]: must be a list, each a header name"),
        ("--port 1 --host 0.0.0.0 --store-limit-bytes 4096", r"--store-limit-bytes=4096: must be"),
    ],
)
def test_a_bad_value_of_a_flag_is_named(flags: str, error: str) -> None:
    with pytest.raises(SettingsError, match=error):
        launch_settings(["--model-path", "m", *flags.split()])


def test_each_flag_of_a_node_is_in_one_group_of_its_help() -> None:
    listed = [name for names in GROUPS.values() for name in names]
    assert sorted(listed) == sorted({**TABLES["launch"], **TABLES["balancer"]})


def test_times_and_sizes_may_have_units(tmp_path: Path) -> None:
    text = """
    [launch]
    pin-ttl-s = "5min"
    log-limit-bytes = "64MB"
    [balancer]
    drain-s = "1.5 s"
    aging-s = 7
    response-ttl-s = "2d"
    byte-budget = "1GiB"
    [hints.harness.codex]
    ttl-s = "1h"
    """
    flags = ["--restart-drain-s", "1h", "--max-body-bytes", "2M", "--first-byte-s", "250ms"]
    settings = read(tmp_path, text, "--model-path", "m", *flags, "--queue-timeout-s", "20")
    balancer = settings.balancer
    assert (settings.engine.pin_ttl_s, settings.log_limit_bytes) == (300, 64 << 20)
    assert (balancer.drain_s, balancer.aging_s, balancer.response_ttl_s) == (1.5, 7, 172_800)
    assert (balancer.byte_budget, balancer.max_body_bytes) == (1 << 30, 2 << 20)
    assert (settings.restart_drain_s, balancer.first_byte_s) == (3600, 0.25)
    assert (balancer.queue_timeout_s, balancer.hints[0].ttl_s) == (20, 3600)


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("drain-s = '20 parsecs'", r"drain-s='20 parsecs': .*, or with a unit, as 20s, 5min"),
        ("drain-s = '20'", r"drain-s='20': must be a number from 0"),
        ("drain-s = '20MB'", r"drain-s='20MB': must be a number"),
        ("drain-s = '2000d'", r"drain-s='2000d': must be a number from 0"),
        ("max-body-bytes = '1h'", r"max-body-bytes='1h': .*, or with a unit, as 64MB"),
        ("max-connections = '1k'", r"max-connections='1k': must be an integer of at least 1$"),
    ],
)
def test_a_wrong_unit_is_named_with_file_and_key(tmp_path: Path, line: str, error: str) -> None:
    with pytest.raises(SettingsError, match=r"node\.toml: \[balancer\] " + error):
        read(tmp_path, f"[balancer]\n{line}", "--model-path", "m")


def test_a_secret_that_cannot_be_read_is_named_with_file_and_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SGL_UNSET", raising=False)
    said = r"\[balancer\] api-key='env:SGL_UNSET': .*not set; export SGL_UNSET="
    with pytest.raises(SettingsError, match=said):
        read(tmp_path, "[balancer]\napi-key = 'env:SGL_UNSET'", "--model-path", "m")
    with pytest.raises(SettingsError, match=r"^--store='redis://:...@h': a password"):
        launch_settings(["--model-path", "m", "--store", "redis://:hush@h"])


def test_a_node_needs_a_model_and_a_file_that_exists() -> None:
    with pytest.raises(SettingsError, match="model_path: missing"):
        launch_settings([])
    with pytest.raises(SettingsError, match=r"give --model-path PATH, .*; --modle is another flag"):
        launch_settings(["--modle", "x"])
    with pytest.raises(SettingsError, match="nowhere"):
        launch_settings(["--config", "nowhere.toml", "--model-path", "m"])


def test_a_tenants_limits_come_from_its_table_its_flags_and_those_of_all(tmp_path: Path) -> None:
    text = """
    [launch]
    model-path = "m"
    [balancer]
    max-priority = 20
    [tenants.people]
    max-priority = 50
    weight = 3
    [tenants."team.batch"]
    weight = 0.5
    cache-group = "some"
    pin-share = 0.25
    """
    flags = ["--max-priority", "30", "--tenant", "people:weight=4,cache_group=7"]
    settings = read(tmp_path, text, *flags, "--tenant", "a:b:weight=2,pin_share=0")
    assert settings.balancer.tenants == settings.engine.tenants
    assert settings.engine.tenants == (
        Tenant("people", 50, 4.0, "7"),
        Tenant("team.batch", 30, 0.5, "some", 0.25),
        Tenant("a:b", 30, 2.0, "", 0.0),
    )


def test_a_balancer_by_hand_has_flags_and_a_child_its_launchers_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    by_hand = balancer_settings(["--worker", "http://a:1", "--worker", "http://b:2", "--port", "9"])
    assert by_hand == BalancerSettings(workers=("http://a:1", "http://b:2"), port=9)
    given = BalancerSettings(
        port=1,
        api_key=None,
        strip_headers=(),
        sort_tools=True,
        tenants=(Tenant("-a:b=c,d", 7), Tenant("b", -8, 1e-07)),
        store="kept.sqlite",
        workers=("http://a:1",),
    )
    for name, value in given.to_environment().items():
        monkeypatch.setenv(name, value)
    assert balancer_settings([]) == given
    assert balancer_settings(["--port", "2"]).port == 2
    with pytest.raises(SettingsError, match="--worker='ftp://a'"):
        balancer_settings(["--worker", "ftp://a"])


@pytest.mark.parametrize(
    ("value", "metavar", "shown"),
    [
        (480.0, "SECONDS", "8min"),
        (0.5, "SECONDS", "500ms"),
        (604_800.0, "SECONDS", "7d"),
        (90.0, "SECONDS", "90s"),
        (0.0, "SECONDS", ""),
        (256 << 20, "BYTES", "256MB"),
        (1000, "BYTES", "1000B"),
        (3, "N", ""),
        (None, "BYTES", ""),
    ],
)
def test_a_default_is_shown_with_a_unit_that_is_read_back(
    value: object, metavar: str, shown: str
) -> None:
    assert with_unit(value, metavar) == shown
    if shown:
        assert without_unit(shown, metavar) == value
