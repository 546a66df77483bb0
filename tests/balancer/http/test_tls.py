"""TLS on the balancer's port. What a connection does behind it is tested as without it."""

from __future__ import annotations

import asyncio
import logging
import re
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession, TCPConnector

from sgl_ext.balancer.http.tls import TlsConnection, TlsPort
from sgl_ext.balancer.server import Balancer
from sgl_ext.limits.bounds import HANDSHAKE_S, MAX_HANDSHAKE_BYTES, MAX_HANDSHAKES
from sgl_ext.settings.certificates import Certificate
from sgl_ext.settings.schema import BalancerSettings, SettingsError
from sgl_ext.settings.sources import balancer_settings, check_balancer
from tests.balancer.conftest import Connect, Serve

# The contract of a connection, here behind TLS.
from tests.balancer.http.test_downstream import (  # noqa: F401
    test_a_chunked_and_a_compressed_body_reach_the_worker_plain,
    test_a_client_that_disconnects_before_an_answer_closes_it_too,
    test_a_client_that_expects_it_gets_100_continue,
    test_a_client_that_is_idle_or_slow_is_timed_out,
    test_a_connection_serves_one_request_after_the_other,
    test_a_disconnected_client_closes_the_workers_connection,
    test_a_flood_sent_ahead_is_answered_in_order,
    test_a_lingering_close_ends,
    test_a_rejected_body_is_skipped_and_the_connection_continues,
    test_a_rejection_reaches_a_client_that_is_still_sending,
    test_a_running_request_ends_before_the_balancer_does,
    test_a_slow_reader_does_not_fill_the_memory,
    test_a_slow_reader_does_not_slow_the_next,
    test_a_stream_that_ends_while_the_balancer_does_closes,
    test_a_stream_to_http_1_0_ends_with_the_connection,
    test_both_planes_are_on_one_connection,
    test_connection_close_is_obeyed,
    test_every_head_has_its_own_deadline,
    test_malformed_bytes_are_answered_and_end_the_connection,
    test_pipelined_bytes_are_bounded,
    test_requests_sent_ahead_are_answered_in_order,
)
from tests.balancer.wire import Raw, Wire, request, running, until
from tests.certificates import Pair, make_pair

# The first bytes of a client's first record: its type, version and length.
BEGUN = b"\x16\x03\x01\x02\x00"


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return make_pair(tmp_path)


@pytest.fixture
async def serve(pair: Pair) -> AsyncIterator[Serve]:
    async with AsyncExitStack() as stack:

        async def begin(*workers: Raw, **config: Any) -> Balancer:
            return await stack.enter_async_context(running(*workers, **pair._asdict(), **config))

        yield begin


Tcp = Callable[..., Awaitable[Wire]]


@pytest.fixture
async def tcp() -> AsyncIterator[Tcp]:
    """Opens connections of TCP, or of TLS with the context that is given."""
    wires: list[Wire] = []

    async def begin(balancer: Balancer, tls: ssl.SSLContext | None = None) -> Wire:
        wires.append(Wire(*await asyncio.open_connection("127.0.0.1", balancer.port, ssl=tls)))
        return wires[-1]

    yield begin
    for wire in wires:
        wire.writer.transport.abort()


@pytest.fixture
def connect(pair: Pair, tcp: Tcp) -> Connect:
    async def begin(balancer: Balancer) -> Wire:
        before = len(balancer._connections)
        wire = await tcp(balancer, pair.trusted())
        # The client's handshake is complete before the server's.
        await until(lambda: len(balancer._connections) > before)
        return wire

    return begin


def failed(balancer: Balancer, reason: str) -> int:
    return balancer._metrics.tls_handshakes_failed.counts[(reason,)]


def spoil(pair: Pair) -> None:
    Path(pair.tls_key).write_text("-----BEGIN PRIVATE KEY-----\n")


async def ends(wire: Wire) -> bool:
    """Waits until the balancer has closed a connection without an answer."""
    try:
        return b"HTTP" not in await wire.rest()
    except ConnectionResetError:  # it had not read all
        return True


def in_work(balancer: Balancer) -> int:
    assert balancer._tls is not None
    return len(balancer._tls)


def certificate_of(wire: Wire) -> bytes:
    found = wire.writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    assert isinstance(found, bytes)
    return found


async def test_a_web_socket_behind_tls(serve: Serve, pair: Pair) -> None:
    balancer = await serve(Raw())
    connector = TCPConnector(ssl=pair.trusted())
    async with (
        ClientSession(connector=connector) as session,
        session.ws_connect(f"https://localhost:{balancer.port}/v1/responses") as socket,
    ):
        for size in (10, 300_000):
            await socket.send_str("x" * size)
            assert (await socket.receive_json())["type"] == "error"
    await until(lambda: not balancer._connections)


