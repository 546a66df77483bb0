"""The headers between a balancer and its engines."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_ext.wire import headers
from sgl_ext.wire.headers import (
    BOOTSTRAP_HEADER,
    DEFAULTS_HEADER,
    INTERNAL_HEADERS,
    MAX_QUEUED_S,
    OF_ANSWERS,
    PURPOSE_HEADER,
    QUEUED_HEADER,
    RANK_HEADER,
    REFUSED,
    REFUSED_LINE,
    SECRET_HEADER,
    WINDOW_HEADER,
    Bootstrap,
    DefaultHints,
    bootstrap_line,
    defaults_line,
    header_line,
    queued_lines,
    rank_line,
    read_bootstrap,
    read_defaults,
    read_purpose,
    read_seconds,
    retry_line,
)

words = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=20)


def parsed(lines: bytes) -> dict[str, str]:
    """The headers of lines, as an engine's HTTP server gives them."""
    assert lines.endswith(b"\r\n")
    pairs = [line.split(b": ", 1) for line in lines.decode("ascii").encode().splitlines()]
    return {name.decode(): value.decode("latin-1") for name, value in pairs}


@given(st.floats(0, 2 * MAX_QUEUED_S), st.floats(0, 2 * MAX_QUEUED_S))
def test_the_time_in_the_queue_arrives_to_the_millisecond(queued_s: float, window_s: float) -> None:
    found = parsed(queued_lines(queued_s, window_s))
    for name, stated_s in ((QUEUED_HEADER, queued_s), (WINDOW_HEADER, window_s)):
        read_s = read_seconds(found, name)
        assert read_s is not None
        assert math.isclose(read_s, min(stated_s, MAX_QUEUED_S), abs_tol=0.001)


@pytest.mark.parametrize("wrong", ["", "-1", "nan", "inf", "1e3", "1.", " 1", "1" * 10, "1,5"])
def test_a_malformed_time_is_none(wrong: str) -> None:
    assert read_seconds({QUEUED_HEADER: wrong}, QUEUED_HEADER) is None
    assert read_seconds({}, QUEUED_HEADER) == 0.0


@given(st.integers(1, 999))
def test_the_number_of_a_retry_arrives(number: int) -> None:
    assert read_purpose(parsed(retry_line(number))) == f"retry-{number}"


def test_a_purpose_is_a_short_word() -> None:
    assert read_purpose({PURPOSE_HEADER: "standby"}) == "standby"
    assert read_purpose({}) == ""
    for wrong in ("x~y", "a" * 17, "a b", "0123"):
        assert read_purpose({PURPOSE_HEADER: wrong}) == ""


@given(words, st.integers(0, 65535), st.integers(0, 10**17))
def test_where_kv_is_handed_over_arrives(host: str, port: int, room: int) -> None:
    found = parsed(bootstrap_line(f"{host} {port}", room))
    assert read_bootstrap(found) == Bootstrap(host, port, room)


@pytest.mark.parametrize("wrong", ["", "a", "a 1", "a b 1", "a 123456 1", "a 1 -1", "a 1 1 1"])
def test_a_malformed_place_of_kv_is_none(wrong: str) -> None:
    assert read_bootstrap({BOOTSTRAP_HEADER: wrong}) is None
    assert read_bootstrap({}) is None


def test_a_rank_is_a_number() -> None:
    assert parsed(rank_line(3)) == {RANK_HEADER: "3"}


hints = st.builds(
    DefaultHints,
    st.none() | st.integers(-1000, 1000),
    st.none() | st.integers(0, 10**9),
    st.none() | st.booleans(),
    st.none() | st.floats(0, 1e9),
)


@given(hints)
def test_default_hints_arrive(stated: DefaultHints) -> None:
    assert read_defaults(parsed(defaults_line(stated))) == stated


def test_default_hints_of_a_later_version_are_ignored_and_malformed_ones_are_errors() -> None:
    assert read_defaults({}) == DefaultHints()
    later = {DEFAULTS_HEADER: '{"priority":2,"later":[1]}'}
    assert read_defaults(later) == DefaultHints(2)
    for wrong in ("", "{", '{"priority":"high"}', "[]", '{"osl":1.5}'):
        with pytest.raises(msgspec.MsgspecError):
            read_defaults({DEFAULTS_HEADER: wrong})


def test_a_refusal_is_in_the_header_of_the_secret() -> None:
    assert header_line(SECRET_HEADER, REFUSED) == REFUSED_LINE


def test_every_header_to_an_engine_is_believed_from_its_balancer_alone() -> None:
    stated = {name for name in vars(headers) if name.endswith("_HEADER")}
    assert {getattr(headers, name) for name in stated} == {*INTERNAL_HEADERS, *OF_ANSWERS}
