"""Configuration: file and flags, flags win, and a bad value is named before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from sgl_ext.config import BalancerConfig, ConfigError, balancer_config, launch_config
from sgl_ext.requests.headers import BILLING_HEADER


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
        ("", ["--model-path", "m", "--preemption-threshold", "0"], r"preemption_threshold=0"),
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
        ("", ["--model-path", "m", "--max-body-bytes", "0"], r"max_body_bytes=0"),
        ("", ["--model-path", "m", "--strip-header", "a b"], r"strip_header: .*'a b'"),
        ("", ["--model-path", "m", "--tp", "0"], r"tp=0"),
        ("", ["--model-path", "m", "--start-timeout-s", "0"], r"start_timeout_s=0"),
    ],
)
def test_a_bad_value_is_named(tmp_path: Path, text: str, flags: list[str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        from_file(tmp_path, text, *flags)


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
        request_log="requests.log",
    )
    parser = ArgumentParser()
    add_balancer_flags(parser)
    flags = vars(parser.parse_args(config.to_argv()))
    assert balancer_config(BalancerConfig(), flags) == config