@pytest.mark.parametrize(
    ("path", "kind"),
    [(b"/v1/messages", b'"request_too_large"'), (b"/v1/responses", b'"invalid_request_error"')],
)
async def test_a_body_over_the_limit_is_413_in_the_words_of_its_protocol(
    serve: Serve, connect: Connect, path: bytes, kind: bytes
) -> None:
    argv = ["--max-body", "2KB", "--worker", "http://127.0.0.1:1"]
    limit_bytes = balancer_settings(argv).max_body_bytes
    balancer = await serve(Raw(), max_body_bytes=limit_bytes)
    wire = await connect(balancer)
    head, body = await wire.ask(request(b"x" * 2049, path=path))
    assert head.startswith(b"HTTP/1.1 413 ")
    assert kind in body
    assert b"body: larger than 2048 bytes" in body
    assert (await wire.ask(request(b"{}", path=path)))[0].startswith(b"HTTP/1.1 200 ")


# The certificate.


async def test_a_changed_pair_is_for_new_connections_and_ends_none(
    serve: Serve, connect: Connect, pair: Pair, tmp_path: Path
) -> None:
    balancer = await serve(Raw())
    old = await connect(balancer)
    await old.ask(request())
    make_pair(tmp_path)
    balancer.sweep(balancer.now)
    new = await connect(balancer)
    assert certificate_of(new) != certificate_of(old)
    for wire in (old, new):
        assert (await wire.ask(request()))[1] == b"{}"
    assert balancer._metrics.file_reloads.counts["tls", "applied"] == 1


