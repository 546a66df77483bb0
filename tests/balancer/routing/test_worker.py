"""A worker: its pending tokens by both accounts, and its warm-up."""

from __future__ import annotations

import pytest

from sgl_ext.balancer.routing.worker import SETTLED_S, SLOW_START_S
from tests.balancer.routing.test_router import Setting


@pytest.fixture
def setting() -> Setting:
    return Setting()


def test_an_engines_own_account_adds_the_work_of_others(setting: Setting) -> None:
    worker = setting.workers.all[0]
    worker.apply_load({"pending_tokens": 5000}, now_s=10.0)
    assert worker.total_pending_tokens(10.0) == 0, "it may be older than what has finished since"
    assert worker.total_pending_tokens(10.0 + SETTLED_S) == 5000
    worker.apply_load({"pending_tokens": 4000}, now_s=11.0)
    assert worker.total_pending_tokens(11.0) == 4000
    worker.apply_load({"pinned_tokens": 90_000, "used_tokens": 90_000}, now_s=12.0)
    assert worker.total_pending_tokens(13.0) == 0, "pinned tokens are no load"


def test_a_computed_prompt_is_no_longer_pending(setting: Setting) -> None:
    attempt = setting.place(setting.read("Write a book", system="9" * 40_000))
    worker, now_s = attempt.worker, setting.clock.now_s
    assert worker.total_pending_tokens(now_s) > 9_000
    worker.apply_load({"pending_tokens": 0}, now_s)
    assert worker.total_pending_tokens(now_s) > 9_000
    assert worker.total_pending_tokens(now_s + SETTLED_S) == 0, "no answer yet, but it decodes"


def test_a_returning_worker_takes_up_work_slowly(setting: Setting) -> None:
    back, other = setting.workers.all
    setting.workers.mark(back, ready=False)
    setting.workers.mark(back, ready=True)
    first = setting.place(setting.read("One", system="1" * 4000))
    assert first.worker is other
    setting.clock.now_s += SLOW_START_S
    second = setting.place(setting.read("Two", system="2" * 4000))
    assert second.worker is back
