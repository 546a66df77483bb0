"""The metrics of several balancer processes in one page."""

from __future__ import annotations

from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.balancer.reporting.whole_balancer import COMMON_COUNTERS, SUMMED_GAUGES, merge_pages
from sgl_ext.protocols.models import StatedModel
from tests.balancer.workers import models_of, workers_at

A = "http://a"


def test_pages_are_merged() -> None:
    pages = []
    for count in (2, 3):
        metrics = Metrics(count)
        metrics.retries.inc(count)
        metrics.requests.counts["/v1/messages", 200] += count
        metrics.ttft_s.observe("/v1/messages", 0.02)
        workers = workers_at([A], metrics)
        workers.mark(workers.all[0], ready=True)
        workers.all[0].in_flight = count
        metrics.tables.add("t", lambda count=count: count, lambda: 10)
        pages.append(metrics.render())
    merged = merge_pages(pages)
    page = merged.decode()
    assert "sgl_ext_retries_total 5.0" in page
    assert 'sgl_ext_requests_total{path="/v1/messages",status="200"} 5.0' in page
    assert 'sgl_ext_ttft_seconds_bucket{le="0.025",path="/v1/messages"} 2.0' in page
    assert 'sgl_ext_worker_ready{worker="http://a"} 1.0' in page
    assert 'sgl_ext_worker_in_flight{worker="http://a"} 5.0' in page
    assert "sgl_ext_workers_joined_total 1.0" in page, "both see the same worker"
    assert 'sgl_ext_table_size{table="t",unit="entries"} 3.0' in page, "the fullest"
    assert 'sgl_ext_table_limit{table="t",unit="entries"} 10.0' in page
    for process in ("2", "3"):
        assert page.count(f'process_cpu_seconds_total{{process="{process}"}}') == 1
    assert page.count("sgl_ext_build_info{") == 1
    assert merge_pages([merged]) == merged


def test_the_requests_that_wait_in_each_process_add_up() -> None:
    pages = []
    for number in (2, 3):
        metrics = Metrics(number)
        models = models_of(workers_at([A], metrics), metrics)
        models.note(models.workers.all[0], StatedModel("large", 1000, ()))
        metrics.add_part(metrics.held_requests, lambda number=number: number)
        pages.append(metrics.render())
        assert 'sgl_ext_model_queued_requests{model="large"} 0.0' in pages[-1].decode()
        pages[-1] = pages[-1].replace(b'="large"} 0.0', b'="large"} %d.0' % number)
    page = merge_pages(pages).decode()
    assert "sgl_ext_held_requests 5.0" in page
    assert 'sgl_ext_model_queued_requests{model="large"} 5.0' in page


def test_the_names_with_a_rule_of_their_own_exist() -> None:
    metrics = Metrics()
    models_of(workers_at([A], metrics), metrics)
    kinds = {family.name: family.type for family in metrics.registry.collect()}
    assert {kinds[name] for name in SUMMED_GAUGES} == {"gauge"}
    assert {kinds[name] for name in COMMON_COUNTERS} == {"counter"}
