"""The adapters of judges: what they read from an output file, and what they give to a judge.

The files here are made up, in the formats of the judges.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sgl_ext_cpu.node import FORKING, ROOT
from sgl_ext_cpu.nursery import Nursery

from bench.judges import aiperf, bench_serving, guidellm
from bench.judges.__main__ import compare
from bench.judges.arms import Arm
from bench.judges.judged import Judged, Load, Setting, run_command
from bench.lib.other_routers import nginx_version
from bench.lib.script import InvariantBroken


def serving_result(**more: Any) -> dict[str, Any]:
    return {
        "completed": 3,
        "errors": ["", "", ""],
        "median_ttft_ms": 20.0,
        "p99_ttft_ms": 90.0,
        "median_tpot_ms": 4.0,
        "output_throughput": 55.0,
        "request_throughput": 7.0,
        **more,
    }


def test_bench_serving_reports_the_cached_share() -> None:
    text = json.dumps(serving_result(cache_report={"cache_hit_rate_pct": 75.0}))
    assert bench_serving.parse(text) == Judged(3, 0, 20.0, 90.0, 250.0, 55.0, 7.0, 0.75)


def test_a_backend_without_a_cache_report_has_no_share() -> None:
    judged = bench_serving.parse(json.dumps(serving_result()))
    assert judged.cached_share is None
    assert "cached_share" not in judged.figures()


def test_a_failed_request_of_bench_serving_is_an_error() -> None:
    text = json.dumps(serving_result(completed=2, errors=["", "reset by peer", ""]))
    assert (bench_serving.parse(text).requests, bench_serving.parse(text).errors) == (2, 1)


def test_aiperf_reports_the_share_of_tokens_not_of_requests() -> None:
    report = {
        "request_count": {"unit": "requests", "avg": 4.0},
        "time_to_first_token": {"unit": "ms", "avg": 31.0, "p50": 30.0, "p99": 80.0},
        "output_token_throughput": {"unit": "tokens/sec", "avg": 66.0},
        "output_token_throughput_per_user": {"unit": "tokens/sec/user", "p50": 210.0},
        "request_throughput": {"unit": "requests/sec", "avg": 5.5},
        "total_usage_prompt_tokens": {"unit": "tokens", "avg": 1000.0},
        "total_usage_prompt_cache_read_tokens": {"unit": "tokens", "avg": 400.0},
        "usage_prompt_cache_read_pct": {"unit": "%", "avg": 70.0},
    }
    assert aiperf.parse(json.dumps(report)) == Judged(4, 0, 30.0, 80.0, 210.0, 66.0, 5.5, 0.4)
    report["error_request_count"] = {"unit": "requests", "avg": 2.0}
    assert aiperf.parse(json.dumps(report)).errors == 2


def guidellm_request(ttft_ms: float, cached: int | None) -> dict[str, Any]:
    return {
        "time_to_first_token_ms": ttft_ms,
        "inter_token_latency_ms": 5.0,
        "prompt_tokens": 100,
        "cached_tokens": cached,
    }


def guidellm_report(*answered: dict[str, Any]) -> str:
    requests = {"successful": answered, "errored": [{}], "incomplete": []}
    rates = {
        "output_tokens_per_second": {"successful": {"mean": 40.0}},
        "requests_per_second": {"successful": {"mean": 2.5}},
    }
    return json.dumps({"benchmarks": [{"requests": requests, "metrics": rates}]})


def test_guidellm_s_figures_are_of_answered_requests() -> None:
    text = guidellm_report(*(guidellm_request(ttft, 80) for ttft in (30.0, 10.0, 20.0)))
    assert guidellm.parse(text) == Judged(3, 1, 20.0, 30.0, 200.0, 40.0, 2.5, 0.8)


def test_a_server_without_cached_tokens_has_no_share_in_guidellm() -> None:
    assert guidellm.parse(guidellm_report(guidellm_request(10.0, None))).cached_share is None


def test_aiperf_finds_the_tokenizer_in_a_hub_of_its_own(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "tokenizer.json").write_text("{}")
    (model / "model.safetensors").write_text("weights")
    hub = aiperf.make_hub(model, tmp_path / "hub") / "hub" / "models--bench--tokenizer"
    snapshot = hub / "snapshots" / (hub / "refs" / "main").read_text()
    assert [path.name for path in snapshot.iterdir()] == ["tokenizer.json"]


def test_a_mooncake_trace_has_the_blocks_of_its_lengths(tmp_path: Path) -> None:
    setting = Setting(tmp_path, "tiny", "smallest", capacity_per_s=5.0, scratch=tmp_path)
    load = bench_serving.loads(setting)["mooncake"]
    (path,) = tmp_path.glob("*.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == load.requests
    assert all(line["input_length"] == 512 * len(line["hash_ids"]) for line in lines)
    # 60 % of what stock SGLang answers: three requests a second.
    assert [line["timestamp"] for line in lines[:3]] == [0, 333, 667]


def test_a_judge_that_fails_shows_the_end_of_its_log(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no such endpoint"):
        run_command(["sh", "-c", "echo no such endpoint; exit 2"], tmp_path / "run")


class FakeArm(Arm):
    """Serves one endpoint; its engines get 100 prompt tokens a run and compute 40."""

    def __init__(self, url: str, endpoint: str) -> None:
        super().__init__(url, ())
        object.__setattr__(self, "endpoint", endpoint)
        object.__setattr__(self, "readings", 0)

    def flush(self) -> None:
        pass

    def refusal(self, endpoint: str, model: str) -> str:
        return "" if endpoint == self.endpoint else "not served"  # type: ignore[attr-defined]

    def tokens(self) -> tuple[float, float]:
        readings: int = self.readings  # type: ignore[has-type]
        object.__setattr__(self, "readings", readings + 1)
        return 100.0 * readings, 40.0 * readings


def fake_load(errors: int = 0) -> Load:
    def judge(url: str, folder: Path) -> Judged:
        return Judged(4, errors, 10.0 if url == "ours" else 30.0, 90.0, None, 50.0, 5.0, 0.6)

    return Load("/v1/messages", 4, judge)


def test_arms_are_compared_and_an_arm_that_does_not_serve_says_so(tmp_path: Path) -> None:
    arms: dict[str, Arm] = {
        "ours": FakeArm("ours", "/v1/messages"),
        "stock": FakeArm("stock", "/v1/messages"),
        "smg": FakeArm("smg", "/v1/chat/completions"),
    }
    found = compare(fake_load(), arms, "tiny", tmp_path, rounds=3)
    assert found["stock_over_ours_ttft_p50"]["median"] == 3.0
    assert found["ours"]["cached_share"] == found["ours"]["engines_cached_share"]
    assert found["ours"]["cached_share"]["rounds"] == 3
    assert found["smg"] == {"refused": "not served"}


def test_figures_of_a_run_with_an_error_do_not_count(tmp_path: Path) -> None:
    arms: dict[str, Arm] = {"ours": FakeArm("ours", "/v1/messages")}
    with pytest.raises(InvariantBroken, match="every request is answered"):
        compare(fake_load(errors=1), arms, "tiny", tmp_path, rounds=1)


def test_recorded_sessions_are_conversations_of_new_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_serving, "find_file", lambda: None)
    setting = Setting(tmp_path, "tiny", "smallest", 1.0, tmp_path)
    load = bench_serving.loads(setting)["agentic-trace"]
    (path,) = tmp_path.glob("agentic-*.json")
    conversations = json.loads(path.read_text())["conversations"]
    assert load.requests == sum(map(len, conversations)) > len(conversations) == 2
    for one in conversations:
        first, *others = [[each["role"] for each in turn["messages"]] for turn in one]
        assert first[0] == "system"
        assert others == [["user"]] * len(others)


@pytest.mark.slow
@pytest.mark.skipif(nginx_version() is None, reason="without nginx the stock arm installs a router")
def test_bench_serving_and_the_engines_agree_on_what_was_cached(nursery: Nursery) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench.judges", "--smallest"],
        cwd=ROOT,
        env={**os.environ, **FORKING, **nursery.environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    load = json.loads(done.stdout.splitlines()[-1])["bench_serving"]["shared-prefix"]
    for arm in ("ours", "stock"):
        reported, counted = load[arm]["cached_share"], load[arm]["engines_cached_share"]
        # bench_serving's own count of a prompt leaves out the template.
        assert reported["median"] == pytest.approx(counted["median"], abs=0.1)
