"""What an engine's start leaves in its log."""

from __future__ import annotations

import gc
import socket
import threading
import warnings
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from sgl_ext_cpu.node import free_port

from sgl_ext.engine import startup
from sgl_ext.engine.http import secret
from sgl_ext.settings.secrets import EngineSecret


class Args(msgspec.Struct):
    """SGLang's arguments are such a struct."""

    model_path: str
    tp_size: int = 1
    api_key: str | None = None
    dtype: str | None = None
    graphs: Any = None
    log_level: str = "info"


def test_of_the_arguments_only_those_that_differ_from_their_defaults_are_logged() -> None:
    args = Args("m", tp_size=2, api_key="secret")
    shown = msgspec.structs.asdict(args) | {
        "graphs": {"decode": {"bs": [1, 2]}},
        "dtype": "float32",
    }
    assert startup.changed_args(shown, args) == {  # type: ignore[arg-type]
        "model_path": "m",
        "tp_size": 2,
        "api_key": "...",
        "dtype": "float32",
    }


@pytest.mark.parametrize(
    ("given", "found", "logged"),
    [
        (("auto", "auto"), ("qwen3", "qwen"), ["(auto): reasoning qwen3, tool calls qwen"]),
        (
            ("auto", "auto"),
            (None, "llama3"),
            ["(auto): tool calls llama3", "--reasoning-parser: auto found none"],
        ),
        (("qwen3", "auto"), ("qwen3", None), ["--tool-call-parser: auto found none"]),
        ((None, "qwen25"), (None, "qwen25"), []),
    ],
)
def test_what_auto_chose_is_logged_and_what_it_did_not_find(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    given: tuple[str | None, str | None],
    found: tuple[str | None, str | None],
    logged: list[str],
) -> None:
    caplog.set_level("INFO")
    current = [given]

    def args(_: object) -> SimpleNamespace:
        return SimpleNamespace(reasoning_parser=current[0][0], tool_call_parser=current[0][1])

    monkeypatch.setattr(startup, "resolved", args)
    startup.report_parsers(lambda _: current.__setitem__(0, found), object())  # type: ignore[arg-type]
    assert len(caplog.messages) == len(logged)
    assert all(map(str.__contains__, caplog.messages, logged))


@pytest.mark.long
def test_what_is_frozen_stays_so_after_cuda_graphs_were_captured() -> None:
    """SGLang's own hold of the collector, which it takes around each capture."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runner = import_module("sglang.srt.model_executor.runner.base_cuda_graph_runner")
    try:
        gc.freeze()
        with runner.freeze_gc(False):
            pass
        assert gc.get_freeze_count() == 0
        startup.freeze_again(None, object())
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


def test_the_garbage_collector_is_frozen_once_the_server_listens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    port, sent = free_port(), list[str]()
    monkeypatch.setattr(secret, "_own", (f"http://127.0.0.1:{port}/", EngineSecret(None)))

    def post(_: Any, __: str, url: str, **___: Any) -> None:
        sent.append(url)

    asked = (post, object(), "post", f"http://127.0.0.1:{port}/freeze_gc")
    waiting = threading.Thread(target=secret.send_secret, args=asked)
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    with socket.create_server(("127.0.0.1", port)):
        waiting.join(10)
        assert sent == [asked[3]]


def test_on_further_machines_of_an_engine_nobody_waits_for_a_detokenizer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SGLEXT_ENGINE_FOLDER", str(tmp_path))
    schedulers = SimpleNamespace(scheduler_infos=[{}])
    startup.await_acknowledgements((None, None, None, schedulers, None, []))
    with pytest.raises(SystemExit, match="not loaded in a scheduler process"):
        startup.await_acknowledgements((object(), None, None, schedulers, None, []))
