"""The secret that a balancer and its engines share: where it is read, and how it changes."""

from pathlib import Path

import pytest

from sgl_ext.settings.schema import SettingsError
from sgl_ext.settings.secrets import NO_SECRET, EngineSecret

OLD, NEW = "old-0123456789abcdef", "new-0123456789abcdef"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "engine.secret"
    path.write_text(f"{OLD}\n")
    return path


def test_it_is_read_from_a_file_or_a_variable(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SECRET", f" {NEW} ")
    assert EngineSecret(f"file:{file}").accepted == (OLD,)
    assert EngineSecret("env:A_SECRET").accepted == (NEW,)
    assert EngineSecret(None).accepted == ()
    assert EngineSecret(None).sent == NO_SECRET


def test_while_it_is_changed_the_first_line_is_sent_and_each_is_accepted(file: Path) -> None:
    secret = EngineSecret(f"file:{file}")
    assert not secret.reload_if_changed()
    file.write_text(f"{NEW}\n\n  {OLD}\r\n")
    assert secret.reload_if_changed()
    assert (secret.sent, secret.accepted) == (NEW, (NEW, OLD))


def test_a_change_that_cannot_be_used_is_reported_once_and_leaves_the_earlier_secret(
    file: Path,
) -> None:
    secret = EngineSecret(f"file:{file}")
    file.unlink()
    with pytest.raises(SettingsError, match="cannot be read"):
        secret.reload_if_changed()
    assert not secret.reload_if_changed()
    assert secret.accepted == (OLD,)
    file.write_text(NEW)
    assert secret.reload_if_changed()
    assert secret.accepted == (NEW,)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " \n",
        "short",
        f"two {OLD}",
        "x" * 257,
        f"{OLD}\nhüsch-hüsch-hüsch",
        "\n".join([OLD] * 5),
    ],
)
def test_a_secret_that_cannot_be_sent_is_rejected_and_not_shown(file: Path, text: str) -> None:
    file.write_text(text)
    with pytest.raises(SettingsError, match=f"engine_secret='file:{file}'") as caught:
        EngineSecret(f"file:{file}")
    assert OLD not in str(caught.value)
    with pytest.raises(SettingsError, match=r"engine_secret: must be file:PATH or env:VARIABLE"):
        EngineSecret(OLD)


def test_bytes_that_are_no_text_are_rejected(file: Path) -> None:
    file.write_bytes(b"\xff" * 32)
    with pytest.raises(SettingsError, match="not text"):
        EngineSecret(f"file:{file}")
