"""The sources that an operator names."""

from __future__ import annotations

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
