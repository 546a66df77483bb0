"""Settings of the endpoint picker that cannot be used are named at the start."""

from __future__ import annotations

import pytest

from sgl_ext.settings.schema import SettingsError
from sgl_ext.settings.sources import address_of, balancer_settings, picker_settings


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (["--worker", "http://localhost:30001"], "by address"),
        (["--picker-port", "30000"], "the port of HTTP"),
        (["--picker-tls-cert", __file__], "needs picker-tls-key"),
        (["--picker-tls-cert", __file__, "--picker-tls-key", "/no/such/file"], "no such file"),
    ],
)
def test_a_wrong_setting_is_named(argv: list[str], word: str) -> None:
    with pytest.raises(SettingsError, match=word):
        picker_settings(argv)


def test_a_picker_takes_a_balancers_flags_and_a_balancer_none_of_its_own() -> None:
    argv = ["--worker", "http://127.0.0.1:30001", "--queue-limit", "7"]
    settings = picker_settings([*argv, "--picker-port", "9003"])
    assert (settings.queue_limit, settings.picker_port) == (7, 9003)
    with pytest.raises(SettingsError, match="unrecognized arguments: --picker-port"):
        balancer_settings([*argv, "--picker-port", "9003"])


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://10.0.0.1:30001", "10.0.0.1:30001"),
        ("http://10.0.0.1", "10.0.0.1:80"),
        ("http://[fd00::1]:30001", "[fd00::1]:30001"),
        ("http://engine:30001", None),
    ],
)
def test_gateways_know_engines_by_address(url: str, address: str | None) -> None:
    assert address_of(url) == address
