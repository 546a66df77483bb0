"""An engine says that a process of it is stopped, and for how long."""

from __future__ import annotations

import psutil

from sgl_ext.engine.http.routes import STOPPED_S, Readiness


class Process:
    state = psutil.STATUS_SLEEPING

    def status(self) -> str:
        return self.state


class Gone:
    def status(self) -> str:
        raise psutil.NoSuchProcess(1)


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_stopped_process_is_503_at_once_and_504_after_a_while() -> None:
    process, clock = Process(), Clock()
    readiness = Readiness(lambda: [Gone(), process], clock)
    assert readiness.status(takes_requests=True) == 200
    assert readiness.status(takes_requests=False) == 503
    process.state = psutil.STATUS_STOPPED
    assert readiness.status(takes_requests=True) == 503
    clock.now_s = STOPPED_S
    assert readiness.status(takes_requests=True) == 504
    process.state = psutil.STATUS_TRACING_STOP
    assert readiness.status(takes_requests=True) == 200
    process.state = psutil.STATUS_STOPPED
    assert readiness.status(takes_requests=True) == 503
