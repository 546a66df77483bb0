"""The model's path, and how `tp` divides it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sgl_ext.node.start.model import check_model
from sgl_ext.settings.schema import LaunchSettings, SettingsError


@pytest.fixture(autouse=True)
def _no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "models" / "tiny"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"num_attention_heads": 12}')
    return folder


def check(path: Path | str, *argv: str, tp: int = 1) -> str:
    return check_model(LaunchSettings(model_path=str(path), tp=tp, engine_args=argv))


def refusal(path: Path | str, *argv: str, tp: int = 1) -> str:
    with pytest.raises(SettingsError) as refused:
        check(path, *argv, tp=tp)
    return str(refused.value)


def test_a_folder_with_a_model_passes(model: Path) -> None:
    assert check(model) == ""


def test_a_path_that_does_not_exist_says_so_in_one_line(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert refusal("/nope/x") == "model_path='/nope/x': does not exist"
    near = refusal(model.parent / "tny")
    assert near.endswith(f"tny': does not exist; did you mean {model}?")
    assert refusal("models/tny").endswith("did you mean models/tiny?")
    monkeypatch.setenv("HOME", str(model.parent))
    assert refusal("~/tiny").endswith(f"does not exist; did you mean {model}?")
    assert refusal("two words") == "model_path='two words': does not exist"


def test_a_folder_without_a_model_or_with_a_part_of_it_is_refused(model: Path) -> None:
    assert "has no config.json" in refusal(model.parent)
    files = {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-2.safetensors"}
    index = json.dumps({"weight_map": files})
    (model / "model.safetensors.index.json").write_text(index)
    (model / "model-1.safetensors").touch()
    assert "1 of 2 weight files are missing, as model-2.safetensors" in refusal(model)


def test_a_hub_name_says_what_will_happen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    note = check("Qwen/Qwen3-32B")
    assert note.startswith("model_path='Qwen/Qwen3-32B': is no folder here, so the engines down")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "HF_HUB_OFFLINE is set" in refusal("Qwen/Qwen3-32B")
    cached = tmp_path / "hub" / "models--Qwen--Qwen3-32B" / "snapshots" / "1"
    cached.mkdir(parents=True)
    (cached / "config.json").write_text("{}")
    assert check("Qwen/Qwen3-32B") == ""
    assert check("s3://bucket/model") == ""


def test_tp_must_divide_the_attention_heads(model: Path) -> None:
    assert check(model, tp=4) == ""
    assert refusal(model, tp=5) == (
        "tp=5: the model has 12 attention heads, so tp must be one of 1, 2, 3, 4, 6, 12"
    )
    assert check(model, "--enable-dp-attention", tp=5) == ""
