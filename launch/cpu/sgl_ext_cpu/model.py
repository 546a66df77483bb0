"""The model maker: a small Qwen3 with random weights, made on the spot.

    python -m sgl_ext_cpu.model DIRECTORY [--size SIZE] [--seed N]

It needs no network. The result is an ordinary Hugging Face model directory that SGLang and
transformers load. Its weights are random, but chosen to be useful in tests:

- Attention is sharp, so a wrong key, position or mask shows in the output.
- Only tokens that are words have an output row; the logits of others are zero. So greedy output
  is text that has the same tokens when it comes back in the next turn, and it never ends by
  itself: a request runs to its `max_new_tokens`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from sgl_ext_cpu import tokenizer as text

FORMAT = 1
"""Increased whenever the same parameters make a different model."""

MARKER = "sgl_ext_cpu.json"
MAX_POSITIONS = 262_144
TEMPLATE = Path(__file__).with_name("chat.jinja")


@dataclass(frozen=True)
class Shape:
    """The sizes of a model. `weights` is False where only its configuration is made."""

    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    key_heads: int
    head_dim: int
    tokens: int
    """Tokens the tokenizer has; at most `vocabulary`."""
    weights: bool = True
    positions: int = MAX_POSITIONS

    @property
    def weight_bytes(self) -> int:
        """Of bfloat16 weights, but for norms."""
        attention = 2 * (self.heads + self.key_heads) * self.head_dim
        layer = self.hidden * (attention + 3 * self.intermediate)
        return 2 * (self.layers * layer + 2 * self.vocabulary * self.hidden)

    @property
    def token_bytes(self) -> int:
        """Of a token in a bfloat16 KV cache."""
        return 4 * self.layers * self.key_heads * self.head_dim


SHAPES = {
    "tiny": Shape(8_192, 64, 128, 2, 4, 2, 16, tokens=8_192),
    "bench": Shape(32_768, 256, 1_024, 2, 4, 2, 16, tokens=32_768),
    # For histories of a million tokens.
    "long": Shape(32_768, 16, 32, 1, 1, 1, 16, tokens=32_768, positions=1_100_000),
    # For GPUs: the engine draws the weights (`sgl_ext_cpu.models.qwen3`).
    "8b-config": Shape(151_936, 4_096, 12_288, 36, 32, 8, 128, tokens=32_768, weights=False),
    "2b-config": Shape(151_936, 2_048, 6_144, 28, 16, 8, 128, tokens=32_768, weights=False),
    "small-config": Shape(32_768, 1_024, 3_072, 4, 8, 2, 128, tokens=8_192, weights=False),
}


def make_model(directory: Path, size: str, seed: int = 0) -> Path:
    """Make the model in `directory` unless it is already there; return `directory`.

    Two processes can make the same directory at the same time: a model appears whole or not at
    all. Raises an error, and changes nothing, if the directory holds anything else.
    """
    if size not in SHAPES:
        raise ValueError(f"size: {size!r} is not one of {', '.join(SHAPES)}")
    marker = {"format": FORMAT, "size": size, "seed": seed}
    if _made(directory, marker):
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        _write(draft, SHAPES[size], seed)
        (draft / MARKER).write_text(json.dumps(marker) + "\n")
        # mkdtemp and safetensors make private files, but others may read a model.
        draft.chmod(0o755)
        for file in draft.iterdir():
            file.chmod(0o644)
        try:
            os.rename(draft, directory)
        except OSError:
            # Another process was first, or the directory holds something else.
            if not _made(directory, marker):
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return directory


def _made(directory: Path, marker: dict[str, Any]) -> bool:
    if not directory.exists() or (directory.is_dir() and not any(directory.iterdir())):
        return False
    try:
        found = json.loads((directory / MARKER).read_text())
    except (OSError, ValueError):
        found = None
    if found != marker:
        raise FileExistsError(
            f"{directory} holds {found or 'other files'}, not {marker}: "
            "remove it or name another directory"
        )
    return True


def _write(directory: Path, shape: Shape, seed: int) -> None:
    tokenizer = text.train(shape.tokens)
    text.save(tokenizer, directory, TEMPLATE.read_text(), shape.positions)
    numbers = tokenizer.get_vocab()
    end, pad = numbers[text.END_OF_TURN], numbers[text.END_OF_TEXT]
    _write_json(directory / "config.json", _config(shape, end, pad))
    _write_json(
        directory / "generation_config.json",
        {"eos_token_id": [end, pad], "pad_token_id": pad, "do_sample": False},
    )
    if shape.weights:
        weights = _weights(shape, tokenizer, seed)
        save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")


def _config(shape: Shape, end: int, pad: int) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.key_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.positions,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": shape.layers,
        "initializer_range": 0.02,
        "eos_token_id": end,
        "pad_token_id": pad,
        "dtype": "float32" if shape.weights else "bfloat16",
    }


def _weights(shape: Shape, tokenizer: Tokenizer, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator) / columns**0.5

    queries, keys = shape.heads * shape.head_dim, shape.key_heads * shape.head_dim
    weights = {
        "model.embed_tokens.weight": torch.randn(
            shape.vocabulary, shape.hidden, generator=generator
        ),
        "model.norm.weight": torch.ones(shape.hidden),
    }
    for number in range(shape.layers):
        layer = f"model.layers.{number}."
        weights |= {
            layer + "input_layernorm.weight": torch.ones(shape.hidden),
            layer + "post_attention_layernorm.weight": torch.ones(shape.hidden),
            layer + "self_attn.q_proj.weight": matrix(queries, shape.hidden),
            layer + "self_attn.k_proj.weight": matrix(keys, shape.hidden),
            layer + "self_attn.v_proj.weight": matrix(keys, shape.hidden),
            layer + "self_attn.o_proj.weight": 2 * matrix(shape.hidden, queries),
            # Scores of this spread let a few keys dominate even in a long prompt;
            # at 1 the softmax would average all of them away.
            layer + "self_attn.q_norm.weight": torch.full((shape.head_dim,), 3.0),
            layer + "self_attn.k_norm.weight": torch.ones(shape.head_dim),
            layer + "mlp.gate_proj.weight": matrix(shape.intermediate, shape.hidden),
            layer + "mlp.up_proj.weight": matrix(shape.intermediate, shape.hidden),
            layer + "mlp.down_proj.weight": matrix(shape.hidden, shape.intermediate),
        }
    spoken = text.words(tokenizer)
    head = torch.zeros(shape.vocabulary, shape.hidden)
    head[spoken] = 2 * matrix(len(spoken), shape.hidden)
    weights["lm_head.weight"] = head
    return weights


def main() -> None:
    """Make the model that the command line names, and print its path."""
    parser = argparse.ArgumentParser(description="Make a small model with random weights.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--size", choices=SHAPES, default="tiny")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(
        json.dumps(
            asdict(SHAPES[options.size])
            | {"directory": str(make_model(options.directory, options.size, options.seed))}
        )
    )


if __name__ == "__main__":
    main()
