"""Configuration: file and flags, flags win, and a bad value is named before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from sgl_ext.config import (
    BalancerConfig,
    ConfigError,
    LaunchConfig,
    balancer_config,
    launch_config,
)
from sgl_ext.requests.headers import BILLING_HEADER
from sgl_ext.tenants import Tenant


def from_file(tmp_path: Path, text: str, *flags: str) -> object:
    path = tmp_path / "node.toml"
    path.write_text(text)
    return launch_config(["--config", str(path), *flags])


def test_flags_win_over_the_file_and_the_rest_goes_to_sglang(tmp_path: Path) -> None:
    text = """
    [launch]
    model-path = "from-file"
    instances = 2
    [balancer]
    port = 4000
    drain_s = 3
    [engine]
    mem-fraction-static = 0.8
    disable_radix_cache = true
    skip-server-warmup = false
    cuda-graph-bs = [1, 2]
    """
    path = tmp_path / "node.toml"
    path.write_text(text)
    config = launch_config(
        ["--config", str(path), "--instances", "3", "--mem-fraction-static", "0.9", "--lora", "x"]
    )
    assert (config.model_path, config.instances, config.balancer.port) == ("from-file", 3, 4000)
    assert config.balancer.drain_s == 3
    assert config.engine_args == (
        *("--mem-fraction-static", "0.8", "--disable-radix-cache", "--cuda-graph-bs", "1", "2"),
        *("--mem-fraction-static", "0.9", "--lora", "x"),
    )


def test_the_strip_is_on_and_names_add_up_and_it_can_be_off() -> None:
    assert launch_config(["--model-path", "m"]).balancer.strip_headers == (BILLING_HEADER,)
    added = launch_config(["--model-path", "m", "--strip-header", "x-a", "--strip-header", "x-b"])
    assert added.balancer.strip_headers == (BILLING_HEADER, "x-a", "x-b")
    off = launch_config(["--model-path", "m", "--no-strip-headers"])
    assert off.balancer.strip_headers == ()
    only = launch_config(["--model-path", "m", "--no-strip-headers", "--strip-header", "x-a"])
    assert only.balancer.strip_headers == ("x-a",)


@pytest.mark.parametrize(
    ("text", "flags", "named"),
    [
        ("", ["--model-path", "m", "--max-priority", "5000"], r"max_priority=5000"),
        ("", ["--model-path", "m", "--aging-s", "-1"], r"aging_s=-1"),
        *(
            (f"[tenants.batch]\n{line}", ["--model-path", "m"], rf"tenants\.batch\.{named}")
            for line, named in (
                ("weight = -1", r"weight=-1: must be positive"),
                ("weight = 0", r"weight=0: must be positive"),
                ("weight = inf", r"weight=inf: must be finite"),
                ("weight = nan", r"weight=nan: must be positive"),
                (f"weight = 1{'0' * 400}", r"weight=1(0{400}): must be finite"),
                ("weight = '2'", r"weight='2': must be int or float"),
                ("weight = true", r"weight=True: must be int or float"),
                ("max_priority = 1001", r"max_priority=1001: is out of range"),
                ("max-priority = -1001", r"max_priority=-1001: is out of range"),
                ("max_priority = 5.0", r"max_priority=5.0: must be int"),
                ("max_priority = true", r"max_priority=True: must be int"),
                ("wieght = 2", r"wieght=2: not a key"),
                ("name = 'x'", r"name='x': not a key"),
            )
        ),
        ("tenants = 3", ["--model-path", "m"], r"tenants=3: must be a table"),
        ("[tenants]\nbatch = 3", ["--model-path", "m"], r"tenants\.batch=3: must be a table"),
        ('[tenants.""]', ["--model-path", "m"], r"tenants='': a name"),
        ('[tenants."m\u00fc"]', ["--model-path", "m"], r"tenants='m\u00fc': a name"),
        ('[tenants." b"]', ["--model-path", "m"], r"tenants=' b': a name"),
        ("", ["--model-path", "m", "--tenant", "b"], r"tenant='b': give NAME"),
        ("", ["--model-path", "m", "--tenant", "b:weight"], r"tenant='b:weight': give NAME"),
        ("", ["--model-path", "m", "--tenant", "b:"], r"tenant='b:': give NAME"),
        ("", ["--model-path", "m", "--tenant", ":weight=2"], r"tenants='': a name"),
        ("", ["--model-path", "m", "--tenant", "b:weight=x"], r"tenants\.b\.weight='x': must be"),
        ("", ["--model-path", "m", "--tenant", "b:weight=-1"], r"tenants\.b\.weight=-1"),
        ("", ["--model-path", "m", "--tenant", "b:max_priority=2.5"], r"b\.max_priority=2.5: must"),
        ("", ["--model-path", "m", "--tenant", "b:wieght=2"], r"tenants\.b\.wieght=2: not a key"),
        ("", ["--model-path", "m", "--preemption-threshold", "0"], r"preemption_threshold=0"),
        ("", ["--model-path", "m", "--store", ""], r"store=''"),
        ("", ["--model-path", "m", "--store-limit-bytes", "4096"], r"store_limit_bytes=4096"),
        ("", ["--model-path", "m", "--response-ttl-s", "inf"], r"response_ttl_s=inf"),
        ("", ["--model-path", "m", "--prefill-ahead", "on"], r"prefill_ahead='on'"),
        ("", ["--model-path", "m", "--prefill-ahead-slice", "0"], r"prefill_ahead_slice=0"),
        ("", ["--model-path", "m", "--warm", "no.such"], r"warm='no.such': cannot be read"),
        ("", ["--model-path", "m", "--warm", __file__], r"line 1=.*is not a JSON object"),
        ("", ["--model-path", "m", "--share", __file__], r"share=.*tenant_isolation on"),
        (
            '[launch]\nshare = "no.such"\n[balancer]\ntenant-isolation = "on"',
            ["--model-path", "m"],
            r"share='no.such': cannot be read",
        ),
        (
            '[balancer]\ntenant-isolation = "on"',
            ["--model-path", "m", "--share", __file__],
            r"share=.*line 1=.*is not a JSON object",
        ),
        ("", ["--model-path", "m", "--pin-budget", "1.5"], r"pin_budget=1.5"),
        ("", ["--model-path", "m", "--pin-owner-share", "0"], r"pin_owner_share=0"),
        ("", ["--model-path", "m", "--pin-ttl-s", "4000"], r"pin_ttl_s=4000"),
        ("", ["--model-path", "m", "--pin-max-ttl-s", "inf"], r"pin_max_ttl_s=inf"),
        ("", ["--model-path", "m", "--pin-unmarked-ttl-s", "-1"], r"pin_unmarked_ttl_s=-1"),
        ("", [], "model_path"),
        ("[launch]\ninstances = 0", ["--model-path", "m"], r"instances=0"),
        ("[launch]\ninstances = '2'", ["--model-path", "m"], r"instances='2': must be int"),
        ("[launch]\ninstances = true", ["--model-path", "m"], r"instances=True"),
        ("[launch]\ninstance = 2", ["--model-path", "m"], r"instance=2: not a key"),
        ("[launch]\nengine_args = ['--x']", ["--model-path", "m"], r"engine_args"),
        ("[lunch]\ninstances = 2", ["--model-path", "m"], r"lunch: not a table"),
        ("launch = 3", ["--model-path", "m"], r"launch=3"),
        ("[balancer]\nport = 70000", ["--model-path", "m"], r"port=70000"),
        ("[balancer]\ndrain_s = -1", ["--model-path", "m"], r"drain_s=-1"),
        ("[balancer]\nstrip_headers = 'x'", ["--model-path", "m"], r"strip_headers='x'"),
        ("[balancer]\nstrip_headers = [3]", ["--model-path", "m"], r"strip_headers=\[3\]"),
        ("[engine]\nport = 1", ["--model-path", "m"], r"--port"),
        ("[engine", ["--model-path", "m"], r"node.toml"),
        (f"[launch]\ninstances = {'9' * 5000}", ["--model-path", "m"], r"node.toml"),
        ("", ["--model-path", "m", "--max-body-bytes", "0"], r"max_body_bytes=0"),
        ("", ["--model-path", "m", "--strip-header", "a b"], r"strip_header: .*'a b'"),
        ("", ["--model-path", "m", "--tp", "0"], r"tp=0"),
        ("", ["--model-path", "m", "--start-timeout-s", "0"], r"start_timeout_s=0"),
    ],
)
def test_a_bad_value_is_named(tmp_path: Path, text: str, flags: list[str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        from_file(tmp_path, text, *flags)


def test_a_tenant_has_what_its_table_says_and_else_what_all_have(tmp_path: Path) -> None:
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
    """
    flags = ["--max-priority", "30", "--tenant", "people:weight=4", "--tenant", "a:b:weight=2"]
    config = from_file(tmp_path, text, *flags)
    assert isinstance(config, LaunchConfig)
    assert config.balancer.tenants == (
        Tenant("people", 50, 4.0),
        Tenant("team.batch", 30, 0.5),
        Tenant("a:b", 30, 2.0),
    )
    assert launch_config(["--model-path", "m"]).balancer.tenants == ()


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        launch_config(["--config", "nowhere.toml", "--model-path", "m"])


