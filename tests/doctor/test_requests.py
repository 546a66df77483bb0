"""Past requests: which ones a search finds, and what took each its time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson
import pytest

from sgl_ext.doctor import requests
from sgl_ext.doctor.requests import Search, sentence


def record(number: int, **about: Any) -> dict[str, Any]:
    usual: dict[str, Any] = {
        "id": f"req_{number}",
        "time": 1000.0 + number,
        "status": 200,
        "outcome": "complete",
        "error": None,
        "worker": "engine-0",
        "workers": [{"name": "engine-0", "pending": 0}],
        "tenant": "a",
        "session": "s1",
        "prompt_tokens": 2000,
        "counted_tokens": 2254,
        "reported_tokens": 2076,
        "queue_ms": 41.0,
        "prefix_ms": 41.0,
        "ttft_ms": 109.0,
        "total_ms": 900.0,
        "attempts": 1,
        "divergence": None,
    }
    return usual | about


def lines(*records: dict[str, Any]) -> list[bytes]:
    """The latest first."""
    return [orjson.dumps(each) for each in reversed(records)]


def ids(found: dict[str, Any]) -> list[str]:
    return [row["id"] for row in found["requests"]]


def run(search: Search, *records: dict[str, Any]) -> dict[str, Any]:
    return search.run(lines(*records), 1.0, lambda: 0.0)


REFUSED = {"status": 529, "outcome": "rejected", "error": "The queue is full.", "tenant": "b"}


@pytest.mark.parametrize(
    ("search", "found"),
    [
        (Search(), [4, 3, 2, 1, 0]),
        (Search(session="s2"), [4, 1]),
        (Search(session="s"), [4, 3, 2, 1, 0]),
        (Search(tenant="b"), [2]),
        (Search(status="529"), [2]),
        (Search(status="5xx"), [3, 2]),
        (Search(status="errors"), [4, 3, 2]),
        (Search(status="refused"), [2]),
        (Search(since_s=1003.0), [4, 3]),
        (Search(request="req_1"), [1]),
        (Search(limit=2), [4, 3]),
        (Search(is_slow=True, limit=2), [1, 0]),
    ],
    ids=lambda value: str(value) if isinstance(value, list) else None,
)
def test_what_a_search_finds(search: Search, found: list[int]) -> None:
    made = run(
        search,
        record(0, ttft_ms=500.0),
        record(1, session="s2/sub", ttft_ms=900.0),
        record(2, **REFUSED, ttft_ms=0.0, total_ms=1.0),
        record(3, status=502, outcome="failed"),
        record(4, session="s2", outcome="cut"),
    )
    assert ids(made) == [f"req_{number}" for number in found]


def test_who_was_refused_and_why_is_counted() -> None:
    made = run(
        Search(status="refused", since_s=1.0, limit=1),
        *(record(number, **REFUSED) for number in range(3)),
        record(3, **{**REFUSED, "tenant": "c"}),
        record(4),
    )
    assert ids(made) == ["req_3"]
    assert [(row["tenant"], row["requests"], row["error"]) for row in made["groups"]] == [
        ("b", 3, "The queue is full."),
        ("c", 1, "The queue is full."),
    ]
    assert made["found"] == 4
    assert made["searched"] == {"lines": 5, "back_to_s": 1000.0, "complete": True}


def test_a_search_says_how_far_it_came(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "MOST_LINES", 3)
    searched = run(Search(session="none"), *map(record, range(9)))["searched"]
    assert searched == {"lines": 3, "back_to_s": 1006.0, "complete": False}

    def clock() -> Callable[[], float]:
        times = iter([0.0, 2.0])
        return lambda: next(times)

    monkeypatch.undo()
    monkeypatch.setattr(requests, "_EVERY", 4)
    searched = Search(session="none").run(lines(*map(record, range(9))), 1.0, clock())["searched"]
    assert searched == {"lines": 4, "back_to_s": 1005.0, "complete": False}


def test_lines_that_are_no_records_are_left_out() -> None:
    text = [b"", b"x", b'{"time":1001.0,', b'[1,{"time":1001.0,"x":1}]', *lines(record(1))]
    assert ids(Search().run(text, 1.0, lambda: 0.0)) == ["req_1"]


def test_a_names_quotes_do_not_hide_it() -> None:
    made = run(Search(session='a"b'), record(0, session='a"bc'), record(1, session="a"))
    assert ids(made) == ["req_0"]


@pytest.mark.parametrize(
    ("about", "said"),
    [
        (
            {},
            "waited 0 ms in the queue and 41 ms behind a prefill; 2,076 of 2,254 tokens were "
            "cached; first token after 109 ms",
        ),
        (
            {"queue_ms": 30_041.0, "workers": [{"name": "engine-0", "pending": 9000}]},
            "waited 30.0 s in the queue and 41 ms behind a prefill; its engine had 9,000 tokens of "
            "other prompts to compute; 2,076 of 2,254 tokens were cached; first token after 109 ms",
        ),
        (
            {"reported_tokens": 0}
            | {"divergence": {"kind": "clock", "block": "system[0]", "byte": 2310, "bytes": 4}},
            "waited 0 ms in the queue and 41 ms behind a prefill; 0 of 2,254 tokens were cached, "
            "as a date or time changes at system[0], byte 2,310; first token after 109 ms",
        ),
        (
            {"outcome": "rejected", "status": 529, "error": "The queue is full."},
            "refused with 529 after 900 ms, before any engine had it: The queue is full",
        ),
        (
            {"outcome": "failed", "status": 502, "attempts": 2, "error": "Engines failed."},
            "failed with 502 after 900 ms and 2 attempts: Engines failed",
        ),
        (
            {"outcome": "disconnected", "status": None, "ttft_ms": 0.0, "reported_tokens": None},
            "waited 0 ms in the queue and 41 ms behind a prefill; its client left after 900 ms, "
            "before its first token",
        ),
    ],
)
def test_a_sentence(about: dict[str, Any], said: str) -> None:
    assert sentence(record(0, **about)) == said