async def test_a_wrong_pair_leaves_the_earlier_one_in_use(
    serve: Serve, connect: Connect, pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    balancer = await serve(Raw())
    before = certificate_of(await connect(balancer))
    spoil(pair)
    for _ in range(3):
        balancer.sweep(balancer.now)
    assert certificate_of(await connect(balancer)) == before
    (said,) = (one for one in caplog.records if one.levelno == logging.ERROR)
    assert f"tls_key={pair.tls_key!r}: " in said.getMessage()
    assert "the earlier certificate stays in use" in said.getMessage()
    assert balancer._metrics.file_reloads.counts["tls", "refused"] == 1


async def test_a_reload_reads_the_files_even_if_they_look_the_same(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    balancer = await serve(Raw())
    monkeypatch.setattr("sgl_ext.settings.certificates.file_version", lambda path: None)
    await balancer.reload()
    assert balancer._metrics.file_reloads.counts["tls", "applied"] == 1


async def test_the_end_of_the_certificate_is_a_metric(serve: Serve, pair: Pair) -> None:
    balancer = await serve(Raw())
    page = balancer._metrics.render().decode()
    (value,) = re.findall(r"^sgl_ext_tls_certificate_expiry_timestamp_seconds (\S+)$", page, re.M)
    assert float(value) == Certificate(*pair).expires_s > 1.7e9


def test_an_expired_certificate_is_used_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert 0 < time.time() - Certificate(*make_pair(tmp_path, days=-1)).expires_s < 2 * 86_400
    assert "the certificate has expired" in caplog.text


def test_a_pair_that_cannot_be_used_is_refused_by_file_and_reason(tmp_path: Path) -> None:
    good, other = make_pair(tmp_path), make_pair(tmp_path, "other")
    locked = make_pair(tmp_path, "locked", password=b"secret")
    text, cut = tmp_path / "text", tmp_path / "cut"
    text.write_text("hello")
    cut.write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    missing = str(tmp_path / "missing")
    for cert, key, error in (
        (missing, good.tls_key, f"tls_cert='{missing}': No such file or directory"),
        (good.tls_cert, missing, f"tls_key='{missing}': No such file or directory"),
        (str(text), good.tls_key, f"tls_cert='{text}': has not a certificate in PEM"),
        (good.tls_key, good.tls_cert, f"tls_cert='{good.tls_key}': has not a certificate"),
        (good.tls_cert, str(text), f"tls_key='{text}': has not a private key in PEM"),
        (str(cut), good.tls_key, f"tls_cert='{cut}': "),
        (good.tls_cert, other.tls_key, f"tls_key='{other.tls_key}': does not belong to"),
        (locked.tls_cert, locked.tls_key, f"tls_key='{locked.tls_key}': is encrypted"),
    ):
        with pytest.raises(SettingsError, match=re.escape(error)):
            check_balancer(BalancerSettings(tls_cert=cert, tls_key=key))
    with pytest.raises(SettingsError, match=r"--tls-cert=.*: needs tls-key, and the other way"):
        balancer_settings(["--tls-cert", good.tls_cert, "--worker", "http://127.0.0.1:1"])


# What is refused before a handshake is complete.


@pytest.mark.parametrize(
    ("path", "shape"),
    [
        (b"/v1/messages", b'"type":"invalid_request_error","message":"This port speaks HTTPS'),
        (b"/v1/chat/completions?a=1", b'"message":"This port speaks HTTPS: use https:// in the'),
        (b"/", b"This port speaks HTTPS"),
    ],
)
async def test_plain_http_is_answered_in_the_words_of_its_protocol(
    serve: Serve, tcp: Tcp, path: bytes, shape: bytes
) -> None:
    balancer = await serve(Raw())
    wire = await tcp(balancer)
    for part in (b"PO", b"ST ", path + b" HTTP/1.1\r\n", b"host: a\r\n\r\n" + b"x" * 100_000):
        wire.writer.write(part)
        await asyncio.sleep(0)
    answer = await wire.rest()
    assert answer.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert b"connection: close\r\n" in answer
    assert shape in answer
    wire.writer.close()
    await until(lambda: in_work(balancer) == 0)
    assert failed(balancer, "plain") == 1
    assert failed(balancer, "faulty") == 0


@pytest.mark.parametrize(
    "sent", [b"\x00\x01\x02", b"\x16\x03\x01\x00\x05hello", b"\x80\x2e\x01\x00\x02"]
)
async def test_bytes_that_are_neither_tls_nor_http_end_their_connection(
    serve: Serve, tcp: Tcp, connect: Connect, sent: bytes
) -> None:
    balancer = await serve(Raw())
    wire = await tcp(balancer)
    wire.writer.write(sent)
    assert await ends(wire)
    await until(lambda: failed(balancer, "faulty") == 1)
    assert (await (await connect(balancer)).ask(request()))[1] == b"{}"


async def test_a_client_that_offers_http_2_too_is_served_in_http_1_1(
    serve: Serve, tcp: Tcp, pair: Pair
) -> None:
    balancer = await serve(Raw())
    context = pair.trusted()
    context.set_alpn_protocols(["h2", "http/1.1"])
    wire = await tcp(balancer, context)
    assert wire.writer.get_extra_info("ssl_object").selected_alpn_protocol() == "http/1.1"
    assert (await wire.ask(request()))[1] == b"{}"


async def test_a_full_table_of_handshakes_loses_its_oldest_and_serves_on(
    serve: Serve, tcp: Tcp, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TlsPort, "limit", 8)
    balancer = await serve(Raw())
    silent = [await tcp(balancer) for _ in range(20)]
    for wire in silent[10:]:
        wire.writer.write(BEGUN)
    assert (await (await connect(balancer)).ask(request()))[1] == b"{}"
    assert in_work(balancer) <= 8
    assert failed(balancer, "displaced") >= 12
    assert await ends(silent[0])
    # They are no connections of clients yet.
    assert len(balancer._connections) == 1


async def test_a_handshake_that_takes_too_long_is_ended(serve: Serve, tcp: Tcp) -> None:
    balancer = await serve(Raw())
    silent, begun = await tcp(balancer), await tcp(balancer)
    begun.writer.write(BEGUN)
    await until(lambda: in_work(balancer) == 2)
    balancer.sweep(asyncio.get_running_loop().time() + HANDSHAKE_S)
    assert await ends(silent)
    assert await ends(begun)
    assert failed(balancer, "timeout") == 2


async def test_a_handshake_has_a_bound_of_bytes(serve: Serve, tcp: Tcp) -> None:
    balancer = await serve(Raw())
    wire = await tcp(balancer)
    # A first message of 100,000 bytes, in records of 16,384 at most.
    record = b"\x16\x03\x01\x40\x00"
    wire.writer.write(record + b"\x01\x01\x86\xa0\x03\x03" + b"x" * (MAX_HANDSHAKE_BYTES - 6))
    wire.writer.write(record + b"x" * MAX_HANDSHAKE_BYTES)
    assert await ends(wire)
    await until(lambda: failed(balancer, "faulty") == 1)


async def test_a_round_of_the_event_loop_takes_one_step_of_one_handshake(
    serve: Serve, tcp: Tcp, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds: list[int] = []
    turn = 0

    def count() -> None:
        nonlocal turn
        turn += 1
        loop.call_soon(count)

    step = TlsConnection.handshake

    def handshake(connection: TlsConnection) -> None:
        rounds.append(turn)
        step(connection)

    monkeypatch.setattr(TlsConnection, "handshake", handshake)
    balancer = await serve(Raw())
    loop = asyncio.get_running_loop()
    loop.call_soon(count)
    wires = await asyncio.gather(*(tcp(balancer, pair.trusted()) for _ in range(20)))
    for wire in wires:
        assert (await wire.ask(request()))[1] == b"{}"
    assert len(rounds) >= 40
    assert len(set(rounds)) == len(rounds)


def test_the_bounds_are_those_of_the_page() -> None:
    page = (Path(__file__).parents[3] / "docs/reference/limits.md").read_text()
    (row,) = (line for line in page.splitlines() if "TLS handshakes" in line)
    for bound in (f"{MAX_HANDSHAKES:,}", f"{MAX_HANDSHAKE_BYTES >> 10} KiB", f"{HANDSHAKE_S:g} s"):
        assert bound in row
