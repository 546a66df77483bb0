"""However a stream is split, only whole events are passed on, and nothing is lost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sgl_ext.balancer.http.upstream import read_response_head
from sgl_ext.balancer.relay.exchange import Response

PARTS = st.lists(
    st.sampled_from([b"data: 1", b"\n", b"\r\n", b"\n\n", b"\r\n\r\n", b"x", b"\r"]), max_size=12
)


def stream() -> Response:
    return Response(read_response_head(200, b"OK", [(b"content-type", b"text/event-stream")]), b"")


@given(st.lists(PARTS.map(b"".join).filter(bool), max_size=8))
def test_only_whole_events_are_passed_on_and_nothing_is_lost(pieces: list[bytes]) -> None:
    events = stream()
    out = b""
    for number, piece in enumerate(pieces[:-1]):
        whole = events.take(piece)
        out += whole
        assert not whole or whole.endswith((b"\n\n", b"\r\n\r\n"))
        held = b"".join(pieces[: number + 1])[len(out) :]
        assert b"\n\n" not in held
        assert b"\r\n\r\n" not in held
    assert out + events.end(b"".join(pieces[-1:])) == b"".join(pieces)


def test_an_event_in_one_piece_is_not_copied() -> None:
    piece = b"data: 1\n\n"
    assert stream().take(piece) is piece
