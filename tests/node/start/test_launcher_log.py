"""The launcher's own log."""

from __future__ import annotations

import io
import json
import logging
from pathlib import Path

import pytest
from rich.console import Console

from sgl_ext import logs
from sgl_ext.node.start.launcher_log import begin_log, launcher_log
from sgl_ext.settings.schema import BalancerSettings, LaunchSettings


def test_it_has_what_is_printed_after_the_versions_and_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Pytest's own handlers stay.
    monkeypatch.setattr(logs.logging, "getLogger", lambda name=None: logger)
    logger = logging.Logger("sgl_ext")
    monkeypatch.setattr("sgl_ext.node.start.launcher_log.log", logger)
    balancer = BalancerSettings(log_format="json", store="redis://:secret@host")
    settings = LaunchSettings(model_path="m", log_dir=str(tmp_path), balancer=balancer)
    printed = io.StringIO()
    say = begin_log(settings, Console(file=printed, width=40))
    line = "engine-0 ended with exit code 1 and restarts in [1] s"
    say(line)
    logger.handlers[0].flush()
    first, second, third = map(json.loads, launcher_log(settings).read_text().splitlines())
    assert (first["message"], first["sglang"]) == ("starting", first["sglang"])
    assert (second["model_path"], second["store"], second["log_format"]) == ("m", "...", "json")
    assert third["message"] == line
    assert printed.getvalue() == f"{line}\n"
