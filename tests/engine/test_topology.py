"""What an engine refuses at its start and what it serves without, by flag and by model; and that
docs/guide/models.md says so."""

from __future__ import annotations

import logging
import re
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sgl_ext.engine import hooks, startup, topology
from sgl_ext.engine.sglang_versions import TESTED
from sgl_ext.engine.topology import CACHE_BACKEND, DEGRADED, REFUSED, Facts
from sgl_ext.node.failure import failure
from sgl_ext.protocols.registry import of_path
from sgl_ext.reading.segments import read_chain
from sgl_ext.settings.schema import EngineSettings
from sgl_ext.settings.shared_tier import tier_flags

ROOT = Path(__file__).parents[2]
STATES = ("works", "degrades", "refused")
PLAIN = {
    "admin_api_key": None,
    "api_key": None,
    "attn_cp_size": 1,
    "attn_dp_size": 1,
    "decoupled_spec_role": "null",
    "disable_priority_preemption": False,
    "disable_radix_cache": False,
    "disaggregation_mode": "null",
    "dllm_algorithm": None,
    "elastic_ep_backend": None,
    "dp_size": 1,
    "enable_flexkv": False,
    "enable_hierarchical_cache": False,
    "enable_http2": False,
    "enable_lmcache": False,
    "enable_lora": None,
    "enable_memory_saver": False,
    "enable_pdmux": False,
    "enable_priority_scheduling": True,
    "enable_response_store": False,
    "enable_streaming_session": False,
    "enable_watermark": False,
    "enable_prefill_delayer": False,
    "sleep_on_idle": False,
    "encoder_only": False,
    "grpc_mode": False,
    "grpc_port": None,
    "hicache_io_backend": "direct",
    "hicache_mem_layout": "page_first_direct",
    "hicache_ratio": 2.0,
    "hicache_size": 0,
    "hicache_storage_backend": None,
    "hicache_storage_backend_extra_config": None,
    "kv_events_config": None,
    "language_only": False,
    "model_path": "dummy",
    "nnodes": 1,
    "pp_size": 1,
    "radix_cache_backend": CACHE_BACKEND,
    "radix_eviction_policy": "priority",
    "schedule_low_priority_values_first": False,
    "schedule_policy": "fcfs",
    "skip_tokenizer_init": False,
    "smg_grpc_mode": False,
    "tokenizer_worker_num": 1,
    "use_ray": False,
}
SHARING = EngineSettings(shared_prefixes="share.jsonl")
DRAFTING = EngineSettings(draft_from_context="session")


def facts(
    model: Any = None,
    settings: EngineSettings | None = None,
    has_states: bool = False,
    sglang: str = TESTED[-1],
    **changed: Any,
) -> Facts:
    assert changed.keys() <= PLAIN.keys()
    args: Any = SimpleNamespace(**(PLAIN | changed))
    return Facts(args, model, settings or EngineSettings(), has_states, sglang)


def model(**changed: Any) -> Any:
    plain = {
        "full_attention_layer_ids": None,
        "hf_config": SimpleNamespace(model_type="qwen3"),
        "is_generation": True,
        "is_hybrid_swa": False,
        "is_multimodal": False,
    }
    return SimpleNamespace(**(plain | changed))


