"""The page of metrics, as Prometheus reads it."""

from __future__ import annotations

import subprocess

from prometheus_client.parser import text_string_to_metric_families

from docs import metrics_page
from sgl_ext.balancer.metrics.registry import Metrics
from tests.balancer.workers import workers_at
from tests.debian import require_promtool


def page() -> str:
    metrics = Metrics()
    workers_at(("http://127.0.0.1:1",), metrics)
    metrics.requests.counts["/v1/messages", 200] += 1
    metrics.ttft_s.observe("/v1/messages", 0.1)
    metrics.prediction_error_tokens.observe("http://127.0.0.1:1", 3)
    metrics.retries.inc()
    return metrics.render().decode()


def test_every_metric_has_a_sentence_as_its_help_text() -> None:
    families = list(text_string_to_metric_families(page()))
    assert len(families) > 25
    for family in families:
        text = family.documentation
        assert text.endswith("."), family.name
        assert text[0].isupper(), family.name
        assert len(text.split()) > 4, family.name


def test_the_page_of_the_documentation_is_up_to_date() -> None:
    text = metrics_page.PAGE.read_text()
    assert metrics_page.page(text) == text, "run python -m docs.metrics_page"


def test_what_engines_export_has_sentences_too() -> None:
    for row in metrics_page.engine_rows() + metrics_page.added_rows():
        assert row.text.endswith("."), row.name
        assert row.text[0].isupper(), row.name


def test_counters_have_no_gauges_of_when_they_began() -> None:
    assert "_created" not in page()


def test_promtool_has_no_objection() -> None:
    require_promtool()
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=page(), capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