def test_the_key_comes_from_a_file_or_a_variable_and_is_never_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "key").write_text("from-file\n")
    monkeypatch.setenv("A_KEY", "from-variable")
    assert BalancerConfig(api_key=f"file:{tmp_path / 'key'}").read_api_key() == "from-file"
    assert BalancerConfig(api_key="env:A_KEY").read_api_key() == "from-variable"
    assert BalancerConfig().read_api_key() is None
    (tmp_path / "empty").write_text("\n")
    for bad in ("sk-secret", "file:/nowhere", "env:UNSET_KEY", f"file:{tmp_path / 'empty'}"):
        with pytest.raises(ConfigError, match="api_key") as caught:
            BalancerConfig(api_key=bad).check()
        assert "sk-secret" not in str(caught.value)


@pytest.mark.parametrize("names", [(BILLING_HEADER,), (), ("x-a", "x-b")])
def test_the_balancers_command_line_carries_its_settings_whole(names: tuple[str, ...]) -> None:
    from argparse import ArgumentParser

    from sgl_ext.config import add_balancer_flags

    config = BalancerConfig(
        host="0.0.0.0",
        port=1,
        processes=3,
        api_key="env:K",
        max_body_bytes=2,
        drain_s=3.5,
        strip_headers=names,
        sort_tools=True,
        max_in_flight=4,
        queue_limit=5,
        queue_timeout_s=6.5,
        max_priority=7,
        tenants=(Tenant("-a:b=c,d", 7), Tenant("b", -8, 1e-07), Tenant("c d", 9, 1e300)),
        aging_s=8.5,
        request_log="requests.log",
        diagnose=True,
        store="kept.sqlite",
        store_limit_bytes=1 << 20,
        response_ttl_s=9.5,
    )
    parser = ArgumentParser()
    add_balancer_flags(parser)
    flags = vars(parser.parse_args(config.to_argv()))
    assert balancer_config(BalancerConfig(), flags) == config