CASES = [
    ("untested SGLang", facts(sglang="99.0")),
    (
        "several tokenizer workers of an older SGLang",
        facts(tokenizer_worker_num=2, sglang="0.5.22"),
    ),
    *(
        ("what several tokenizer workers lack", facts(tokenizer_worker_num=2, **lacked))
        for lacked in (
            {"api_key": "key"},
            {"admin_api_key": "key"},
            {"enable_lora": True},
            {"enable_response_store": True},
        )
    ),
    ("gRPC", facts(grpc_port=1)),
    ("gRPC", facts(grpc_mode=True)),
    ("gRPC", facts(smg_grpc_mode=True)),
    ("encoder server", facts(encoder_only=True)),
    ("Ray", facts(use_ray=True)),
    ("encoder disaggregation", facts(language_only=True)),
    ("prefill context parallelism", facts(attn_cp_size=2)),
    ("HTTP/2", facts(enable_http2=True)),
    ("PD multiplexing", facts(enable_pdmux=True)),
    ("decoupled speculation", facts(decoupled_spec_role="verifier")),
    ("elastic expert parallelism", facts(elastic_ep_backend="mooncake")),
    ("diffusion language models", facts(dllm_algorithm="LowConfidence")),
    ("drafts from context", facts(settings=DRAFTING, enable_watermark=True)),
    ("drafts from context", facts(settings=DRAFTING, attn_dp_size=2)),
    ("PD disaggregation", facts(disaggregation_mode="decode")),
    ("shared prefixes", facts(settings=SHARING, kv_events_config="{}")),
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
    (
        "sliding windows and recurrent layers",
        facts(model(is_hybrid_swa=True, full_attention_layer_ids=[0])),
    ),
    ("sliding windows and recurrent layers", facts(model(), has_states=True)),
    (
        "storage of HiCache",
        facts(enable_hierarchical_cache=True, hicache_storage_backend="file"),
    ),
    ("another schedule policy", facts(schedule_policy="lpm")),
    ("another schedule policy", facts(enable_priority_scheduling=False)),
    ("another schedule policy", facts(disable_priority_preemption=True)),
    ("another schedule policy", facts(schedule_low_priority_values_first=True)),
    ("another eviction policy", facts(radix_eviction_policy="lru")),
    ("no tokenizer", facts(skip_tokenizer_init=True)),
    ("embedding and reward models", facts(model(is_generation=False))),
    ("streaming sessions", facts(enable_streaming_session=True)),
    (
        "delayed prefills of sleeping ranks",
        facts(enable_prefill_delayer=True, sleep_on_idle=True),
    ),
    ("memory saver", facts(enable_memory_saver=True)),
    ("multimodal models", facts(model(is_multimodal=True))),
    (
        "gpt-oss on /v1/responses",
        facts(model(hf_config=SimpleNamespace(model_type="gpt_oss"))),
    ),
]


def applying(facts: Facts) -> list[topology.Rule]:
    return topology.refused(facts) + topology.degraded(facts)


@pytest.mark.parametrize(("feature", "case"), CASES, ids=str)
def test_each_rule_applies_to_its_flag_alone(feature: str, case: Facts) -> None:
    assert [rule.feature for rule in applying(case)] == [feature]


@pytest.mark.parametrize(
    ("feature", "case"),
    [
        ("PD disaggregation with data parallelism", {"attn_dp_size": 2}),
        ("shared prefixes", {"settings": SHARING}),
    ],
)
def test_what_prefill_and_decode_engines_cannot_have(feature: str, case: dict[str, Any]) -> None:
    (rule,) = topology.refused(facts(disaggregation_mode="prefill", **case))
    assert (rule.feature, rule.flag) == (feature, "--disaggregation-mode")


@pytest.mark.parametrize(
    "without",
    [
        facts(enable_hierarchical_cache=True, enable_flexkv=True),
        facts(
            model(is_hybrid_swa=True, full_attention_layer_ids=[]), enable_hierarchical_cache=True
        ),
    ],
    ids=["flexkv", "windows"],
)
def test_a_cache_without_a_host_pool_is_refused_one(without: Facts) -> None:
    (rule,) = topology.refused(without)
    assert (rule.feature, rule.flag) == (
        "HiCache with another cache",
        "--enable-hierarchical-cache",
    )


SPARSE = SimpleNamespace(model_type="glm", index_topk=2048)
HOST, HOST_FLAG = {"enable_hierarchical_cache": True}, "--enable-hierarchical-cache"


@pytest.mark.parametrize(
    "case",
    [
        {"of": model(), "has_states": True},
        {"of": model(hf_config=SPARSE)},
        {"of": model(hf_config=SimpleNamespace(model_type="glm", text_config=SPARSE))},
    ],
    ids=["states", "sparse", "sparse text"],
)
def test_an_untested_sglang_copies_no_index_and_no_states_to_the_host(case: dict[str, Any]) -> None:
    of, states = case["of"], case.get("has_states", False)
    (rule,) = topology.refused(facts(of, has_states=states, sglang="99.0", **HOST))
    assert (rule.feature, rule.flag) == ("HiCache of untested SGLang", HOST_FLAG)
    assert not topology.refused(facts(of, has_states=states, **HOST))
    assert not topology.refused(facts(of, has_states=states, sglang="99.0"))


def sharing(flags: dict[str, Any], *of_model: Any, **has: Any) -> Facts:
    """An engine with a shared tier."""
    _, backend, _, extra, *_ = tier_flags(1 << 30)
    flags = flags | {"hicache_storage_backend": backend}
    return facts(*of_model, **flags, **has, hicache_storage_backend_extra_config=extra)


def test_a_tier_of_ours_takes_nothing_away() -> None:
    assert not applying(sharing({"enable_hierarchical_cache": True}, model()))


