"""The capacity sheet: SGLang's layout of the KV cache, and nothing that is not known."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import requests
from sgl_ext_cpu.node import Node

from sgl_ext.sizing.__main__ import run
from sgl_ext.sizing.model import (
    GIB,
    MAX_PINS,
    KvCost,
    ModelShape,
    SizingError,
    Wish,
    engine_room,
    engines_for,
    host_needs,
    kv_cost,
    load_of,
    model_folder,
    reserved_fraction,
    shape_of,
    weight_bytes,
)
from tests.sizing.configs import CONFIGS
from tests.waiting import HANG_S

ROOT = Path(__file__).parents[2]

# Bytes of a token on one GPU: layers x (key and value) x heads x head_dim x 2 bytes.
BYTES = [
    ("Qwen3-32B", 1, 64 * 2 * 8 * 128 * 2),
    ("Qwen3-32B", 8, 64 * 2 * 1 * 128 * 2),
    ("Qwen3-32B", 16, 64 * 2 * 1 * 128 * 2),
    ("Qwen3-235B-A22B", 1, 94 * 2 * 4 * 128 * 2),
    ("Qwen3-235B-A22B", 8, 94 * 2 * 1 * 128 * 2),
    ("GLM-4.6", 8, 92 * 2 * 1 * 128 * 2),
    ("gpt-oss-120b", 1, 18 * 2 * 8 * 64 * 2),
    ("DeepSeek-V3.1", 1, 61 * 576 * 2),
    # Each GPU keeps the whole latent vector.
    ("DeepSeek-V3.1", 8, 61 * 576 * 2),
    ("Kimi-K2", 16, 61 * 576 * 2),
    ("MiniMax-M2", 4, 62 * 2 * 2 * 128 * 2),
    ("Qwen3-Next-80B-A3B", 1, 12 * 2 * 2 * 256 * 2),
    ("DeepSeek-V3.2", 8, 61 * (576 * 2 + 128 + 4)),
]


@pytest.mark.parametrize(("name", "tp", "expected"), BYTES)
def test_a_token_takes_what_the_model_s_layers_and_heads_say(
    name: str, tp: int, expected: int
) -> None:
    assert kv_cost(shape_of(CONFIGS[name]), tp).full_token == expected


def test_layers_with_a_window_have_a_pool_of_their_own() -> None:
    shape = shape_of(CONFIGS["gpt-oss-120b"])
    assert (shape.full_layers, shape.window_layers, shape.window) == (18, 18, 128)
    cost = kv_cost(shape, 1)
    assert cost.token_bytes(0.8) == pytest.approx(36_864 * 1.8)
    # For an architecture without such a pool, SGLang keeps every token in every layer.
    other = shape_of({**CONFIGS["gpt-oss-120b"], "architectures": ["MistralForCausalLM"]})
    assert (other.full_layers, other.window_layers) == (36, 0)
    assert "SGLang keeps every token" in other.not_counted[0]


@pytest.mark.parametrize("tp", [1, 2])
def test_linear_attention_keeps_a_state_for_each_sequence(tp: int) -> None:
    cost = kv_cost(shape_of(CONFIGS["Qwen3-Next-80B-A3B"]), tp)
    state, conv = 32 * 128 * 128 * 4, (32 * 128 + 2 * 16 * 128) * 3 * 2
    assert cost.sequence == 36 * (state + conv) // tp


@pytest.mark.parametrize(
    ("name", "dtype", "expected"),
    [
        ("Qwen3-32B", "fp8_e4m3", 64 * 2 * 8 * 128),
        ("DeepSeek-V3.1", "fp8_e4m3", 61 * 576),
        # Latent vector, its scales, the rotated part as bfloat16, and the index key.
        ("DeepSeek-V3.2", "fp8_e4m3", 61 * (512 + 16 + 128 + 132)),
    ],
)
def test_the_kv_cache_s_type_counts(name: str, dtype: str, expected: int) -> None:
    assert kv_cost(shape_of(CONFIGS[name]), 1, dtype).full_token == expected


def test_a_checkpoint_can_prescribe_it() -> None:
    quantized = {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}
    shape = shape_of({**CONFIGS["Qwen3-32B"], "quantization_config": quantized})
    assert kv_cost(shape, 1).dtype == "fp8_e4m3"
    assert kv_cost(shape, 1, "bfloat16").full_token == 262_144


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # SGLang warns while it is imported
def test_sglang_reads_the_same_from_the_configs() -> None:
    """Its own functions decide which kinds of layers there are."""
    from sglang.srt.configs.model_config import get_hybrid_layer_ids, is_hybrid_swa_model
    from sglang.srt.configs.qwen3_next import Qwen3NextConfig
    from transformers import PretrainedConfig

    for config in CONFIGS.values():
        shape, architectures = shape_of(config), config["architectures"]
        read = PretrainedConfig(**{k: v for k, v in config.items() if k != "quantization_config"})
        assert is_hybrid_swa_model(architectures, read) == bool(shape.window_layers)
        if shape.window_layers:
            window, full = get_hybrid_layer_ids(architectures, read)
            assert (len(window), len(full)) == (shape.window_layers, shape.full_layers)
        if shape.linear is not None:
            hybrid = Qwen3NextConfig(**config)
            assert len(hybrid.full_attention_layer_ids) == shape.full_layers
            assert len(hybrid.linear_layer_ids) == shape.linear.layers


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers=None"),
        ({"hybrid_override_pattern": "M*"}, "hybrid_override_pattern"),
        ({"attn_type_list": [0, 1]}, "attn_type_list"),
        ({"layer_types": ["chunked_attention"] * 64}, "chunked_attention"),
        ({"torch_dtype": "float8_e4m3fn"}, "dtype='float8_e4m3fn'"),
    ],
)
def test_what_is_not_known_is_named_and_not_guessed(change: dict[str, Any], named: str) -> None:
    with pytest.raises(SizingError, match=re.escape(named)):
        shape_of({**CONFIGS["Qwen3-32B"], **change})
    with pytest.raises(SizingError, match="kv-cache-dtype='nvfp4'"):
        kv_cost(shape_of(CONFIGS["Qwen3-32B"]), 1, "nvfp4")


QWEN = shape_of(CONFIGS["Qwen3-32B"])
WEIGHTS = 65_524_246_528


def qwen(**wish: Any) -> tuple[ModelShape, KvCost, Wish]:
    whole = Wish(**{"gpu_bytes": 80 * GIB, "tp": 2, "weights_bytes": WEIGHTS, **wish})
    return QWEN, kv_cost(QWEN, whole.tp), whole


def test_tokens_are_what_weights_and_sglang_s_reserve_leave() -> None:
    # 8,192 tokens of a chunk x 1.5 MiB, graphs of 256 x 2 MiB, 512 MiB, and 1/8 GiB a GPU.
    fraction = round(1 - (8192 * 1.5 + 512 + 512 + 256) / (80 * 1024), 3)
    assert reserved_fraction(80 * GIB, 2, is_mla=False) == fraction
    room = engine_room(*qwen())
    expected = (int(80 * GIB * fraction) - WEIGHTS // 2) // 131_072
    assert room.tokens == expected
    assert room.resident_sessions == expected // 50_000
    assert room.pinned_tokens == expected // 3


def test_a_shared_prefix_is_there_once() -> None:
    alone = engine_room(*qwen()).resident_sessions
    room = engine_room(*qwen(shared=30_000))
    assert room.resident_sessions == (room.tokens - 30_000) // 20_000 > 2 * alone
    assert engines_for(10 * room.resident_sessions + 1, room) == 11


def test_pins_and_states_have_bounds_of_their_own() -> None:
    windows = shape_of(CONFIGS["gpt-oss-120b"])
    room = engine_room(windows, kv_cost(windows, 1), Wish(max_total_tokens=300_000))
    assert room.pinned_tokens == 80_000, "a third of the windows' pool"
    room = engine_room(*qwen(context=10, max_total_tokens=10_000_000))
    assert room.pinned_prefixes == MAX_PINS
    shape = shape_of(CONFIGS["Qwen3-Next-80B-A3B"])
    wish = Wish(gpu_bytes=141 * GIB, tp=2, weights_bytes=163 * GIB, context=1000)
    room = engine_room(shape, kv_cost(shape, 2), wish)
    assert room.state_slots is not None
    assert room.resident_sessions == room.state_slots < room.tokens // 1000


@pytest.mark.parametrize(
    ("wish", "named"),
    [
        ({"gpu_bytes": None}, "gpu: missing"),
        ({"weights_bytes": None}, "--weights SIZE"),
        ({"tp": 1, "gpu_bytes": 40 * GIB}, "tp must be more than 1"),
        ({"context": 10_000_000}, "less than one session of 10,000,000"),
        ({"shared": 50_000}, "shared=50000: must be less than context=50000"),
    ],
)
def test_a_plan_that_cannot_be_is_an_error(wish: dict[str, Any], named: str) -> None:
    with pytest.raises(SizingError, match=re.escape(named)):
        engine_room(*qwen(**wish))


def folder_of(tmp_path: Path, config: dict[str, Any]) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_weights_are_read_from_the_index_or_from_the_files(tmp_path: Path) -> None:
    assert weight_bytes(tmp_path) is None
    (tmp_path / "a.safetensors").write_bytes(b"12345")
    assert weight_bytes(tmp_path) == 5
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"metadata": {"total_size": 77}}')
    assert weight_bytes(tmp_path) == 77
    index.write_text("{}")
    with pytest.raises(SizingError, match="total_size"):
        weight_bytes(tmp_path)


def test_a_name_is_found_in_the_local_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    snapshot = tmp_path / "models--Qwen--Qwen3-32B/snapshots/abc"
    snapshot.mkdir(parents=True)
    with pytest.raises(SizingError, match="hf download Qwen/Qwen3-32B"):
        model_folder("Qwen/Qwen3-32B")
    folder_of(snapshot, CONFIGS["Qwen3-32B"])
    assert model_folder("Qwen/Qwen3-32B") == snapshot


def test_the_sheet_says_the_same_in_text_and_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folder_of(tmp_path, CONFIGS["GLM-4.6"])
    flags = ["--model", str(folder), "--gpu", "141GB", "--tp", "8", "--weights", "665GiB"]
    assert run([*flags, "--sessions", "300", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert run([*flags, "--sessions", "300"]) == 0
    text = capsys.readouterr().out
    assert f"{document['engine']['tokens']:,}" in text
    assert f"with {document['node']['engines_for_sessions']} engines" in text
    assert "next-token layers" in document["not_counted"][0]
    assert document["not_counted"][0] in text


def test_what_is_missing_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = folder_of(tmp_path, CONFIGS["Qwen3-32B"])
    assert run(["--model", str(folder), "--gpu", "80GB"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("sgl-ext size: weights: not known")


@pytest.mark.parametrize("wrong", ["80 gigs", "0", "-1GB"])
def test_a_wrong_size_is_quoted(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(["--model", "m", f"--gpu={wrong}"])
    assert repr(wrong) in capsys.readouterr().err


def test_a_gpu_has_a_name_or_a_size_with_a_unit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folder_of(tmp_path, CONFIGS["Qwen3-32B"])
    sheets = []
    for gpu in ("H100", "h100", "81559MiB"):
        assert run(["--model", str(folder), "--gpu", gpu, "--weights", "32GiB", "--json"]) == 0
        sheets.append(capsys.readouterr().out)
    assert sheets[0] == sheets[1] == sheets[2]
    for gpu, said in (("80", "'80' has no unit: give 80GB"), ("H1000", "give its memory, or A100")):
        with pytest.raises(SystemExit) as ended:
            run(["--model", "m", "--gpu", gpu])
        err = capsys.readouterr().err
        assert (ended.value.code, err.count("\n")) == (2, 1)
        assert err.startswith("sgl-ext size: --gpu: ")
        assert said in err


def test_hicache_takes_twice_the_kv_cache_of_all_engines() -> None:
    assert host_needs(4, 100_000, 50_000, 10 << 30).hicache_bytes == 80 << 30


def test_host_time_is_known_for_the_sizes_that_were_measured() -> None:
    assert load_of(50_900).host_ms == 19
    assert load_of(1_000_000).host_ms is None


def test_the_sheet_agrees_with_a_running_engine(
    node: Node, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """SGLang's number of tokens, and the sizes that its log states."""
    info = requests.get(f"{node.engines[0]}/server_info", timeout=HANG_S).json()
    tokens = info["max_total_num_tokens"]
    flags = ["--model", str(tiny_model), "--max-total-tokens", str(tokens)]
    assert run([*flags, "--kv-cache-dtype", "float32", "--json"]) == 0
    engine = json.loads(capsys.readouterr().out)["engine"]
    assert engine["tokens"] == tokens
    log = (node.log_dir / "engine-0.log").read_text()
    match = re.search(r"#tokens: (\d+), K size: ([\d.]+) GB, V size: ([\d.]+) GB", log)
    assert match is not None
    assert int(match[1]) == tokens
    half = round(engine["kv_bytes_per_gpu"] / 2 / GIB, 2)
    assert (float(match[2]), float(match[3])) == (half, half)
