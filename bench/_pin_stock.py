"""SGLang as it is, for benches: an engine without the plugin, started as ours are."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import requests

from bench._node import ROOT, Node, free_port
from sgl_ext.config import launch_config
from sgl_ext.node.hardware import (
    engine_command,
    engine_environment,
    find_hardware,
    platform_flags,
)

_START_TIMEOUT_S = 600.0


@contextmanager
def stock_engine(
    model: Path, log_dir: Path, *flags: str, environment: Mapping[str, str] | None = None
) -> Iterator[Node]:
    """Starts it with the configuration and the flags that our engines get, and ends it.

    `environment` adds to this process's variables.
    Raises RuntimeError with the end of its log if it does not come up.
    """
    config = launch_config(
        ["--config", str(ROOT / "launch/cpu.toml"), "--model-path", str(model), *flags]
    )
    found, port = find_hardware(), free_port()
    command = engine_command(config, port)
    command[command.index("-m") + 1] = "sglang.launch_server"
    own = engine_environment(config, found, 0) | {"SGLANG_PLUGINS": "none"}
    log_dir.mkdir(parents=True, exist_ok=True)
    log = log_dir / "engine.log"
    with log.open("w") as file:
        process = subprocess.Popen(
            [*command, *platform_flags(found), *config.engine_args],
            stdout=file,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
            env={**os.environ, **own, **(environment or {})},
        )
    url = f"http://127.0.0.1:{port}"
    try:
        _await_health(process, url, log)
        yield Node(url, (url,), process, log_dir)
    finally:
        process.terminate()
        process.wait(timeout=90)


def _await_health(process: subprocess.Popen[str], url: str, log: Path) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while not _is_healthy(url):
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the engine did not start:\n{log.read_text()[-4000:]}")
        time.sleep(0.25)


def _is_healthy(url: str) -> bool:
    try:
        return requests.get(f"{url}/health", timeout=5).ok
    except requests.RequestException:
        return False
