"""SGLang on the CPU platform computes what transformers computes on the same weights.

Every test asks a real server for log-probabilities and compares them with a plain
forward pass of transformers over the whole sequence. Both run in float32, so they
differ by rounding alone: by 1e-5 at most, where leaving out one of 700 keys already
moves them by 0.1.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoModelForCausalLM

if TYPE_CHECKING:
    from tests.cpu.conftest import Engine

TOLERANCE = 1e-4

SETTINGS = {
    "page 1": ([], {}),
    "page 16, prompts in chunks of 64": (["--page-size", "16", "--chunked-prefill-size", "64"], {}),
    "page 1, prompts in chunks of 100 mixed with decoding": (
        ["--chunked-prefill-size", "100", "--enable-mixed-chunk"],
        {},
    ),
    "two ranks": (["--tp", "2"], {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}),
}

pytestmark = pytest.mark.parametrize(
    "engine",
    [
        pytest.param(each, marks=[pytest.mark.slow] * (name == "two ranks"))
        for name, each in SETTINGS.items()
    ],
    ids=list(SETTINGS),
    indirect=True,
    scope="module",
)


class Reference:
    """The model as transformers runs it."""

    def __init__(self, directory: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        self._model.eval()
        self.vocabulary: int = self._model.config.vocab_size

    def logprobs(self, tokens: list[int]) -> torch.Tensor:
        """Log-probabilities after each token, `[tokens, vocabulary]`."""
        with torch.inference_mode():
            logits = self._model(torch.tensor([tokens])).logits[0]
        return torch.log_softmax(logits.float(), dim=-1)


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> Reference:
    return Reference(tiny_model)


@pytest.fixture(autouse=True)
def _empty_cache(engine: Engine) -> None:
    engine.flush()


def prompts(reference: Reference, *lengths: int, seed: int = 0) -> list[list[int]]:
    chooser = random.Random(seed)
    return [[chooser.randrange(reference.vocabulary) for _ in range(n)] for n in lengths]


def check(reference: Reference, prompt: list[int], answer: dict[str, Any]) -> None:
    """The completion is greedy, and its log-probabilities are the reference's."""
    output = answer["output_ids"]
    expected = reference.logprobs(prompt + output)[len(prompt) - 1 : -1]
    got = torch.tensor([value for value, *_ in answer["meta_info"]["output_token_logprobs"]])
    assert len(got) == len(output) > 0
    torch.testing.assert_close(got, expected[range(len(output)), output], rtol=0, atol=TOLERANCE)
    best = expected.max(dim=-1).values
    assert torch.all(got >= best - TOLERANCE), "a token other than the likeliest was chosen"


def ask(engine: Engine, batch: list[list[int]], new: int) -> list[dict[str, Any]]:
    return engine.generate(batch, new, return_logprob=True)


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 64, 65, 700])
def test_one_prompt(engine: Engine, reference: Reference, length: int) -> None:
    (prompt,) = prompts(reference, length, seed=length)
    (answer,) = ask(engine, [prompt], 12)
    check(reference, prompt, answer)


def test_every_position_of_a_prompt(engine: Engine, reference: Reference) -> None:
    (prompt,) = prompts(reference, 300)
    (answer,) = engine.generate([prompt], 1, return_logprob=True, logprob_start_len=0)
    got = [value for value, *_ in answer["meta_info"]["input_token_logprobs"]][1:]
    expected = reference.logprobs(prompt)[range(299), prompt[1:]]
    torch.testing.assert_close(torch.tensor(got), expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    "lengths",
    [(40, 41, 42, 43, 44), (1, 300, 17, 5), (600, 3), (1200, 900, 1100)],
    ids=["alike", "unlike", "long and short", "long"],
)
def test_a_batch(engine: Engine, reference: Reference, lengths: tuple[int, ...]) -> None:
    batch = prompts(reference, *lengths)
    for prompt, answer in zip(batch, ask(engine, batch, 20), strict=True):
        check(reference, prompt, answer)


@pytest.mark.parametrize(("old", "new"), [(700, 1), (700, 150), (33, 40)])
def test_a_cached_prefix(engine: Engine, reference: Reference, old: int, new: int) -> None:
    start, more = prompts(reference, old, new)
    (first,) = ask(engine, [start], 8)
    prompt = start + first["output_ids"] + more
    (answer,) = ask(engine, [prompt], 8)
    assert answer["meta_info"]["cached_tokens"] >= old - old % 16
    check(reference, prompt, answer)


def test_requests_that_share_a_prefix(engine: Engine, reference: Reference) -> None:
    shared, *tails = prompts(reference, 520, 1, 30, 90)
    ask(engine, [shared], 1)
    batch = [shared + tail for tail in tails]
    for prompt, answer in zip(batch, ask(engine, batch, 6), strict=True):
        assert answer["meta_info"]["cached_tokens"] >= 512
        check(reference, prompt, answer)


def test_a_scattered_cache(engine: Engine, reference: Reference) -> None:
    """After requests of many lengths have come and gone, free slots are no longer in order."""
    for seed in range(3):
        ask(engine, prompts(reference, 90, 350, 40, 210, 130, seed=seed), 5)
    engine.flush()
    batch = prompts(reference, 800, 650, seed=9)
    for prompt, answer in zip(batch, ask(engine, batch, 6), strict=True):
        check(reference, prompt, answer)
        (again,) = ask(engine, [[*prompt, 7]], 6)
        check(reference, [*prompt, 7], again)
