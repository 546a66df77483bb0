"""Zstd frames are decoded as the library does it, in steps of a bounded size."""

from __future__ import annotations

import random

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from sgl_ext.balancer.http.body_codings import ZstdDecoder, ZstdError

STEP = 64 << 10
# A block of one byte repeated: four bytes that become 128 KiB.
_RLE = (131_072 << 3 | 1 << 1).to_bytes(3, "little") + b"x"
_HEADER = b"\x28\xb5\x2f\xfd\x00\x70"  # no checksum, no size, a window of 16 MiB


def decoded(parts: list[bytes], step: int = STEP) -> tuple[bytes, ZstdDecoder]:
    decoder, text = ZstdDecoder(), bytearray()
    for part in parts:
        left: bytes | memoryview = part
        is_full = True
        while left or is_full:
            made = decoder.decompress(left, step)
            assert len(made) <= step
            text += made
            left, is_full = decoder.unconsumed_tail, len(made) == step
    return bytes(text), decoder


@given(
    st.binary(max_size=400_000) | st.binary(max_size=40).map(lambda part: part * 9_000),
    st.integers(1, 19),
    st.booleans(),
    st.integers(1, 70_000),
    st.integers(1, 100_000),
)
def test_any_frame_in_any_pieces(
    text: bytes, level: int, checksum: bool, piece: int, step: int
) -> None:
    packer = zstandard.ZstdCompressor(level=level, write_checksum=checksum)
    packed = packer.compress(text)
    piece = max(piece, len(packed) // 500)
    parts = [packed[at : at + piece] for at in range(0, len(packed), piece)]
    found, decoder = decoded(parts, step)
    assert found == text
    assert decoder.eof
    assert decoder.unused_data == b""


def test_a_frame_that_was_flushed_often_is_decoded() -> None:
    packer = zstandard.ZstdCompressor().compressobj()
    words = [random.Random(i).randbytes(100) for i in range(2000)]
    packed = b"".join(
        packer.compress(word) + packer.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK) for word in words
    )
    found, decoder = decoded([packed + packer.flush(), b""])
    assert found == b"".join(words)
    assert decoder.eof


def test_the_library_gets_one_block_at_a_time() -> None:
    decoder = ZstdDecoder()
    packed = b"\x28\xb5\x2f\xfd\x00\x58" + _RLE * 1000
    assert len(decoder.decompress(packed, STEP)) == STEP
    assert len(decoder.unconsumed_tail) == len(_RLE) * 999, "the others wait"
    assert not decoder.eof


def test_what_follows_a_frame_is_not_part_of_it() -> None:
    _, decoder = decoded([zstandard.compress(b"text") + b"more"])
    assert decoder.unused_data == b"more"


@pytest.mark.parametrize(
    "data",
    [
        b"no zstd at all, and long enough",
        _HEADER + _RLE,
        b"\x28\xb5\x2f\xfd\x00\x58" + b"\x00\x00\x00" * 6000,
        zstandard.ZstdCompressor(write_checksum=True).compress(b"text")[:-1] + b"?",
    ],
    ids=["another format", "a large window", "empty blocks", "a wrong checksum"],
)
def test_what_is_no_such_frame_is_an_error(data: bytes) -> None:
    with pytest.raises(ZstdError):
        decoded([data])
