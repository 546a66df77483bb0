"""Attempts: followers of a prefix, in-flight prefixes, and the load of a worker."""

from __future__ import annotations

import pytest

from sgl_ext.balancer.routing.attempts import CONFIRM_S, UNCONFIRMED_S
from tests.balancer.routing.test_router import A, B, Setting


@pytest.fixture
def setting() -> Setting:
    return Setting()


def test_sub_agents_follow_the_one_whose_prefill_runs(setting: Setting) -> None:
    lead = setting.place(setting.read("Find a"))
    second, third = setting.place(setting.read("Find b")), setting.place(setting.read("Find c"))
    assert second.worker is third.worker is lead.worker
    assert second.follows is third.follows is lead
    resumed: list[str] = []
    lead.followers.append(lambda: resumed.append("second"))
    setting.router.attempts.prefill_done(lead)
    assert resumed == ["second"]
    assert setting.place(setting.read("Find d")).follows is None


def test_followers_go_on_when_the_engine_reports_the_prefix(setting: Setting) -> None:
    lead = setting.place(setting.read("Find a"))
    setting.place(setting.read("Find b"))
    resumed: list[str] = []
    lead.followers.append(lambda: resumed.append("follower"))
    setting.router.attempts.confirm(lead.worker)
    assert resumed == []
    setting.confirm(lead)
    setting.router.attempts.confirm(lead.worker)
    assert (resumed, lead.worker.decoding) == (["follower"], 1)
    setting.router.attempts.prefill_done(lead)
    assert lead.worker.decoding == 1


def test_no_request_waits_for_a_prefix_on_an_engine_without_events(setting: Setting) -> None:
    for worker in setting.workers.all:
        worker.publishes = False
    setting.place(setting.read("Find a"))
    assert setting.place(setting.read("Find b")).follows is None


def test_followers_are_woken_when_the_leader_fails(setting: Setting) -> None:
    lead = setting.place(setting.read("Find a"))
    setting.place(setting.read("Find b"))
    resumed: list[str] = []
    lead.followers.append(lambda: resumed.append("follower"))
    setting.router.attempts.fail(lead, by_worker=True)
    assert resumed == ["follower"]


def test_one_that_waits_for_a_prefix_shows_no_speed(setting: Setting) -> None:
    lead = setting.place(setting.read("Find a"))
    assert lead.work_tokens == lead.routing.prompt_tokens
    assert setting.place(setting.read("Find b")).work_tokens == 0


def test_what_is_ahead_of_a_request_is_work_for_its_first_byte(setting: Setting) -> None:
    one = setting.place(setting.read("One", system="1" * 9_000))
    others = {each for each in setting.workers.all if each is not one.worker}
    two = setting.router.place(setting.read("Two", system="2" * 9_000), others)
    assert two is not None
    assert two.work_tokens == one.uncached_tokens + two.uncached_tokens


def test_an_unconfirmed_prefix_is_forgotten_soon(setting: Setting) -> None:
    attempt = setting.place(setting.read("Hello"))
    setting.router.attempts.prefill_done(attempt)
    setting.router.attempts.succeed(attempt)
    assert setting.held_tokens(attempt) > 0
    setting.clock.now_s += CONFIRM_S
    setting.place(setting.read("Else", system="Other"))
    assert setting.held_tokens(attempt) == 0


def test_an_engine_without_events_is_believed_longer(setting: Setting) -> None:
    attempt = setting.place(setting.read("Hello"))
    attempt.worker.publishes = False
    setting.router.attempts.succeed(attempt)
    setting.clock.now_s += UNCONFIRMED_S - 1
    setting.place(setting.read("Else", system="Other"))
    assert setting.held_tokens(attempt) > 0


def test_load_is_released_however_an_attempt_ends(setting: Setting) -> None:
    attempts = [setting.place(setting.read(f"Task {n}", system=f"{n}" * 9000)) for n in range(4)]
    assert sum(worker.pending_tokens for worker in setting.workers.all) > 8000
    setting.router.attempts.prefill_done(attempts[0])
    assert attempts[0].worker.decoding == 1
    setting.router.attempts.succeed(attempts[0])
    setting.router.attempts.fail(attempts[1], by_worker=True)
    setting.router.attempts.fail(attempts[2], by_worker=False)
    setting.router.attempts.prefill_done(attempts[3])
    setting.router.attempts.fail(attempts[3], by_worker=True)
    loads = [(w.in_flight, w.pending_tokens, w.decoding) for w in setting.workers.all]
    assert loads == [(0, 0, 0)] * 2


@pytest.mark.parametrize("ends_early", [True, False])
def test_a_prefill_engine_is_free_once_it_has_computed(setting: Setting, ends_early: bool) -> None:
    prefill = setting.workers.all[0]
    for worker in setting.workers.all:
        setting.workers.set_role(worker, "prefill 1" if worker is prefill else "decode")
    attempt = setting.place(setting.read("Hello"))
    assert (attempt.worker, attempt.answerer) == (prefill, attempt.decoder)
    decode = attempt.answerer
    assert (prefill.in_flight, decode.in_flight, prefill.decoding) == (1, 1, 0)
    assert decode.running.tokens == attempt.routing.prompt_tokens
    if not ends_early:
        setting.router.attempts.prefill_done(attempt)
        assert (prefill.in_flight, decode.in_flight, decode.decoding) == (0, 1, 1)
        assert (prefill.pending_tokens, prefill.running.requests) == (0, 0)
    setting.router.attempts.succeed(attempt)
    for worker in (prefill, decode):
        assert (worker.in_flight, worker.decoding, worker.running.requests) == (0, 0, 0)
        assert not worker.attempts


def test_answers_go_to_the_decode_engine_with_the_fewest() -> None:
    setting = Setting((A, B, "http://c:1"))
    first, *others = setting.workers.all
    for worker in setting.workers.all:
        setting.workers.set_role(worker, "prefill 1" if worker is first else "decode")
    answerers = [setting.place(setting.read(f"Task {n}")).answerer for n in range(2 * len(others))]
    assert all(answerers.count(worker) == 2 for worker in others)
    for worker in others:
        worker.draining = True
    assert setting.router.place(setting.read("Task"), set()) is None
    assert not setting.router.may_wait()