@pytest.mark.parametrize("has_states", [True, False])
def test_a_prefix_that_needs_more_than_keys_and_values_is_not_shared(has_states: bool) -> None:
    windows = {} if has_states else {"is_hybrid_swa": True, "full_attention_layer_ids": [0]}
    host = {"enable_hierarchical_cache": True}
    (rule,) = topology.refused(sharing(host, model(**windows), has_states=has_states))
    assert rule.feature == "shared tier of sliding windows or states"
    assert rule.flag == "--hicache-storage-backend"


def test_drafts_are_refused_where_layers_cannot_take_tokens_back() -> None:
    rules = topology.refused(facts(settings=DRAFTING, has_states=True))
    assert [rule.flag for rule in rules] == ["--model-path"]


@pytest.mark.parametrize("changed", [{"disaggregation_mode": "decode"}, {"pp_size": 2}], ids=str)
def test_drafts_are_refused_across_engines_and_stages(changed: dict[str, Any]) -> None:
    rules = topology.refused(facts(settings=DRAFTING, **changed))
    assert [rule.feature for rule in rules] == ["drafts from context"]


def test_each_rule_has_a_case() -> None:
    pairs = {"PD disaggregation with data parallelism", "HiCache with another cache"}
    pairs |= {"shared tier of sliding windows or states", "HiCache of untested SGLang"}
    cases = {feature for feature, _ in CASES}
    assert cases | pairs == {rule.feature for rule in REFUSED + DEGRADED}


def test_a_plain_engine_is_refused_nothing_and_lacks_nothing() -> None:
    assert not applying(facts(model()))
    assert not applying(facts(nnodes=2))
    assert not applying(facts(attn_dp_size=2))


@pytest.mark.parametrize(
    "changed",
    [
        {"disable_radix_cache": True},
        {"radix_cache_backend": None},
        {"enable_lmcache": True},
        {"enable_flexkv": True},
        {"enable_hierarchical_cache": True},
        {"skip_tokenizer_init": True},
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
    log = logging.getLogger("the log of SGLang's start")
    monkeypatch.setitem(vars(topology.sglang_api), "logger", log)  # importing it takes long
    return given


def test_a_start_is_refused_with_every_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    given = arguments(monkeypatch, grpc_mode=True, enable_http2=True)
    with pytest.raises(SystemExit) as ended:
        startup.check_arguments(given)
    lines = str(ended.value).splitlines()
    assert [line.split(": ")[1] for line in lines] == [
        "--grpc-port, --grpc-mode, --smg-grpc-mode",
        "--enable-http2",
    ]
    assert failure(["something", *lines]) == lines, "a launcher shows all of them"


def test_what_an_engine_serves_without_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        startup.check_arguments(arguments(monkeypatch, enable_lmcache=True))
    assert [record.getMessage().split(": ")[:2] for record in caplog.records] == [
        ["sgl-ext", "--enable-lmcache"]
    ]


def test_no_hook_is_in_a_forward_pass() -> None:
    """So kernels, graphs and layers are SGLang's own, whichever flags choose them."""
    inside = ("batch_overlap", "compilation", "layers", "model_executor", "models", "speculative")
    hooked = [symbol for _, symbol, *_ in hooks.rows()]
    assert hooked
    found = [one for one in hooked if one.startswith(tuple(f"sglang.srt.{n}." for n in inside))]
    assert {one.rpartition(".")[2] for one in found} <= {"freeze_gc"}, "around a capture of graphs"


def test_two_images_share_no_prefix() -> None:
    def chain(image: str) -> tuple[int, ...]:
        parts = [
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}},
            {"type": "text", "text": "What is this?"},
        ]
        body = {"model": "m", "messages": [{"role": "user", "content": parts}]}
        return tuple(read_chain(of_path("/v1/chat/completions"), body).hashes)

    assert chain("AAAA") == chain("AAAA")
    assert not set(chain("AAAA")) & set(chain("BBBB"))


class Row(SimpleNamespace):
    feature: str
    flag: str
    state: str
    holds: str


def rows() -> list[Row]:
    page = (ROOT / "docs/guide/models.md").read_text()
    text = page.partition("\n## Features of SGLang\n")[2].partition("\n#")[0]
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("|")
    ]
    named = [dict(zip(Row.__annotations__, row, strict=True)) for row in cells[2:]]
    return [Row(**{**row, "feature": _plain(row["feature"])}) for row in named]


def _plain(text: str) -> str:
    """Without the address of a link."""
    return re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text)


def test_each_row_of_the_page_has_a_state_and_a_test_that_exists() -> None:
    tests = tomllib.loads((ROOT / "tests/engine/features.toml").read_text())
    assert {row.feature for row in rows()} == tests.keys()
    for row in rows():
        assert row.state in STATES, row
        assert row.holds, row
        assert tests[row.feature], row
        for path, name in (each.split("::") for each in tests[row.feature]):
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
