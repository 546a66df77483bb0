"""The sources that an operator names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sgl_ext.membership.file import write_members
from sgl_ext.membership.sources import open_sources
from sgl_ext.settings.schema import SettingsError
from sgl_ext.settings.sources import balancer_settings


def test_sources_count_in_the_order_in_which_they_are_named(tmp_path: Path) -> None:
    for name in "ba":
        write_members(tmp_path / name, ())
    named = [f"file:{tmp_path / name}" for name in "ba"]
    argv = ["--workers-from", named[0], "--worker", "http://a:1", "--workers-from", named[1]]
    sources = open_sources(balancer_settings(argv))
    assert [source.name for source in sources] == ["workers", *named]
    assert open_sources(balancer_settings([])) == []


@pytest.mark.parametrize("text", ["consul:x", "file", "file:", "/etc/engines.json"])
def test_an_unknown_source_is_rejected_with_those_there_are(text: str) -> None:
    with pytest.raises(SettingsError, match=rf"^workers_from='{text}': must be file:PATH"):
        open_sources(balancer_settings(["--workers-from", text]))


def run(code: str) -> str:
    """What an interpreter of its own prints for this code."""
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_an_extra_that_is_missing_is_named() -> None:
    said = run(
        "import sys; sys.modules['lightkube'] = None\n"
        "from sgl_ext.membership.sources import open_source\n"
        "try: open_source('kubernetes:engines')\n"
        "except Exception as error: print(error)"
    )
    assert said.endswith("is not installed: pip install 'sgl-ext[kubernetes]'")


def test_a_start_without_extras_in_its_settings_imports_none() -> None:
    extras = {"lightkube", "httpx2", "httpx", "kubernetes_asyncio", "ray"}
    extras |= {"redis", "psycopg", "psycopg_pool"}
    found = run(
        "import sys, sgl_ext.balancer.serve, sgl_ext.launch\n"
        "from sgl_ext.membership.sources import open_sources\n"
        "from sgl_ext.settings.schema import BalancerSettings\n"
        "open_sources(BalancerSettings(workers=('http://a:1',)))\n"
        f"print(*({extras!r} & {{name.partition('.')[0] for name in sys.modules}}))"
    )
    assert found == ""
