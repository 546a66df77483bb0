"""Texts of SGLang's for what is too long, as its own code writes them, in the vendors' words."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from sgl_ext.compat.errors import EngineError
from sgl_ext.compat.window import TooLong, too_long

SCHEDULERS = (
    "Input length (700 tokens) exceeds the maximum allowed length (700 tokens). "
    "Use a shorter input or enable --allow-auto-truncate."
)
EXPANDED = (
    "Multimodal prompt is too long after expanding multimodal tokens. "
    "After expanding len(req.origin_input_ids_unpadded)=30 => 800 >= 700."
)


def test_the_scheduler_s_limit_is_told_as_the_longest_prompt_that_it_takes() -> None:
    found = too_long(SCHEDULERS)
    assert found == TooLong(700, 699)
    assert found.anthropic == "prompt is too long: 700 tokens > 699 maximum"
    assert found.openai == (
        "This model's maximum context length is 699 tokens. However, your messages resulted in "
        "700 tokens. Please reduce the length of the messages."
    )
    assert too_long(found.openai) == found, "ours are read again"


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (EXPANDED, TooLong(800, 699)),
        ("Dots note omni expanded prompt is too long: 800 > 700", TooLong(800, 700)),
        ("Request a1 exceeds the maximum number of tokens: 800 > 700", TooLong(800, 700)),
        (
            "the prompt has 800 tokens, which does not fit the context length of 700 tokens",
            TooLong(800, 700),
        ),
    ],
)
def test_other_checks_of_sglang_are_read(message: str, expected: TooLong) -> None:
    assert too_long(message) == expected


@pytest.mark.parametrize(
    "message",
    [
        "Request prompt exceeds the KV memory budget: input_len=800.",
        "Request a1 exceeds the unified FULL/SWA KV byte budget: full=800, swa=90",
        "Beam search needs at least 1 generated token within the context budget "
        "(prompt_len=800, max_req_len=700).",
    ],
)
def test_a_text_without_a_limit_begins_with_the_words_that_clients_look_for(message: str) -> None:
    found = too_long(message)
    assert found is not None
    assert found.anthropic.startswith("prompt is too long: ")
    assert "maximum context length" in found.openai
    assert EngineError(400, message).code == "context_length_exceeded"


def test_another_error_is_not_one_of_length() -> None:
    for message in ("n must be positive", "messages: the list is too long", ""):
        assert too_long(message) is None


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("managers/utils.py", "the maximum allowed length ("),
        ("managers/tokenizer_manager.py", "model's context length ("),
        ("managers/tokenizer_manager.py", "exceeds the model's maximum context length "),
        ("managers/scheduler.py", "too long after expanding multimodal tokens. "),
        ("managers/scheduler.py", "exceeds the KV memory budget: input_len="),
        ("beam_search/coordinator.py", "Beam search needs at least 1 generated token"),
        ("disaggregation/prefill.py", "exceeds the maximum number of tokens: "),
        ("disaggregation/decode.py", "exceeds the unified FULL/SWA KV byte "),
        ("entrypoints/openai/serving_decisions.py", "the context length of {context_len}"),
        ("multimodal/processors/dots_note_omni.py", "expanded prompt is too long: "),
    ],
)
def test_sglang_still_has_each_of_these_texts(file: str, text: str) -> None:
    found = find_spec("sglang")
    assert found is not None
    assert found.origin is not None
    assert text in (Path(found.origin).parent / "srt" / file).read_text()
