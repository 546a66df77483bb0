"""Weights that an engine draws itself: as the model maker's, without a file."""

from typing import Any

import torch


def draw(name: str, weights: Any, words: list[int], seed: int) -> None:
    """Fills one tensor. words: the rows of the output that can win; others count from before
    or after the part of this rank."""
    generator = torch.Generator(weights.device).manual_seed(seed)
    if "norm" in name:
        weights.fill_(3.0 if name.endswith("q_norm.weight") else 1.0)
    elif "embed_tokens" in name:
        weights.normal_(generator=generator)
    else:
        gain = 2.0 if "o_proj" in name or "lm_head" in name else 1.0
        weights.normal_(std=gain / weights.shape[1] ** 0.5, generator=generator)
        if "lm_head" in name:
            silent = torch.ones(weights.shape[0], dtype=torch.bool, device=weights.device)
            silent[[word for word in words if 0 <= word < len(silent)]] = False
            weights[silent] = 0.0
