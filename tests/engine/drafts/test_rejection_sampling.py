"""Sampled answers have the distribution with drafts that they have without."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from sgl_ext.engine.drafts.worker import right_drafts

WORDS, STEPS, SAMPLES = 4, 3, 4_000


def model(generator: torch.Generator) -> dict[tuple[int, ...], torch.Tensor]:
    """The distribution of the next token after each text of up to three tokens."""
    texts = [text for length in range(STEPS + 1) for text in product(range(WORDS), repeat=length)]
    return {text: torch.softmax(2 * torch.randn(WORDS, generator=generator), 0) for text in texts}


def shares_of(after: dict[tuple[int, ...], torch.Tensor]) -> dict[tuple[int, ...], float]:
    """How likely each text of three tokens is without drafts."""
    shares = {}
    for text in product(range(WORDS), repeat=STEPS):
        share = 1.0
        for at, token in enumerate(text):
            share *= float(after[text[:at]][token])
        shares[text] = share
    return shares


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("sent", [0, 1, 3])
def test_texts_are_as_frequent_as_without_drafts(seed: int, sent: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    after = model(generator)
    expected = shares_of(after)
    counts = dict.fromkeys(expected, 0)
    for draft in [(0, 1, 2), (3, 3, 0)]:
        # One step verifies the draft; what it leaves open is drawn token by token.
        places = [
            torch.multinomial(after[draft[:at]], SAMPLES, replacement=True, generator=generator)
            for at in range(STEPS + 1)
        ]
        drawn = torch.stack(places, 1)
        drafted = torch.tensor([[9, *draft]]).repeat(SAMPLES, 1)
        right = right_drafts(drawn, drafted, torch.full((SAMPLES,), sent))
        for row, count in zip(drawn.tolist(), right.tolist(), strict=True):
            assert count <= sent
            text = tuple(row[: count + 1])[:STEPS]
            while len(text) < STEPS:
                more = torch.multinomial(after[text], 1, generator=generator)
                text += (int(more),)
            counts[text] += 1
    # 63 degrees of freedom: of right samplers one in 300,000 is beyond 126. The seed is fixed.
    chi = sum(
        (counts[text] - 2 * SAMPLES * p) ** 2 / (2 * SAMPLES * p) for text, p in expected.items()
    )
    assert chi < 126


def test_drafts_count_up_to_the_first_wrong_one() -> None:
    drawn = torch.tensor([[1, 2, 3]])
    drafted = torch.tensor([[9, 1, 3]])
    assert right_drafts(drawn, drafted, torch.tensor([2])).tolist() == [1]
    assert right_drafts(drawn, drafted, torch.tensor([0])).tolist() == [0]
    assert right_drafts(drawn, torch.tensor([[9, 5, 2]]), torch.tensor([2])).tolist() == [0]
