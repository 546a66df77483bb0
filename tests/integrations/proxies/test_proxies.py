"""The recipes of nginx and Caddy, run by the real programs in front of a balancer."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp import ClientSession, TCPConnector, WSMsgType
from sgl_ext_cpu.node import ROOT, free_port, running_process

from sgl_ext.settings.schema import BalancerSettings
from tests.balancer.wire import Raw, Wire, answer, request, running, sse
from tests.certificates import Pair, make_pair
from tests.debian import require_debian
from tests.waiting import HANG_S

NGINX, CADDY = ROOT / "launch/nginx.conf", ROOT / "launch/Caddyfile"
PACKAGES = {"nginx": "nginx-light", "caddy": "caddy"}
# Debian's nginx is where only root looks.
PATH = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin"))


class Proxy:
    """A proxy in front of a port. port: where it listens, with TLS."""

    def __init__(self, port: int, balancer: int, pair: Pair) -> None:
        self.port = port
        self.balancer = balancer
        self.pair = pair

    async def connect(self) -> Wire:
        tls = self.pair.trusted()
        made = await asyncio.open_connection(
            "127.0.0.1", self.port, ssl=tls, server_hostname="localhost"
        )
        return Wire(*made)


def listens(port: int) -> bool:
    import socket

    with socket.socket() as made:
        return made.connect_ex(("127.0.0.1", port)) == 0


def nginx_command(program: str, text: str, folder: Path) -> list[str]:
    config = folder / "nginx.conf"
    paths = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
    here = "".join(f"    {path}_temp_path {folder}/{path};\n" for path in paths)
    text = text.replace("http {\n", f"http {{\n    access_log off;\n{here}", 1)
    config.write_text(f"daemon off;\npid {folder}/pid;\nerror_log stderr;\n{text}")
    return [program, "-p", str(folder), "-c", str(config)]


def caddy_command(program: str, text: str, folder: Path) -> list[str]:
    config = folder / "Caddyfile"
    config.write_text("{\n\tadmin off\n\tauto_https disable_redirects\n}\n" + text)
    return [program, "run", "--adapter", "caddyfile", "--config", str(config)]


@pytest.fixture(scope="module", params=["nginx", "caddy"])
def proxy(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Proxy]:
    name: str = request.param
    require_debian(lambda: shutil.which(name, path=PATH) is not None, PACKAGES[name])
    program = shutil.which(name, path=PATH)
    assert program is not None
    folder = tmp_path_factory.mktemp(name)
    made = Proxy(free_port(), free_port(), make_pair(folder))
    text = (NGINX if name == "nginx" else CADDY).read_text()
    for old, new in (
        ("127.0.0.1:30000", f"127.0.0.1:{made.balancer}"),
        ("listen 443", f"listen 127.0.0.1:{made.port}"),
        ("server_name node.example.com", "server_name localhost"),
        ("node.example.com {", f"https://localhost:{made.port} {{"),
        ("/etc/sgl-ext/node.pem", made.pair.tls_cert),
        ("/etc/sgl-ext/node.key", made.pair.tls_key),
    ):
        text = text.replace(old, new)
    command = (nginx_command if name == "nginx" else caddy_command)(program, text, folder)
    with running_process(command, folder / "log", lambda: listens(made.port)):
        yield made


async def test_an_event_arrives_before_the_next_is_sent(proxy: Proxy) -> None:
    async with asyncio.timeout(HANG_S):
        worker = Raw(sse(b"data: 1\n\n", end=b""))
        async with running(worker, port=proxy.balancer):
            wire = await proxy.connect()
            wire.writer.write(request(b"{}", b"host: localhost"))
            head = await wire.reader.readuntil(b"data: 1\n\n")
            assert b" 200 " in head
            for number in range(2, 5):
                worker.go_on(b"9\r\ndata: %d\n\n\r\n" % number)
                await wire.reader.readuntil(b"data: %d\n\n" % number)
            worker.go_on(b"0\r\n\r\n")
            await wire.reader.readuntil(b"0\r\n\r\n")
            wire.writer.close()


async def test_a_client_names_no_tenant_and_a_long_body_passes(proxy: Proxy) -> None:
    async with asyncio.timeout(HANG_S):
        worker = Raw([answer(b"{}")])
        async with running(worker, port=proxy.balancer):
            wire = await proxy.connect()
            body = b'{"a": "%b"}' % (b"x" * 1_900_000)
            lines = b"host: localhost", b"X-Tenant-Id: forged"
            wire.writer.write(request(body, *lines))
            assert (await wire.reader.readuntil(b"{}")).startswith(b"HTTP/1.1 200 OK\r\n")
            wire.writer.close()
        (sent,) = worker.requests
        assert b"forged" not in sent
        assert sent.endswith(body)


async def test_a_web_socket_passes_both_ways(proxy: Proxy) -> None:
    async with asyncio.timeout(HANG_S), running(Raw(), port=proxy.balancer):
        connector = TCPConnector(ssl=proxy.pair.trusted())
        async with (
            ClientSession(connector=connector) as session,
            session.ws_connect(f"https://localhost:{proxy.port}/v1/responses") as socket,
        ):
            for _ in range(2):
                await socket.send_str("no JSON")
                said = await socket.receive()
                assert said.type is WSMsgType.TEXT
                assert said.json()["type"] == "error"


def test_no_proxy_ends_a_request_that_waits_for_capacity() -> None:
    settings = BalancerSettings()
    timeouts = re.findall(r"proxy_(?:read|send)_timeout (\d+)h;", NGINX.read_text())
    assert len(timeouts) == 2
    assert all(int(hours) * 3600 > 2 * settings.queue_timeout_s for hours in timeouts)
    assert "timeout" not in CADDY.read_text()  # Caddy has none of its own


def test_the_proxies_leave_the_refusal_of_large_bodies_to_the_balancer() -> None:
    limit = BalancerSettings().max_body_bytes >> 20
    (nginx,) = re.findall(r"client_max_body_size (\d+)m;", NGINX.read_text())
    (caddy,) = re.findall(r"max_size (\d+)MiB", CADDY.read_text())
    assert int(nginx) == int(caddy) > limit
