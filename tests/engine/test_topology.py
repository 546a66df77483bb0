"""What an engine refuses at its start and what it serves without, by flag and by model; and that
docs/topologies.md says so."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sgl_ext.engine import startup, topology
from sgl_ext.engine.topology import CACHE_BACKEND, DEGRADED, REFUSED, Facts
from sgl_ext.settings.schema import EngineSettings

ROOT = Path(__file__).parents[2]
STATES = ("works", "degrades", "refused")
PLAIN = {
    "attn_dp_size": 1,
    "disable_radix_cache": False,
    "disaggregation_mode": "null",
    "enable_flexkv": False,
    "enable_hierarchical_cache": False,
    "enable_lmcache": False,
    "encoder_only": False,
    "grpc_mode": False,
    "grpc_port": None,
    "kv_events_config": None,
    "model_path": "dummy",
    "nnodes": 1,
    "pp_size": 1,
    "radix_cache_backend": CACHE_BACKEND,
    "skip_tokenizer_init": False,
    "smg_grpc_mode": False,
    "tokenizer_worker_num": 1,
    "use_ray": False,
}
SHARING = EngineSettings(shared_prefixes="share.jsonl")


def facts(model: Any = None, settings: EngineSettings | None = None, **changed: Any) -> Facts:
    assert changed.keys() <= PLAIN.keys()
    args: Any = SimpleNamespace(**(PLAIN | changed))
    return Facts(args, model, settings or EngineSettings())


def model(**changed: Any) -> Any:
    return SimpleNamespace(**({"is_hybrid_swa": False, "full_attention_layer_ids": None} | changed))


CASES = [
    ("several tokenizer workers", facts(tokenizer_worker_num=2)),
    ("gRPC", facts(grpc_port=1)),
    ("gRPC", facts(grpc_mode=True)),
    ("gRPC", facts(smg_grpc_mode=True)),
    ("encoder server", facts(encoder_only=True)),
    ("Ray", facts(use_ray=True)),
    (
        "PD disaggregation with an engine secret",
        facts(settings=EngineSettings(engine_secret="file"), disaggregation_mode="prefill"),
    ),
    ("shared prefixes", facts(settings=SHARING, enable_hierarchical_cache=True)),
    ("shared prefixes", facts(settings=SHARING, kv_events_config="{}")),
    ("shared prefixes", facts(settings=SHARING, disaggregation_mode="prefill")),
    ("shared prefixes", facts(settings=SHARING, skip_tokenizer_init=True)),
    ("shared prefixes", facts(settings=SHARING, nnodes=2)),
    ("no radix cache", facts(disable_radix_cache=True)),
    ("LMCache", facts(enable_lmcache=True)),
    ("FlexKV", facts(enable_flexkv=True)),
    ("another radix cache", facts(radix_cache_backend=None)),
    (
        "sliding windows in all layers",
        facts(model(is_hybrid_swa=True, full_attention_layer_ids=[])),
    ),
    ("pipeline parallelism", facts(pp_size=2)),
    ("data-parallel attention on several machines", facts(nnodes=2, attn_dp_size=2)),
]


def applying(facts: Facts) -> list[topology.Rule]:
    return topology.refused(facts) + topology.degraded(facts)


@pytest.mark.parametrize(("feature", "case"), CASES, ids=str)
def test_each_rule_applies_to_its_flag_alone(feature: str, case: Facts) -> None:
    assert [rule.feature for rule in applying(case)] == [feature]


def test_each_rule_has_a_case() -> None:
    assert {feature for feature, _ in CASES} == {rule.feature for rule in REFUSED + DEGRADED}


def test_a_plain_engine_is_refused_nothing_and_lacks_nothing() -> None:
    assert not applying(facts(model()))
    assert not applying(facts(model(is_hybrid_swa=True, full_attention_layer_ids=[0])))
    assert not applying(facts(nnodes=2))
    assert not applying(facts(attn_dp_size=2))


@pytest.mark.parametrize(
    "changed",
    [
        {"disable_radix_cache": True},
        {"radix_cache_backend": None},
        {"enable_lmcache": True},
        {"enable_flexkv": True},
    ],
    ids=str,
)
def test_prefixes_are_shared_in_the_extensions_cache_alone(changed: dict[str, Any]) -> None:
    rules = topology.refused(facts(settings=SHARING, **changed))
    assert [rule.feature for rule in rules] == ["shared prefixes"]
    flag = "--" + next(iter(changed)).replace("_", "-")
    assert str(rules[0]) == f"{flag}: cannot be combined with --shared-prefixes; leave one out"


def arguments(monkeypatch: pytest.MonkeyPatch, **changed: Any) -> Any:
    """Arguments whose resolution changes them to those of `changed`."""
    given: Any = SimpleNamespace(resolve_once=lambda: None)
    monkeypatch.setattr(topology.sglang_api, "resolving_view", lambda _: facts(**changed).args)
    return given


def test_a_start_is_refused_with_every_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    given = arguments(monkeypatch, grpc_mode=True, tokenizer_worker_num=2)
    with pytest.raises(SystemExit) as ended:
        startup.check_arguments(given)
    lines = str(ended.value).splitlines()
    assert [line.split(": ")[:2] for line in lines] == [
        ["sgl-ext", "--tokenizer-worker-num"],
        ["sgl-ext", "--grpc-port, --grpc-mode, --smg-grpc-mode"],
    ]


def test_what_an_engine_serves_without_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        startup.check_arguments(arguments(monkeypatch, enable_lmcache=True))
    assert [record.getMessage().split(": ")[:2] for record in caplog.records] == [
        ["sgl-ext", "--enable-lmcache"]
    ]


class Row(SimpleNamespace):
    feature: str
    flag: str
    state: str
    holds: str
    test: str


def rows() -> list[Row]:
    text = (ROOT / "docs/topologies.md").read_text().partition("\n## ")[0]
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("|")
    ]
    return [Row(**dict(zip(Row.__annotations__, row, strict=True))) for row in cells[2:]]


def test_each_row_of_the_page_has_a_state_and_a_test_that_exists() -> None:
    for row in rows():
        assert row.state in STATES, row
        assert row.holds, row
        names = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row.test)
        assert names, row
        for path, name in names:
            found = (ROOT / path).read_text()
            assert re.search(rf"^(async )?def {name}\(", found, re.MULTILINE), (path, name)


def test_no_feature_has_two_rows() -> None:
    features = [row.feature for row in rows()]
    assert len(features) == len(set(features))


@pytest.mark.parametrize(("rules", "state"), [(REFUSED, "refused"), (DEGRADED, "degrades")])
def test_each_rule_is_a_row_of_the_page(rules: tuple[topology.Rule, ...], state: str) -> None:
    found = {row.feature: row for row in rows()}
    for rule in rules:
        row = found[rule.feature]
        assert row.state == state
        flags = rule.flag.split(", ") if row.flag and rule.feature != "shared prefixes" else []
        assert all(f"`{flag}`" in row.flag for flag in flags)
