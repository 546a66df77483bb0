"""What engines answer to the probes of a balancer."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.silence import Signs
from sgl_ext.wire.probes import (
    RANKS_HEADER,
    ROLE_HEADER,
    SETTINGS_HEADER,
    ProbeAnswer,
    encode_signs,
    probe_headers,
    read_probe,
    read_signs,
)


@given(st.integers(0, 2**63), st.integers(1, 512), st.sampled_from(["", "decode", "prefill 8998"]))
def test_what_an_engine_says_to_a_probe_arrives(number: int, ranks: int, role: str) -> None:
    said = ProbeAnswer(number, ranks, role)
    assert read_probe(probe_headers(said)) == said


def test_numbers_that_a_probe_does_not_find_are_unknown() -> None:
    assert read_probe({}) == ProbeAnswer(None, None, "")
    for wrong in ("", "-1", "1.5", "²", "one"):
        found = read_probe({SETTINGS_HEADER: wrong, RANKS_HEADER: wrong})
        assert found == ProbeAnswer(None, None, "")
    assert ROLE_HEADER not in probe_headers(ProbeAnswer(1))


@given(st.floats(0, 1e9), st.integers(0, 2**40))
def test_signs_of_work_arrive(age_s: float, page_faults: int) -> None:
    signs = Signs(age_s, page_faults)
    assert read_signs(encode_signs(signs)) == signs


@pytest.mark.parametrize(
    "wrong", [b"", b"{}", b"[]", b'{"age_s":"1","page_faults":2}', b'{"age_s":1']
)
def test_other_answers_are_errors(wrong: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        read_signs(wrong)
    assert read_signs(b'{"age_s":1.5,"page_faults":2,"later":3}') == Signs(1.5, 2)
