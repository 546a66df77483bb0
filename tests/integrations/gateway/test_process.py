"""The picker as a process of its own, with TLS, and with several processes on one port."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import NamedTuple

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from sgl_ext_cpu.node import free_port

from sgl_ext.integrations.gateway.messages import SERVICE
from tests.balancer.cluster.test_processes import answering_worker, process
from tests.integrations.gateway.gateway import Asked
from tests.waiting import until

pytestmark = pytest.mark.long
COUNT = 3


class Certificate(NamedTuple):
    """Files of a certificate of 127.0.0.1 that signs itself."""

    cert: Path
    key: Path


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    folder = tmp_path_factory.mktemp("tls")
    found = Certificate(folder / "cert.pem", folder / "key.pem")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    command += ["-subj", "/CN=picker", "-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-out", str(found.cert), "-keyout", str(found.key)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("waits for openssl")
    return found


class Serving(NamedTuple):
    """Where gateways ask, and the first process."""

    address: str
    running: subprocess.Popen[bytes]


@contextmanager
def serving(*workers: str, **flags: object) -> Iterator[Serving]:
    ports = free_port(), free_port()
    command = ["-m", "sgl_ext.epp", "--port", str(ports[0]), "--picker-port", str(ports[1])]
    for worker in workers:
        command += ["--worker", worker]
    for name, value in flags.items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    with process(*command, "--drain-s", "1") as running:
        yield Serving(f"127.0.0.1:{ports[1]}", running)


@asynccontextmanager
async def connection(
    address: str, certificate: Certificate | None = None
) -> AsyncIterator[grpc.aio.Channel]:
    """A connection of its own, which any of the processes may take."""
    options = (("grpc.use_local_subchannel_pool", 1),)
    if certificate is None:
        channel = grpc.aio.insecure_channel(address, options)
    else:
        trusted = grpc.ssl_channel_credentials(certificate.cert.read_bytes())
        channel = grpc.aio.secure_channel(address, trusted, options)
    async with channel:
        yield channel


async def is_healthy(channel: grpc.aio.Channel) -> bool:
    request = health_pb2.HealthCheckRequest(service=SERVICE)
    try:
        answer = await health_pb2_grpc.HealthStub(channel).Check(
            request, timeout=10, wait_for_ready=True
        )
    except grpc.aio.AioRpcError:
        return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def test_with_a_certificate_only_gateways_that_speak_tls_are_answered(
    certificate: Certificate,
) -> None:
    tls = {"picker_tls_cert": certificate.cert, "picker_tls_key": certificate.key}
    with answering_worker() as worker, serving(worker, **tls) as started:
        async with connection(started.address, certificate) as channel:
            while not await is_healthy(channel):
                assert started.running.poll() is None
            asked = Asked(channel)
            destination, _ = await asked.request()
            assert destination == worker.removeprefix("http://")
            assert await asked.complete(b'{"id": 1}') == b'{"id": 1}'
        async with connection(started.address) as plain:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await Asked(plain).request()
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


def test_a_certificate_that_is_none_ends_the_start_and_is_named(tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    for file in (cert, key):
        file.write_text("none")
    command = ["-m", "sgl_ext.epp", "--port", str(free_port()), "--picker-port", str(free_port())]
    command += ["--picker-tls-cert", str(cert), "--picker-tls-key", str(key)]
    command += ["--worker", "http://127.0.0.1:9"]
    ended = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 1
    assert str(cert) in ended.stderr


async def test_processes_on_one_port_pick_as_one() -> None:
    with ExitStack() as workers:
        urls = [workers.enter_context(answering_worker()) for _ in range(4)]
        started = workers.enter_context(serving(*urls, processes=COUNT))
        until(lambda: len(psutil.Process(started.running.pid).children()) == COUNT)
        async with AsyncExitStack() as stack:
            channels = [
                await stack.enter_async_context(connection(started.address)) for _ in range(12)
            ]
            for channel in channels:
                while not await is_healthy(channel):
                    assert started.running.poll() is None
            body = {"model": "m", "messages": [{"role": "user", "content": "Hello " * 500}]}
            homes = set()
            for channel in channels:
                asked = Asked(channel)
                homes.add((await asked.request(body, x_session_id="one"))[0])
                await asked.complete()
            assert len(homes) == 1, "a conversation stays, whichever process takes it"
