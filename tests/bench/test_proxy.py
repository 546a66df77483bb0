"""The bench of proxies: what it sends, and that a proxy that is missing is null."""

from __future__ import annotations

import orjson
import pytest

from bench.lib.agent_request import agent_request
from bench.proxy import SIZES, Figures, _report


@pytest.mark.parametrize("size", SIZES.values())
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_has_its_size_and_says_whether_it_streams(size: int, stream: bool) -> None:
    head, _, body = agent_request(3, size, stream=stream).partition(b"\r\n\r\n")
    assert b"content-length: %d" % len(body) in head
    assert size <= len(body) < 1.25 * size
    assert orjson.loads(body)["stream"] is stream


def test_what_is_added_is_what_direct_did_not_take() -> None:
    seen = Figures([0.003], [0.002], [100.0], [10.0], [50.0], [20.0])
    direct = Figures([0.001], [0.0015], [200.0], [0.0], [90.0], [0.0])
    sizes = [("ours", size) for size in SIZES], [("direct", size) for size in SIZES]
    figures = dict.fromkeys(sizes[0], seen) | dict.fromkeys(sizes[1], direct)
    report = _report(figures, ["ours", "nginx"])
    assert report["added_p50_ms_200kb"] == 2.0
    assert report["ours"]["2kb"]["added_ttft_p50_ms"]["median"] == 0.5
    assert report["ours"]["2kb"]["rps"]["median"] == 100
    assert report["nginx"] is None


def test_the_figures_at_the_top_say_in_which_columns_a_router_is_better() -> None:
    ours, direct = (
        Figures([2.0], [2.0], [9.0], [50.0], [9.0], [60.0]),
        Figures([1.0], [1.0], [1.0], [0.0], [1.0], [0.0]),
    )
    worse = Figures([3.0], [3.0], [8.0], [70.0], [8.0], [80.0])
    better = Figures([3.0], [3.0], [8.0], [49.0], [8.0], [80.0])
    figures = {("ours", size): ours for size in SIZES} | {
        ("direct", size): direct for size in SIZES
    }
    figures |= {("nginx", size): better for size in SIZES}
    figures |= {("smg", size): worse for size in SIZES}
    report = _report(figures, ["ours", "smg", "nginx"])
    assert report["ours_cpu_us_300b"] == report["ours_cpu_us_200kb"] == 50.0
    assert report["first_in_every_column"] is True
    report = _report(figures | {("smg", "2kb"): better}, ["ours", "smg", "nginx"])
    assert report["first_in_every_column"] is False
    assert report["behind"] == {"cpu_us_per_request 2kb": ["smg"]}
