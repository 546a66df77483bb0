"""Live sessions: their workers, their tokens, and when they are forgotten."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from scheduler.sessions import Sessions


def test_a_session_is_on_the_worker_of_its_last_request() -> None:
    sessions = Sessions(live_s=60)
    sessions.record(7, 0, 100, now_s=0)
    sessions.record(7, 1, 150, now_s=1)
    assert sessions.home(7) == (1, 150)
    assert (sessions.tokens[0], sessions.tokens[1]) == (0, 150)
    sessions.end(7)
    assert (sessions.home(7), sessions.tokens[1]) == (None, 0)


def test_a_silent_session_is_not_live() -> None:
    sessions = Sessions(live_s=60)
    sessions.record(1, 0, 100, now_s=0)
    sessions.record(2, 0, 200, now_s=30)
    sessions.expire(59.9)
    assert sessions.tokens[0] == 300
    sessions.expire(60)
    assert (sessions.home(1), sessions.home(2), sessions.tokens[0]) == (None, (0, 200), 200)


def test_the_longest_silent_sessions_are_forgotten_first() -> None:
    sessions = Sessions(live_s=60, limit=2)
    sessions.record(1, 0, 5, 0)
    sessions.record(2, 0, 5, 1)
    sessions.record(1, 0, 5, 2)
    sessions.record(3, 0, 5, 3)
    assert [sessions.home(session) for session in (1, 2, 3)] == [(0, 5), None, (0, 5)]


def test_the_sessions_of_a_lost_worker_are_forgotten() -> None:
    sessions = Sessions(live_s=60)
    sessions.record(1, 0, 5, 0)
    sessions.record(2, 1, 5, 0)
    sessions.forget_worker(0)
    assert (sessions.home(1), sessions.home(2), sessions.tokens[0]) == (None, (1, 5), 0)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9), st.integers(0, 2)), max_size=60))
def test_the_totals_agree_with_the_sessions(steps: list[tuple[int, int, int]]) -> None:
    sessions = Sessions(live_s=5, limit=4)
    for now_s, (step, session, worker) in enumerate(steps):
        if step == 0:
            sessions.end(session)
        elif step == 1:
            sessions.forget_worker(worker)
        else:
            sessions.record(session, worker, session * 10, now_s)
        sessions.expire(now_s)
        homes = [home for session in range(10) if (home := sessions.home(session)) is not None]
        assert len(homes) <= 4
        for each in range(3):
            tokens = sum(tokens for home, tokens in homes if home == each)
            assert sessions.tokens[each] == tokens
