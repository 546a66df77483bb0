"""A copy of SGLang in which a symbol has another name: an engine serves with less, or says why not.
Real SGLang processes that import the copy."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import cache_from_source, find_spec
from pathlib import Path

import pytest
import requests
from sgl_ext_cpu.node import FORKING, free_port

from sgl_ext.wire.probes import READY_PATH
from tests.waiting import until

pytestmark = pytest.mark.engine


def copied(folder: Path, name: str, renamed: str) -> Path:
    """A folder with a package `sglang` in which a name is another one wherever it is written. All
    other files are links, and what is compiled of them too."""
    spec = find_spec("sglang")
    assert spec is not None
    assert spec.origin is not None
    package, whole = Path(spec.origin).parent, re.compile(rf"\b{name}\b")
    sources = ((file, file.read_text(encoding="utf-8")) for file in package.rglob("*.py"))
    changed = {file: text for file, text in sources if whole.search(text)}
    assert changed
    stale = {Path(cache_from_source(file)) for file in changed}
    above = {parent for file in changed for parent in file.parents}

    def copy(source: Path, target: Path) -> None:
        if source in changed:
            target.write_text(whole.sub(renamed, changed[source]), encoding="utf-8")
        elif source in above or source.name == "__pycache__":  # a changed file is compiled into it
            target.mkdir()
            for child in source.iterdir():
                if child not in stale:
                    copy(child, target / child.name)
        else:
            target.symlink_to(source)

    copy(package, folder / "sglang")
    return folder


@contextmanager
def serving(sglang: Path, model: Path, log: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """An engine that imports this SGLang, and its address; it may still start."""
    port = free_port()
    path = os.pathsep.join([str(sglang), *filter(None, sys.path)])
    environment = {**os.environ, **FORKING, "PYTHONPATH": path, "SGLANG_PLATFORM": "sgl_ext_cpu"}
    flags = ["--model-path", str(model), "--port", str(port), "--max-total-tokens", "4096"]
    flags += ["--sleep-on-idle", "--skip-server-warmup", "--enable-metrics"]
    command = [sys.executable, "-m", "sgl_ext.engine.serve", *flags]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
    try:
        yield process, f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def test_without_a_symbol_of_a_group_that_may_be_off_an_engine_serves_and_says_so(
    tmp_path: Path, tiny_model: Path
) -> None:
    sglang, log = copied(tmp_path, "_get_history_tool_calls_cnt", "_count_calls"), tmp_path / "log"

    def is_ready() -> bool:
        assert process.poll() is None, log.read_text()[-3000:]
        try:
            return requests.get(f"{url}{READY_PATH}", timeout=5).ok
        except requests.ConnectionError:
            return False

    with serving(sglang, tiny_model, log) as (process, url):
        until(is_ready)
        body = {"model": "tiny", "max_tokens": 2, "messages": [{"role": "user", "content": "Hi"}]}
        answer = requests.post(f"{url}/v1/messages", json=body, timeout=300)
        assert answer.ok, answer.text
        metrics = requests.get(f"{url}/metrics", timeout=60).text
    (line,) = (line for line in log.read_text().splitlines() if "sgl-ext: host caches: off" in line)
    assert "OpenAIServingChat._get_history_tool_calls_cnt is missing" in line
    assert "each turn tokenizes, converts and copies" in line
    assert 'sgl_ext_degraded{feature="host caches"} 1.0' in metrics
    assert 'feature="tool calls"' not in metrics


def test_without_a_symbol_that_no_engine_serves_without_the_start_is_refused_by_name(
    tmp_path: Path, tiny_model: Path
) -> None:
    sglang, log = copied(tmp_path, "add_one_req", "add_a_request"), tmp_path / "log"
    with serving(sglang, tiny_model, log) as (process, _):
        until(lambda: process.poll() is not None)
    assert process.returncode != 0
    reason = log.read_text()
    assert "what no engine serves without has changed: pins: " in reason
    assert "PrefillAdder.add_one_req is missing" in reason
    assert "Scheduler._get_new_batch_prefill_raw has another body" in reason, "all are listed"
