"""What an engine's start leaves in its log."""

from __future__ import annotations

import gc
import logging
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

from sgl_ext.engine import http_server, startup
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


def test_of_the_arguments_only_those_that_differ_from_their_defaults_are_logged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    args = Args("m", tp_size=2, api_key="secret")
    resolved = {"graphs": {"decode": {"bs": [1, 2]}}, "dtype": "float32"}
    shown = SimpleNamespace(**msgspec.structs.asdict(args) | resolved)
    monkeypatch.setattr(startup, "being_resolved", lambda _: shown)
    changed = startup.ShortArguments(args)  # type: ignore[arg-type]
    assert logged_by(changed, "server_args=%s", {"all": "of them"}) == (
        "server_args={'model_path': 'm', 'tp_size': 2, 'api_key': '...', 'dtype': 'float32'}"
    )


def test_no_line_has_a_secret_of_the_arguments_in_whatever_words() -> None:
    changed = startup.ShortArguments(Args("m", api_key="a-key"))  # type: ignore[arg-type]
    assert logged_by(changed, "arguments: %s", "--api-key a-key") == "arguments: --api-key ..."
    assert logged_by(changed, "100% of it") == "100% of it"


def logged_by(changed: startup.ShortArguments, text: str, *values: Any) -> str:
    record = logging.LogRecord("sglang", logging.INFO, "", 0, text, values, None)
    assert changed.filter(record)
    return record.getMessage()


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
    names = "reasoning_parser", "tool_call_parser"
    monkeypatch.setattr(startup, "as_given", lambda _: dict(zip(names, given, strict=True)))
    chosen = SimpleNamespace(**dict(zip(names, found, strict=True)))
    monkeypatch.setattr(startup, "in_effect", lambda: chosen)
    startup.report_parsers(object())  # type: ignore[arg-type]
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


def test_an_engine_serves_no_http_before_its_schedulers_have_verified_their_hooks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SGLEXT_ENGINE_FOLDER", str(tmp_path))
    with pytest.raises(SystemExit, match="not loaded in a scheduler process"):
        http_server.extend(object(), None, None, None, [{}])  # type: ignore[arg-type]
