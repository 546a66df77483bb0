"""Frames of any kind, in any pieces: the connection goes on or ends, and then holds nothing."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from sgl_ext.balancer.http.downstream import Connection
from sgl_ext.balancer.http.request_head import parse_head
from sgl_ext.balancer.http.websocket import WebSocketConnection, handshake
from sgl_ext.limits.byte_account import ByteAccount, Hold
from sgl_ext.protocols.errors import BalancerError
from tests.attacks.cases import HANDSHAKE


class Server:
    now = 0.0

    def joined(self, connection: Connection) -> bool:
        return True

    def left(self, connection: Connection) -> None: ...


class Transport:
    """Keeps what is written."""

    def __init__(self) -> None:
        self.written = b""
        self.is_closed = False

    def write(self, data: bytes) -> None:
        assert not self.is_closed
        self.written += data

    def close(self) -> None:
        self.is_closed = True

    abort = write_eof = close

    def is_closing(self) -> bool:
        return self.is_closed


class User:
    """Takes messages, and holds their bytes until it is gone."""

    is_idle = True
    is_full = False

    def __init__(self) -> None:
        self.held: list[Hold] = []
        self.refused: list[BalancerError] = []

    def message(self, text: bytearray, hold: Hold) -> None:
        assert hold.size == len(text)
        self.held.append(hold)

    def refuse(self, error: BalancerError) -> None:
        self.refused.append(error)

    def resume(self) -> None: ...
    def end(self) -> None: ...

    def gone(self) -> None:
        for hold in self.held:
            hold.release()


def frame(first: int, masked: bool, payload: bytes) -> bytes:
    size = len(payload)
    length = bytes([size]) if size < 126 else b"\x7e" + size.to_bytes(2)
    head = bytes([first, length[0] | 0x80 * masked]) + length[1:]
    return head + bytes(4 * masked) + payload


PAYLOADS = st.binary(max_size=140) | st.sampled_from(
    [b"{}", *(code.to_bytes(2) for code in (0, 999, 1000, 1005, 1006, 4000, 65535))]
)
# Mostly what is allowed: finished or not, of a known kind, masked.
FIRSTS = st.sampled_from([0x01, 0x00, 0x80, 0x81, 0x82, 0x88, 0x89, 0x8A]) | st.integers(0, 255)
FRAMES = st.builds(frame, FIRSTS, st.sampled_from([True] * 9 + [False]), PAYLOADS)


@given(st.lists(FRAMES, max_size=12), st.integers(1, 200))
def test_any_frames_in_any_pieces(frames: list[bytes], size: int) -> None:
    head, _ = parse_head(HANDSHAKE)
    account, user, closed = ByteAccount(1 << 20), User(), list[str]()
    protocol, _ = handshake(head)
    connection = WebSocketConnection(Server(), protocol, "", account, 200, closed.append)
    connection.user = user
    transport: Any = Transport()
    connection.connection_made(transport)
    data = b"".join(frames)
    for at in range(0, len(data), size):
        connection.received(data[at : at + size])
    if closed:
        assert account.used == 0
        assert transport.written[-2:] != b""
        assert len(user.refused) <= 1
    connection.connection_lost(None)
    assert account.used == 0
