"""When a scheduler's load is sent."""

from collections import Counter, deque
from types import SimpleNamespace
from typing import Any

import pytest

from scheduler.load_cost import ENOUGH, LoadCost
from scheduler.tier_switch import Off, TierSwitch
from sgl_ext.engine.scheduler import event_publisher
from sgl_ext.engine.scheduler.event_publisher import EventPublisher


def test_used_tokens_alone_are_sent_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step of decoding changes them. A line wakes every process on its way."""
    load, sent = {"running": 1, "used_tokens": 100}, list[dict[str, Any]]()
    monkeypatch.setattr(event_publisher, "load_of", lambda *_: dict(load))
    channel = SimpleNamespace(send=lambda line: sent.append(line["load"]) or True)
    publisher = EventPublisher(SimpleNamespace(waiting_queue=[]), None, channel)
    decoding, empty = SimpleNamespace(reqs=[object()]), SimpleNamespace(reqs=[])
    publisher.plan = SimpleNamespace(batch_to_run=decoding, running_batch=decoding)
    for step in range(100):
        load["used_tokens"] = 100 + step
        publisher.publish(step * 0.02)
    assert [each["used_tokens"] for each in sent] == [100, 150]

    load["running"] = 2
    decoding.reqs.append(object())
    publisher.publish(2.01)
    assert sent[-1] == {"running": 2, "used_tokens": 199}
    load["used_tokens"] = 90
    publisher.plan = SimpleNamespace(batch_to_run=None, running_batch=empty)
    publisher.publish(2.02)
    assert sent[-1]["used_tokens"] == 90


def test_a_shared_tier_is_named_first_and_what_reads_cost_when_that_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reads = deque[tuple[int, float]]()
    switch = TierSwitch()
    tier = SimpleNamespace(machine="m", path="/dev/shm/tier/kv-1", reads=reads, switch=switch)
    cost = LoadCost()
    cache: Any = SimpleNamespace(
        cache_controller=object(),
        loads=SimpleNamespace(cost=cost),
        pins=SimpleNamespace(
            tokens=0,
            changed={},
            rejected=0,
            declined=Counter[str](),
            pins=SimpleNamespace(device=SimpleNamespace(budget_tokens=100)),
        ),
        residency=SimpleNamespace(host=object(), changed=False, deferred=0, forgotten=0),
        host_tokens=500,
        sweep=lambda steps: None,
    )
    load, sent = {"running": 1, "pending_tokens": 0, "used_tokens": 9}, list[dict[str, Any]]()
    monkeypatch.setattr(event_publisher, "load_of", lambda *_: dict(load))
    monkeypatch.setattr(event_publisher, "shared_pages_of", lambda _: tier)
    channel: Any = SimpleNamespace(send=lambda line: sent.append(line) or True)
    publisher = EventPublisher(SimpleNamespace(waiting_queue=[]), cache, channel)
    publisher.plan = SimpleNamespace(batch_to_run=None, running_batch=SimpleNamespace(reqs=[]))
    publisher.publish(0.0, load_share=0.1)
    for _ in range(ENOUGH):
        cost.computed(1000, 1.0)
        cost.loaded(1000, 0.05)
        tier.reads.append((1000, 0.15))
    publisher.publish(5.0, load_share=0.1)
    publisher.publish(9.0, load_share=0.1)
    first, second = sent
    assert list(first)[:3] == ["publishes", "machine", "shared_pages"]
    assert (first["machine"], first["shared_pages"]) == ("m", tier.path)
    assert (first["load_share"], first["shared_share"]) == (0.1, 0.3)
    assert (second["load_share"], second["shared_share"]) == (0.1, 0.2)
    assert first["load"]["host_capacity_tokens"] == 500
    switch.failed(Off.FULL, 9.0)
    for now_s in (10.0, 11.0):
        publisher.publish(now_s, load_share=0.1)
    switch.worked((Off.FULL,))
    publisher.publish(12.0, load_share=0.1)
    shown = [line["tiers_off"] for line in sent if "tiers_off" in line]
    assert shown == [["shared tier (full)"], []]
