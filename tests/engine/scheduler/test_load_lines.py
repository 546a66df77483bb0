"""When a scheduler's load is sent."""

from types import SimpleNamespace
from typing import Any

import pytest

from sgl_ext.engine.scheduler import event_publisher
from sgl_ext.engine.scheduler.event_publisher import EventPublisher


def test_used_tokens_alone_are_sent_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step of decoding changes them. A line wakes every process on its way."""
    load, sent = {"running": 1, "used_tokens": 100}, list[dict[str, Any]]()
    monkeypatch.setattr(event_publisher, "load_of", lambda *_: dict(load))
    channel = SimpleNamespace(send=lambda line: sent.append(line["load"]) or True)
    publisher = EventPublisher(SimpleNamespace(), None, channel)
    publisher.plan = SimpleNamespace(batch_to_run=object())
    for step in range(100):
        load["used_tokens"] = 100 + step
        publisher.publish(step * 0.02)
    assert [each["used_tokens"] for each in sent] == [100, 150]

    load["running"] = 2
    publisher.publish(2.01)
    assert sent[-1] == {"running": 2, "used_tokens": 199}
    load["used_tokens"] = 90
    publisher.plan = SimpleNamespace(batch_to_run=None)
    publisher.publish(2.02)
    assert sent[-1]["used_tokens"] == 90
