"""The ids and trace headers of clients that are kept, and those that are made."""

from __future__ import annotations

import pytest

from sgl_ext.protocols.request_ids import (
    TraceContext,
    is_valid_id,
    lines_of_new,
    new_request_id,
    new_trace_id,
    read_trace,
    unique_digits,
)

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE}-{SPAN}-01"


@pytest.mark.parametrize("stated", ["req_1", "0af7-65", "a" * 128, "f47ac10b-58cc#12", "Zm9v/+=="])
def test_usual_ids_are_valid(stated: str) -> None:
    assert is_valid_id(stated)


@pytest.mark.parametrize(
    "stated",
    ["", "a" * 129, "a b", "a\n", "a\tb", 'a"b', "a\\b", "a~b", "a:b", "\u00fc", "\x1b[31m", "a'b"],
)
def test_ids_that_are_long_or_could_forge_a_log_line_are_invalid(stated: str) -> None:
    assert not is_valid_id(stated)


def test_made_ids_are_valid_and_differ() -> None:
    made = {new_request_id() for _ in range(100)}
    assert len(made) == 100
    assert all(map(is_valid_id, made))
    assert {len(unique_digits()) for _ in range(100)} == {24}


def test_a_trace_is_read_and_handed_on_as_it_came() -> None:
    trace = read_trace(PARENT, "a=1,b=2")
    assert trace == TraceContext(TRACE, SPAN, True, "a=1,b=2")
    assert trace.lines == f"traceparent: {PARENT}\r\ntracestate: a=1,b=2\r\n"
    unsampled = read_trace(f"00-{TRACE}-{SPAN}-02", "")
    assert unsampled is not None
    assert unsampled.lines == f"traceparent: 00-{TRACE}-{SPAN}-00\r\n"


def test_a_later_version_may_have_more_fields() -> None:
    assert read_trace(f"cc-{TRACE}-{SPAN}-01-more", "") == TraceContext(TRACE, SPAN, True)


@pytest.mark.parametrize(
    "parent",
    [
        "",
        TRACE,
        PARENT.upper(),
        f"{PARENT}-more",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{SPAN}-1",
        f"cc-{TRACE}-{SPAN}-01-{'x' * 600}",
    ],
)
def test_malformed_traces_are_not_read(parent: str) -> None:
    assert read_trace(parent, "") is None


@pytest.mark.parametrize("state", ["a=\u00fc", "a" * 513, "a\x00"])
def test_a_state_that_cannot_be_handed_on_is_left_out(state: str) -> None:
    assert read_trace(PARENT, state) == TraceContext(TRACE, SPAN, True)


@pytest.mark.parametrize("is_sampled", [True, False])
def test_a_new_trace_can_be_read(is_sampled: bool) -> None:
    trace_id = new_trace_id()
    (line,) = lines_of_new(trace_id, is_sampled=is_sampled).splitlines()
    trace = read_trace(line.removeprefix("traceparent: "), "")
    assert trace is not None
    assert (trace.trace_id, trace.is_sampled) == (trace_id, is_sampled)
    assert new_trace_id() != trace_id
