"""The account is the sum of its holds, whatever happens to them."""

from __future__ import annotations

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
