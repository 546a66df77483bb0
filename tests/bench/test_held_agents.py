"""Agents that are held back end sooner, in virtual time."""

from __future__ import annotations

from bench.held_agents import ARMS, Amount, simulated, traced


def test_holding_agents_back_pays_where_memory_is_short() -> None:
    size = Amount(sessions=16, calls=16, scale=0.02, seeds=1)
    trace = traced(size, engines=1, seed=1)
    free, held = (simulated(trace, size.scale, 1, 0.2, ARMS[name]) for name in ("free", "held"))
    assert held["session_mean_s"] < 0.8 * free["session_mean_s"]
    assert held["ttft_p50_ms"] < 0.8 * free["ttft_p50_ms"]
    assert held["cached_ratio"] > 1.2 * free["cached_ratio"]
