"""A chain in a header: told of exactly these bytes, and of nothing else."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_ext.requests.chain_header import (
    HEADER,
    MOST_SEGMENTS,
    ChainHeader,
    PackedHashes,
    bytes_of,
)
from sgl_ext.requests.headers import HeaderStrip
from sgl_ext.requests.segments import Chain, read_chain
from tests.requests.test_segments import BODY, MESSAGES, bodies

RULES = ChainHeader(HeaderStrip(), sort_tools=False)
RAW = orjson.dumps(BODY)


def value_of(line: bytes) -> str:
    name, _, value = line.decode().removesuffix("\r\n").partition(": ")
    assert name == HEADER
    return value


def said(body: Any = BODY, salt: bytes = b"") -> str:
    chain = read_chain(MESSAGES, body, salt=salt)
    return value_of(RULES.line(MESSAGES, salt, orjson.dumps(body), chain))


def plain(chain: Chain | None) -> Chain | None:
    """The same with tuples."""
    return chain and Chain(
        tuple(chain.hashes),
        tuple(chain.ends),
        chain.session,
        chain.tools,
        chain.tool_segments,
        chain.head_segments,
    )


@given(bodies, st.sampled_from([b"", b"ggroup"]))
def test_a_chain_comes_back_as_it_was(body: dict[str, Any], salt: bytes) -> None:
    chain, raw = read_chain(MESSAGES, body, salt=salt), orjson.dumps(body)
    line = RULES.line(MESSAGES, salt, bytearray(raw), chain)
    if chain.hashes:
        assert plain(RULES.read(value_of(line), MESSAGES, salt, raw)) == chain
    else:
        assert line == b""


@pytest.mark.parametrize(
    ("rules", "path", "salt", "raw"),
    [
        (RULES, MESSAGES, b"", RAW + b" "),
        (RULES, MESSAGES, b"", RAW[:-1] + b" "),
        (RULES, "/v1/chat/completions", b"", RAW),
        (RULES, MESSAGES, b"gother", RAW),
        (ChainHeader(HeaderStrip(), sort_tools=True), MESSAGES, b"", RAW),
        (ChainHeader(HeaderStrip(()), sort_tools=False), MESSAGES, b"", RAW),
    ],
)
def test_it_counts_for_nothing_else(rules: ChainHeader, path: str, salt: bytes, raw: bytes) -> None:
    assert RULES.read(said(), MESSAGES, b"", RAW) is not None
    assert rules.read(said(), path, salt, raw) is None


@given(
    st.none()
    | st.text(max_size=200)
    | st.integers(0, len(said()) - 1).map(lambda size: said()[:size])
)
def test_what_is_malformed_counts_for_nothing(value: str | None) -> None:
    assert RULES.read(value, MESSAGES, b"", RAW) is None


def test_a_chain_that_no_server_would_take_as_a_header_is_not_said() -> None:
    many = tuple(range(MOST_SEGMENTS + 1))
    assert RULES.line(MESSAGES, b"", RAW, Chain(many[:-1], many[1:])) != b""
    assert RULES.line(MESSAGES, b"", RAW, Chain(many, many)) == b""


@given(
    st.lists(st.integers(0, 2**128 - 1) | st.integers(0, 3), max_size=6),
    st.slices(6),
    st.integers(0, 2**128 - 1) | st.integers(0, 3),
)
def test_packed_hashes_are_a_sequence_like_a_tuple(
    hashes: list[int], part: slice, segment: int
) -> None:
    packed = PackedHashes(bytes_of(hashes))
    assert bytes_of(packed) == bytes_of(hashes)
    assert (list(packed), len(packed)) == (hashes, len(hashes))
    assert list(packed[part]) == hashes[part]
    assert (segment in packed) == (segment in hashes)
    assert all(segment in packed for segment in hashes)
    assert [packed[-1 - at] for at in range(len(hashes))] == hashes[::-1]


def test_a_hash_is_not_found_across_two() -> None:
    packed = PackedHashes(bytes_of([1 << 64, 1 << 64]))
    assert 1 not in packed
    assert 1 << 64 in packed
