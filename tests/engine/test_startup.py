"""What an engine's start leaves in its log."""

from __future__ import annotations

import socket
import threading
from typing import Any

import msgspec
from sgl_ext_cpu.node import free_port

from sgl_ext.engine import startup


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


def test_the_garbage_collector_is_frozen_once_the_server_listens() -> None:
    port = free_port()

    class Server:
        def url(self) -> str:
            return f"http://127.0.0.1:{port}"

    waiting = threading.Thread(target=startup.await_listening, args=(Server(),))
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    with socket.create_server(("127.0.0.1", port)):
        waiting.join(10)
        assert not waiting.is_alive()
