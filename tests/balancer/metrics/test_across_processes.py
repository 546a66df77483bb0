"""The metrics of several balancer processes in one page."""

from __future__ import annotations

from sgl_ext.balancer.metrics.across_processes import merge_pages
from sgl_ext.balancer.metrics.registry import Metrics
from tests.balancer.workers import workers_at

A = "http://a"


def test_pages_are_merged() -> None:
    pages = []
    for count in (2, 3):
        metrics = Metrics()
        metrics.retries.inc(count)
        metrics.requests.counts["/v1/messages", 200] += count
        metrics.ttft_s.observe("/v1/messages", 0.02)
        workers = workers_at([A], metrics)
        workers.mark(workers.all[0], ready=True)
        workers.all[0].in_flight = count
        pages.append(metrics.render())
    merged = merge_pages(pages)
    page = merged.decode()
    assert "sgl_ext_retries_total 5.0" in page
    assert 'sgl_ext_requests_total{path="/v1/messages",status="200"} 5.0' in page
    assert 'sgl_ext_ttft_seconds_bucket{le="0.025",path="/v1/messages"} 2.0' in page
    assert 'sgl_ext_worker_ready{worker="http://a"} 1.0' in page
    assert 'sgl_ext_worker_in_flight{worker="http://a"} 5.0' in page
    assert merge_pages([merged]) == merged
