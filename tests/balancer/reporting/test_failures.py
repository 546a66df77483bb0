"""What a node refused or failed within the last minute, by reason."""

from __future__ import annotations

import pytest

from sgl_ext.balancer.reporting.activity import (
    MOST_REASONS,
    OTHER_REASONS,
    Failures,
    last_minute,
    reason_of,
)
from tests.balancer.conftest import Engine, Start


@pytest.mark.parametrize(
    ("status", "outcome", "error", "reason"),
    [
        (529, "rejected", "No engine is ready.", "No engine is ready."),
        (
            503,
            "rejected",
            "All engines are busy. 1024 wait already.",
            "All engines are busy. N wait already.",
        ),
        (429, "rejected", "limit of 1e+06 tokens per minute", "limit of N tokens per minute"),
        (502, "failed", "Engines failed 2 times", "Engines failed N times"),
        (500, "complete", None, "An engine answered 500."),
        (200, "cut", "Connection reset", "A stream was cut."),
        (200, "complete", None, None),
        (400, "complete", None, None),
        (404, "rejected", None, None),
        (None, "disconnected", None, None),
    ],
)
def test_a_reason_is_what_clients_were_told_without_numbers(
    status: int | None, outcome: str, error: str | None, reason: str | None
) -> None:
    assert reason_of(status, outcome, error) == reason


def test_all_processes_count_for_a_minute() -> None:
    one, two = Failures(), Failures()
    for now_s, reason in ((0.0, "old"), (55.0, "a"), (60.0, "b"), (65.0, "b")):
        one.add(now_s, reason)
    two.add(66.0, "b")
    found = last_minute([one.as_json(), two.as_json()], 69.0)
    assert found == [{"reason": "b", "count": 3}, {"reason": "a", "count": 1}]
    assert last_minute([one.as_json()], 500.0) == []


def test_reasons_and_intervals_have_a_bound() -> None:
    failures = Failures()
    for number in range(1000):
        failures.add(10.0 * number, f"reason {number}")
    (*_, last) = failures.as_json()
    assert list(last[1]) == [OTHER_REASONS]
    assert len(failures.as_json()) <= 60 + 1
    assert len(failures._reasons) <= MOST_REASONS + 1


async def test_the_state_and_the_metrics_have_refusals_by_reason(start: Start) -> None:
    client = await start(Engine("a"))
    assert (await client.get("/sgl_ext/state")).ok
    await client.delete("/sgl_ext/workers?url=" + (await _url(client)))
    for _ in range(3):
        assert (await client.post("/v1/messages", json={"messages": []})).status == 529
    page = await (await client.get("/metrics")).text()
    assert 'sgl_ext_failed_requests_total{reason="No engine is ready."} 3.0' in page


async def _url(client: object) -> str:
    answer = await client.get("/sgl_ext/workers")  # type: ignore[attr-defined]
    return str((await answer.json())["workers"][0]["url"])
