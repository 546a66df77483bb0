"""The table of workers."""

from __future__ import annotations

import pytest

from tests.balancer.routing.test_router import Setting


@pytest.fixture
def setting() -> Setting:
    return Setting()


def test_slots_are_used_again(setting: Setting) -> None:
    gone = setting.workers.all[0]
    setting.workers.remove(gone, 1.0)
    joined = setting.workers.add("http://c", 2.0)
    assert joined.slot == gone.slot
    assert setting.workers.add("http://c", 3.0) is joined
