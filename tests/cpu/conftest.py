"""What the CPU tests share: one server per set of flags."""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sgl_ext_cpu", reason="the sgl-ext-cpu distribution is not installed")
pytest.importorskip("sglang", reason="sglang is not installed")

from sgl_ext_cpu.node import free_port
from sgl_ext_cpu.nursery import Nursery, Server

FLAGS = (
    *("--host", "127.0.0.1", "--max-total-tokens", "16384", "--max-running-requests", "8"),
    *("--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled"),
    *("--skip-server-warmup", "--random-seed", "0"),
)


class Engine:
    """A running server and how to ask it. `log` is where it explains itself."""

    def __init__(self, server: Server, port: int, log: Path) -> None:
        self._server = server
        self._address = f"http://127.0.0.1:{port}"
        self.log = log

    def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Post JSON and return the answer, parsed if it is JSON."""
        request = urllib.request.Request(
            self._address + path,
            data=json.dumps(body or {}).encode(),
            headers={"content-type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request) as response:
                answer = response.read()
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path}: {error.code} {error.read()!r}") from error
        return json.loads(answer) if answer.startswith((b"{", b"[")) else answer

    def generate(self, prompts: list[list[int]], new: int, **options: Any) -> list[dict[str, Any]]:
        """Greedy completions of token lists, sent as one batch."""
        answers: list[dict[str, Any]] = self.post(
            "/generate",
            {
                "input_ids": prompts,
                "sampling_params": {"temperature": 0, "max_new_tokens": new, "ignore_eos": True},
                **options,
            },
        )
        return answers

    def flush(self) -> None:
        """Empty the prefix cache."""
        self.post("/flush_cache")

    def wait(self) -> None:
        """Return once requests are served; fail with the log's end if the server ends."""
        while self._server.running():
            try:
                with urllib.request.urlopen(self._address + "/health"):
                    return
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.05)  # leaves the cores to the server that starts
        pytest.fail(f"the server ended:\n{self.log.read_text()[-4000:]}")


@pytest.fixture(scope="module")
def engine(
    request: pytest.FixtureRequest,
    nursery: Nursery,
    tiny_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Engine]:
    """A server with the flags and environment the test's parameter gives."""
    flags, environment = request.param
    with running_engine(
        nursery, tiny_model, tmp_path_factory.mktemp("engine"), flags, environment
    ) as it:
        yield it


@contextmanager
def running_engine(
    nursery: Nursery,
    model: Path,
    folder: Path,
    flags: Sequence[str],
    environment: Mapping[str, str],
) -> Iterator[Engine]:
    """A server that answers, with these flags and variables; its log goes to the folder."""
    port = free_port()
    log = folder / "log"
    server = nursery.start(
        ["--model-path", os.fspath(model), "--port", str(port), *FLAGS, *flags],
        log=log,
        # The plugin is left out: these tests are of the platform alone.
        environment={"SGLANG_PLUGINS": "none", **environment},
    )
    try:
        running = Engine(server, port, log)
        running.wait()
        yield running
    finally:
        server.stop()
