"""Weights that an engine draws itself, in place of SGLang's dummy ones."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
drawing = pytest.importorskip("sgl_ext_cpu.drawing")

WORDS = [-2, 3, 5, 8]


def drawn(name: str, rows: int = 8, columns: int = 400, seed: int = 0) -> torch.Tensor:
    weights = torch.full((rows, columns) if columns else (rows,), 7.0, dtype=torch.bfloat16)
    drawing.draw(name, weights, WORDS, seed)
    return weights.float()


def test_only_words_can_be_sampled() -> None:
    head = drawn("lm_head.weight")
    assert [row for row in range(8) if head[row].any()] == [3, 5]


def test_attention_is_sharp_and_layers_keep_their_scale() -> None:
    assert drawn("model.layers.0.self_attn.q_norm.weight", 16, 0).unique().tolist() == [3.0]
    assert drawn("model.layers.0.self_attn.k_norm.weight", 16, 0).unique().tolist() == [1.0]
    assert drawn("model.norm.weight", 16, 0).unique().tolist() == [1.0]
    assert drawn("model.layers.0.mlp.down_proj.weight").std().item() == pytest.approx(0.05, rel=0.1)
    assert drawn("model.layers.0.self_attn.o_proj.weight").std().item() == pytest.approx(
        0.1, rel=0.1
    )
    assert drawn("model.embed_tokens.weight").std().item() == pytest.approx(1.0, rel=0.1)


def test_two_engines_draw_the_same() -> None:
    one, same, other = (drawn("model.embed_tokens.weight", seed=seed) for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
