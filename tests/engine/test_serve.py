"""Which radix cache and which scheduling an engine is started with, and what a start leaves."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from sgl_ext.engine import plugin, serve
from sgl_ext.engine.serve import cache_flags, priority_flags
from sgl_ext.settings.schema import VARIABLE, EngineSettings


@pytest.mark.parametrize("argv", [[], ["--port", "1"], ["--enable-hierarchical-cache"]])
def test_our_cache_is_selected(argv: list[str]) -> None:
    ours = ("--radix-cache-backend", "sgl_ext", "--radix-eviction-policy", "priority")
    assert cache_flags(argv) == ours


def test_an_eviction_policy_of_the_operator_stays() -> None:
    argv = ["--radix-eviction-policy", "lfu"]
    assert cache_flags(argv) == ("--radix-cache-backend", "sgl_ext")


@pytest.mark.parametrize(
    "argv",
    [
        ["--radix-cache-backend", "another"],
        ["--radix-cache-backend=another"],
        ["--enable-kv-cache-sharding"],
        ["--enable-int8-mamba-checkpoint"],
        ["--enable-unified-cache-external-linker"],
    ],
)
def test_not_over_the_callers_choice_or_where_sglang_refuses_any(argv: list[str]) -> None:
    assert cache_flags(argv) == ()


def test_requests_are_scheduled_by_priority_and_preempted_from_our_threshold_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours = ("--enable-priority-scheduling", "--default-priority-value", "0")
    threshold = "--priority-scheduling-preemption-threshold"
    monkeypatch.delenv(VARIABLE, raising=False)
    # SGLang preempts for a difference above its threshold.
    assert priority_flags(["--port", "1"]) == (*ours, threshold, "9")
    settings = EngineSettings(preemption_threshold=25).to_environment()
    monkeypatch.setenv(VARIABLE, settings[VARIABLE])
    assert priority_flags([]) == (*ours, threshold, "24")


@pytest.mark.parametrize(
    "argv",
    [
        ["--schedule-policy", "lpm"],
        ["--schedule-policy=lpm"],
        ["--enable-priority-scheduling"],
        ["--disable-priority-preemption"],
        ["--default-priority-value", "3"],
        ["--schedule-low-priority-values-first"],
        ["--priority-scheduling-preemption-threshold=5"],
        ["--disaggregation-mode", "prefill"],
    ],
)
def test_nothing_is_scheduled_by_priority_over_the_callers_choice(argv: list[str]) -> None:
    assert priority_flags(argv) == ()


def test_what_the_plugin_finds_is_never_looked_through_for_garbage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plugin, "_activate", lambda: None)
    monkeypatch.setattr(plugin, "_active", False)
    try:
        plugin.activate()
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


@pytest.mark.parametrize(
    "environ", [{"SGLANG_PLATFORM": "sgl_ext_cpu"}, {"SGLANG_USE_CPU_ENGINE": "1"}, {}], ids=str
)
def test_without_a_gpu_only_a_platform_that_is_named_starts(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    has_gpu = [False]
    accelerator = SimpleNamespace(is_available=lambda: has_gpu[0])
    torch = SimpleNamespace(accelerator=accelerator, __version__="2.13.0+cpu")
    monkeypatch.setattr(serve, "import_module", lambda _: torch)
    with nullcontext() if environ else pytest.raises(RuntimeError, match="sees no GPU; to run"):
        serve.require_device(environ)
    has_gpu[0] = True
    serve.require_device(environ)


@pytest.mark.parametrize(
    "argv",
    [["--host", "0.0.0.0"], ["--host=10.0.0.1"], ["--host", "127.0.0.1", "--host", "::"]],
)
def test_an_engine_that_other_machines_reach_does_not_start_without_a_secret(
    argv: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(serve, "check_environment", lambda: None)
    monkeypatch.setattr(serve.signal, "signal", lambda *_: None)
    monkeypatch.setattr(serve.os, "environ", dict[str, str]())
    monkeypatch.setattr(serve.sglang_api, "load_plugins", pytest.fail, raising=False)
    with pytest.raises(SystemExit, match=r"sgl-ext: --host .*set engine-secret"):
        serve.main(["--model-path", "m", *argv])
