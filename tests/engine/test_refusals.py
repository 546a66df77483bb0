"""An engine that cannot be extended whole does not start, and says why. Real SGLang processes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from sgl_ext_cpu.node import free_port
from sgl_ext_cpu.nursery import Nursery

from sgl_ext.engine import startup
from sgl_ext.engine.core.folder import acknowledge
from sgl_ext.engine.sglang_versions import TESTED, installed
from sgl_ext.node.failure import failure
from tests.waiting import until


class FailedStart(NamedTuple):
    """How an engine ended that did not start."""

    status: int
    output: str


Start = Callable[..., FailedStart]


@pytest.fixture
def failed_start(nursery: Nursery, tiny_model: Path, tmp_path: Path) -> Start:
    """Starts an engine that is expected to refuse, and returns how it ended."""

    def start(*flags: str, **environ: str) -> FailedStart:
        command = ["--model-path", str(tiny_model), *flags]
        command += ["--port", str(free_port()), "--max-total-tokens", "4096"]
        log = tmp_path / "engine.log"
        server = nursery.start(command, log, "sgl_ext.engine.serve", {**os.environ, **environ})
        try:
            until(lambda: not server.running())
            return FailedStart(server.exit_status() or 0, log.read_text())
        finally:
            server.stop()

    return start


def another_plugin(folder: Path, code: str) -> str:
    """A plugin of another distribution that SGLang loads before ours; returns a PYTHONPATH."""
    (folder / "saboteur.py").write_text(f"def activate():\n    {code.strip()}\n")
    info = folder / "saboteur-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: saboteur\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nsaboteur = saboteur:activate\n")
    return str(folder)


def test_a_missing_symbol_stops_the_start_and_is_named(failed_start: Start, tmp_path: Path) -> None:
    path = another_plugin(
        tmp_path, "import sglang.srt.entrypoints.http_server as server; del server.ORJSONRequest"
    )
    ended = failed_start(PYTHONPATH=path)
    assert ended.status != 0
    assert "sglang.srt.entrypoints.http_server.ORJSONRequest.json" in ended.output
    assert f"SGLang {installed()}" in ended.output


def test_a_scheduler_without_the_plugin_stops_the_start(
    failed_start: Start, tmp_path: Path
) -> None:
    code = """
    import os
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def hide_plugin(*_, **__):
        os.environ["SGLANG_PLUGINS"] = "saboteur"

    launch = "sglang.srt.entrypoints.engine.Engine._launch_subprocesses"
    HookRegistry.register(launch, hide_plugin, HookType.BEFORE)
"""
    path = another_plugin(tmp_path, code)
    ended = failed_start(PYTHONPATH=path)
    assert ended.status != 0
    assert "--radix-cache-backend='sgl_ext' is not registered" in ended.output


def test_a_scheduler_that_acknowledged_nothing_stops_the_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SGLEXT_ENGINE_FOLDER", str(tmp_path))
    acknowledge("detokenizer")
    acknowledge("scheduler")
    startup.await_acknowledgements([{}])
    with pytest.raises(SystemExit, match="not loaded in a scheduler"):
        startup.await_acknowledgements([{}, {}])


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--hicache-ratio", "0"), "--hicache-ratio=0: must be above 0"),
        (("--enable-lmcache",), "--enable-lmcache and --enable-hierarchical-cache"),
        (("--disable-radix-cache",), "enable-hierarchical-cache and disable-radix-cache"),
    ],
)
def test_flags_that_contradict_the_host_cache_are_rejected_by_name(
    failed_start: Start, flags: tuple[str, ...], named: str
) -> None:
    ended = failed_start("--enable-hierarchical-cache", *flags)
    assert ended.status != 0
    shown = failure(ended.output.splitlines(), ended.status)
    assert named in " ".join(shown)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SGLANG_RUST_SERVER", "1"),
        ("SGLANG_PLUGINS", "another"),
        ("SGLEXT_SETTINGS", '{"pin_budget": 2}'),
        ("SGLEXT_SETTINGS", '{"strip_headers": ["two words"]}'),
    ],
)
def test_an_unusable_environment_is_rejected_by_name(
    failed_start: Start, name: str, value: str
) -> None:
    ended = failed_start(**{name: value})
    assert ended.status != 0
    assert (name if value != '{"strip_headers": ["two words"]}' else "two words") in ended.output
    assert "Traceback" not in ended.output


def test_another_sglang_version_is_rejected_unless_its_user_wants_to_try(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(startup, "version", lambda _: "99.0")
    with pytest.raises(RuntimeError, match=rf"{TESTED[-1]}, and this is 99.0; set untested-sglang"):
        startup.check_environment({})
    startup.check_environment({"SGLEXT_SETTINGS": '{"untested_sglang": true}'})


@pytest.mark.parametrize("number", TESTED)
def test_tested_versions_are_taken(monkeypatch: pytest.MonkeyPatch, number: str) -> None:
    monkeypatch.setattr(startup, "version", lambda _: number)
    startup.check_environment({})
