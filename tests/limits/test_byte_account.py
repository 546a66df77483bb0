"""The account is the sum of its holds, whatever happens to them."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_ext.limits.byte_account import ByteAccount

STEPS = st.lists(
    st.tuples(st.integers(0, 4), st.sampled_from(["take", "set", "release"]), st.integers(0, 150))
)


@given(STEPS)
def test_the_account_is_the_sum_of_the_holds_and_zero_in_the_end(
    steps: list[tuple[int, str, int]],
) -> None:
    account = ByteAccount(100)
    holds = [account.hold(tenant) for tenant in ("", "", "a", "a", "b")]
    for number, step, size in steps:
        hold, before = holds[number], account.used
        if step == "take":
            fits = hold.take_up_to(size)
            assert fits or account.used == before
            assert not fits or account.used <= max(100, before)
        elif step == "set":
            assert hold.set(size) == (size <= 100)
        else:
            hold.release()
        assert account.used == sum(hold.size for hold in holds)
        of_a = holds[2].size + holds[3].size
        assert account.by_tenant.get("a", 0) == of_a
    for hold in holds:
        hold.release()
    assert account.used == 0
    assert account.by_tenant == {}


def test_a_refusal_is_counted_and_a_tenant_gets_half() -> None:
    refusals: list[None] = []
    account = ByteAccount(100, lambda: refusals.append(None))
    assert account.hold("a").take_up_to(50)
    assert not account.hold("a").take_up_to(1)
    assert account.hold("b").take_up_to(50)
    assert not account.hold("").take_up_to(1)
    assert len(refusals) == 2


# As bodies are, buffers grow. With glibc's defaults, each raises the size up to which freed memory
# is kept for the next one.
_CODE = r"""
import re
def own_kb():
    return int(re.search(r"RssAnon:\s+(\d+)", open("/proc/self/status").read())[1])
before = own_kb()
for size in (2, 4, 8, 16, 30):
    one = bytes(b"x" * (size << 20))
    del one
several = [b"x" * (12 << 20) for _ in range(4)]
del several
print(own_kb() - before)
"""
_OURS = "from sgl_ext.limits.byte_account import return_freed_memory; return_freed_memory()\n"


def kept_kb(code: str) -> int:
    """What a process still has of the buffers that it freed."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_freed_buffers_leave_the_process() -> None:
    assert kept_kb(_CODE) > 2 * kept_kb(_OURS + _CODE)
