"""API keys are created, found and revoked in a file, and are never shown."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from sgl_ext import keys
from sgl_ext.key_file import Allowance, KeysError, hash_of, parse_keys, read_keys
from sgl_ext.settings.schema import BalancerSettings, SettingsError
from sgl_ext.settings.sources import check_balancer

KEY = "sgl-AbCdEfGhIjKlMnOpQrStUvWxYz0123456789_-AbCdE"
HASH = hash_of(KEY.encode())
LIMITED = "requests_per_minute = 60\ntokens-per-minute = 1.5e5\nadmin = true"
FILE = f"""# ours
[tenants.alice]
{LIMITED}

[keys.0a1b2c3d]   # her laptop
tenant = "alice"
sha256 = "{HASH}"

[keys.other]
tenant = "bob & sons"
sha256 = "{"0" * 64}"
"""


def test_a_file_gives_the_tenant_of_a_key_and_its_limits() -> None:
    found = parse_keys(FILE)
    assert found.tenant_of(KEY.encode()) == "alice"
    assert found.allowance("alice") == Allowance(60, 1.5e5, True)
    assert found.allowance("bob & sons") == Allowance()
    assert found.tenants == {"alice", "bob & sons"}
    for other in ("", KEY[:-1], KEY + "x", HASH, "0" * 64):
        assert found.tenant_of(other.encode()) is None


@pytest.mark.parametrize(
    ("text", "place"),
    [
        (f"[keys]\n{KEY} = 'alice'", "keys: entry 1: must be a table"),
        (f"[keys.{KEY}]\ntenant = 'a'", "keys: entry 1: has an invalid name"),
        (f"[keys.0a1b2c3d]\ntenant = 'a'\nsha256 = '{KEY}'", "keys.0a1b2c3d.sha256: Expected"),
        (f"[keys.0a1b2c3d]\ntenant = '{KEY}\u00e9'\nsha256 = '{HASH}'", "keys.0a1b2c3d.tenant"),
        (f"[keys.0a1b2c3d]\ntenant = 'a'\nkey = '{KEY}'", "keys.0a1b2c3d.key: is not a field"),
        (f"[keys.0a1b2c3d]\ntenant = 'a'\n{KEY} = 1", "keys.0a1b2c3d....: is not a field"),
        (FILE.replace("0" * 64, HASH), "keys: entry 2.sha256: is also the hash of another entry"),
        (f"[tenants.a]\nrequests_per_minute = '{KEY}'", "tenants.a.requests_per_minute: Expected"),
        ("[tenants.a]\nrequests_per_minute = 0", "tenants.a.requests_per_minute: Expected"),
        ("[tenants.a]\nrequests_per_minute = inf", "tenants.a.requests_per_minute: Expected"),
        ("[tenants.a]\nrequests_per_minute = nan", "tenants.a.requests_per_minute: Expected"),
        ("[tenants.a]\ntokens_per_minute = true", "tenants.a.tokens_per_minute"),
        ("[tenants.a]\nadmin = 1", "tenants.a.admin: Expected `bool`"),
        ("[tenants.a]\ntoken_per_minute = 1", "tenants.a.token_per_minute: is not a field"),
        (f"[tenants.a.models.{KEY}]\ntokens-per-minute = 0", "tenants.a.models[...].tokens_per"),
        ("[tenants.a.models.x]\nadmin = true", "tenants.a.models.admin: is not a field of tenants"),
        (f"[tenants.a.models]\n{KEY} = 1", "tenants.a.models: must be a table"),
        (f"[tenants.{KEY}]\nadmin = 1", "tenants: entry 1.admin"),
        (f"{KEY} = 1", "...: must be keys or tenants"),
        (f"[keys\n'{KEY}'", "not TOML"),
    ],
)
def test_a_malformed_file_is_rejected_by_place_without_its_values(
    tmp_path: Path, text: str, place: str
) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    with pytest.raises(SettingsError) as caught:
        check_balancer(BalancerSettings(keys=str(path)))
    assert str(path) in str(caught.value)
    assert place in str(caught.value)
    assert KEY not in str(caught.value)
    assert HASH not in str(caught.value)


def test_a_missing_or_unreadable_file_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"keys=.*cannot be read"):
        check_balancer(BalancerSettings(keys=str(tmp_path / "none.toml")))
    (tmp_path / "bytes").write_bytes(b"\xff")
    with pytest.raises(KeysError, match="not UTF-8"):
        read_keys(tmp_path / "bytes")


def test_limits_are_written_as_they_are_documented(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    keys.main([str(path), "add", "a", "--requests-at-once", "8", "--tokens-per-month", "9"], print)
    assert "requests-at-once = 8\n" in path.read_text()
    assert "tokens-per-month = 9\n" in path.read_text()
    assert next(iter(read_keys(path).by_hash.values())).requests_at_once == 8


def test_a_key_is_created_listed_and_revoked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(FILE)
    shown: list[str] = []
    keys.main([str(path), "add", "carol", "--note", 'her "phone"'], shown.append)
    key = shown.pop()
    name = capsys.readouterr().err.partition(",")[0]
    text = path.read_text()
    assert text.startswith(FILE)
    assert key not in text
    assert len(key) > 40
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_keys(path).tenant_of(key.encode()) == "carol"
    assert read_keys(path).tenant_of(KEY.encode()) == "alice"

    keys.main([str(path), "list"], shown.append)
    assert [line.split("  ")[:2] for line in shown] == [
        ["0a1b2c3d", "alice"],
        ["other", "bob & sons"],
        [name, "carol"],
    ]
    assert 'her "phone"' in shown[-1]
    listed: list[str] = []
    keys.main([str(path), "list", "--json"], listed.append)
    assert [row["name"] for row in json.loads(listed[0])] == ["0a1b2c3d", "other", name]
    assert json.loads(listed[0])[-1]["tenant"] == "carol"
    shown += listed
    assert not any(secret in "".join(shown) for secret in (key, KEY, HASH))

    keys.main([str(path), "revoke", name], shown.append)
    assert path.read_text() == FILE + "\n"
    keys.main([str(path), "revoke", "0a1b2c3d"], shown.append)
    found = read_keys(path)
    assert found.tenant_of(KEY.encode()) is None
    assert found.tenants == {"alice", "bob & sons"}
    assert path.read_text().startswith("# ours\n[tenants.alice]\n")
    assert list(tmp_path.iterdir()) == [path]


def test_the_first_key_creates_the_file(tmp_path: Path) -> None:
    key, _ = keys.add_key(tmp_path / "keys.toml", "alice")
    assert read_keys(tmp_path / "keys.toml").tenant_of(key.encode()) == "alice"


@pytest.mark.parametrize(
    "command", [["revoke", "nobody"], ["add", ""], ["add", "a\nb"], ["add", "a", "--note", "a\nb"]]
)
def test_a_command_that_fails_says_so_and_changes_nothing(
    tmp_path: Path, command: list[str]
) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(FILE)
    with pytest.raises(SystemExit, match="sgl-ext keys: "):
        keys.main([str(path), *command])
    assert path.read_text() == FILE
    assert list(tmp_path.iterdir()) == [path]


def test_a_malformed_file_is_not_written_to(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text("[keys")
    with pytest.raises(KeysError, match="not TOML"):
        keys.add_key(path, "alice")
    assert path.read_text() == "[keys"


COMMENTED = f"""# top

