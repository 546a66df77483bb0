"""What an engine says of itself on its page of metrics, besides its counters."""

from __future__ import annotations

import os

import psutil

from sgl_ext.engine.core.counters import COUNTERS, counter, gauge, show_counters
from sgl_ext.engine.host_cache.message_cache import MessageCache
from sgl_ext.engine.http.extension import HttpExtension, memory_by_kind, set_gauges, set_memory
from sgl_ext.settings.schema import EngineSettings


def test_each_table_has_a_size_and_a_bound() -> None:
    extension = HttpExtension(EngineSettings())
    extension.message_cache = MessageCache(1000)
    extension.broadcasters[0].apply(b'{"stored": [["1", null, 5]], "load": {}}')
    set_gauges(extension)
    values = {
        name: {
            sample.labels["table"]: sample.value
            for family in gauge(name).collect()
            for sample in family.samples
        }
        for name in ("table_size", "table_limit")
    }
    sizes, limits = values["table_size"], values["table_limit"]
    assert sizes.keys() == limits.keys() >= {"residency_mirror", "unread_events", "messages"}
    assert (sizes["residency_mirror"], limits["messages"]) == (1, 1000)


def test_the_memory_of_an_engine_is_that_of_its_processes() -> None:
    found = memory_by_kind()
    assert found["http"] <= psutil.Process(os.getpid()).memory_info().rss * 1.1
    assert found["http"] > 1 << 20
    set_memory({"scheduler": 5})
    samples = {
        s.labels["process"]: s.value for s in gauge("engine_memory_bytes").collect()[0].samples
    }
    assert (samples["scheduler"], samples["http"]) == (5, 0)


def test_a_counter_without_labels_is_shown_before_it_counts() -> None:
    show_counters()
    shown = [name for name, (_, *labels) in COUNTERS.items() if not labels]
    assert "event_lines_dropped" in shown
    assert all(counter(name).collect()[0].samples for name in shown)
