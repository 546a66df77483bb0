"""What an engine's actor is told."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

pytest.importorskip("ray")

from sgl_ext.integrations.ray.plan import SECRET, Order, make_order, name_of, number_of
from sgl_ext.settings.schema import BalancerSettings, EngineSettings, LaunchSettings

SECRET_VALUE = "0123456789abcdef"


def settings(**more: object) -> LaunchSettings:
    return LaunchSettings(model_path="m", ray_address="auto", **more)  # type: ignore[arg-type]


def test_an_order_survives_the_journey_and_its_settings_never_hold_the_secret() -> None:
    secret = EngineSettings(engine_secret="file:/only/here", pin_budget=0.5)
    order = make_order(settings(engine=secret, tp=2), None, SECRET_VALUE)
    assert msgspec.json.decode(msgspec.json.encode(order), type=Order) == order
    assert order.settings.engine.engine_secret == f"env:{SECRET}"
    assert order.settings.engine.pin_budget == 0.5
    assert order.settings.tp == 2
    assert SECRET_VALUE not in str(order.settings)


def test_paths_are_absolute_on_the_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    given = LaunchSettings(model_path="model", engine=EngineSettings(warmup_requests="w.jsonl"))
    order = make_order(given, None, None)
    assert order.settings.model_path == str(tmp_path / "model")
    assert order.settings.engine.warmup_requests == str(tmp_path / "w.jsonl")
    named = make_order(LaunchSettings(model_path="org/model"), None, None)
    assert named.settings.model_path == "org/model"


def test_engines_that_do_the_same_have_the_same_digest() -> None:
    order = make_order(settings(), None, SECRET_VALUE)
    digest = replace(order, number=3, generation=7).digest
    assert digest == order.digest
    other_balancer = settings(balancer=BalancerSettings(port=1, drain_s=1), instances=9)
    assert make_order(other_balancer, None, SECRET_VALUE).digest == digest
    assert make_order(settings(tp=2), None, SECRET_VALUE).digest != digest
    assert make_order(settings(engine_args=("--x",)), None, SECRET_VALUE).digest != digest
    assert make_order(settings(), None, SECRET_VALUE + "!").digest != digest


def test_names_and_numbers() -> None:
    assert number_of(name_of(12)) == 12
    assert [number_of(name) for name in ("engine-x", "other-1", "engine", "")] == [None] * 4