# the first key
[keys.a]   # a laptop
tenant = "alice"
sha256 = "{"0" * 64}"

# the second key
[keys.b]
tenant = "bob"
sha256 = "{"1" * 64}"

# limits
[tenants.bob]
admin = true

# the third key
[keys.c]
tenant = "carol"
sha256 = "{"2" * 64}"
# the end
"""


@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_comments_and_order_survive_a_revocation(tmp_path: Path, name: str) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(COMMENTED)
    keys.revoke_key(path, name)
    table = COMMENTED.index(f"[keys.{name}]")
    end = COMMENTED.index("\n#", table) + 1
    left = [line for line in (COMMENTED[:table] + COMMENTED[end:]).splitlines() if line]
    assert [line for line in path.read_text().splitlines() if line] == left


@pytest.mark.parametrize(
    "text",
    [
        f'[keys]\na = {{tenant = "alice", sha256 = "{HASH}"}}\n',
        f'keys.a.tenant = "alice"\nkeys.a.sha256 = "{HASH}"\n',
        f'["keys" . "a"]\ntenant = """[keys.b]"""\nsha256 = "{HASH}"\n[tenants.x]\n',
    ],
)
def test_a_key_is_revoked_in_every_notation(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    before = parse_keys(text)
    keys.revoke_key(path, "a")
    after = read_keys(path)
    assert not after.by_hash
    assert after.allowances == before.allowances
