"""Ends of blocks in tokens, by a real tokenizer, compared with the real prompt."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_ext.engine.host_cache.token_offsets import TokenOffsets

END = "<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_model)


class Counted:
    """Token offsets, and how many characters they tokenize."""

    def __init__(self, tokenizer: Any, limit: int = 100) -> None:
        self.tokenizer = tokenizer
        self.chars = 0
        self.offsets = TokenOffsets(self.encode, tokenizer.decode, limit)

    def encode(self, text: str) -> list[int]:
        self.chars += len(text)
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def prompt(self, text: str) -> array[int]:
        return array("q", self.tokenizer.encode(text, add_special_tokens=False))


@pytest.fixture
def counted(tokenizer: Any) -> Counted:
    return Counted(tokenizer)


def spoken(*texts: str) -> tuple[str, list[int]]:
    """A prompt in ChatML, and where each text ends in it."""
    prompt, ends = "", []
    for text in texts:
        prompt += f"<|im_start|>user\n{text}"
        ends.append(len(prompt))
        prompt += "<|im_end|>\n"
    return prompt + "<|im_start|>assistant\n", ends


def test_blocks_end_where_their_last_token_does(counted: Counted) -> None:
    text, ends = spoken("You help with files. " * 20, "Hello", "Look at this, please: " * 30)
    prompt = counted.prompt(text)
    tokens = counted.offsets.count(text, ends, prompt)
    for end, count in zip(ends, tokens, strict=True):
        assert counted.tokenizer.decode(prompt[:count]) == text[:end]


@settings(max_examples=60)
@given(st.lists(st.text(max_size=30), min_size=1, max_size=5))
def test_no_token_before_a_place_contains_text_after_it(
    tokenizer: Any, texts: Sequence[str]
) -> None:
    counted = Counted(tokenizer)
    text, ends = spoken(*texts)
    prompt = counted.prompt(text)
    for end, count in zip(ends, counted.offsets.count(text, ends, prompt), strict=True):
        assert text[:end].encode().startswith(tokenizer.decode(prompt[:count]).encode()[:-3])
        assert len(prompt) - count >= len(counted.encode(END)) - 1


def test_a_place_inside_a_token_is_before_that_token(counted: Counted) -> None:
    text = "hello hello hello"
    prompt = counted.prompt(text)
    whole = counted.offsets.count(text, [len("hello hello")], prompt)
    inside = counted.offsets.count(text, [len("hello hel")], prompt)
    assert inside[0] < whole[0]
    both = counted.offsets.count(text, [len("hello hel"), len("hello hello")], prompt)
    assert both == [*inside, *whole], "and does not mislead the count of the next place"


def test_another_text_is_found_only_up_to_where_it_diverges_from_the_prompt(
    counted: Counted,
) -> None:
    text, ends = spoken("one two three", "four")
    other, _ = spoken("one two other", "five")
    (count,) = counted.offsets.count(text, ends[:1], counted.prompt(other))
    assert counted.tokenizer.decode(counted.prompt(text)[:count]) in text.split("three")[0]


def test_a_place_near_the_end_is_counted_from_there(counted: Counted) -> None:
    text, ends = spoken("words " * 5000, "more")
    prompt = counted.prompt(text)
    counted.chars = 0
    counted.offsets.count(text, ends[-1:], prompt)
    assert counted.chars < 100


def test_an_end_is_known_while_the_tokens_before_it_are_the_same(counted: Counted) -> None:
    text, ends = spoken("A system prompt", "Hello")
    prompt = counted.prompt(text)
    (end,) = counted.offsets.count(text, ends[:1], prompt)
    counted.offsets.remember(7, end, prompt)
    longer, _ = spoken("A system prompt", "Hello", "Go on")
    assert counted.offsets.recall(7, counted.prompt(longer)) == end
    assert counted.offsets.recall(7, counted.prompt(spoken("Another", "Hello")[0])) is None
    assert counted.offsets.recall(8, prompt) is None


def test_the_number_of_known_ends_is_bounded(tokenizer: Any) -> None:
    counted = Counted(tokenizer, limit=3)
    prompt = counted.prompt("some words here")
    for key in (1, 2, 3):
        counted.offsets.remember(key, 1, prompt)
    counted.offsets.recall(1, prompt)
    counted.offsets.remember(4, 1, prompt)
    known = [key for key in (1, 2, 3, 4) if counted.offsets.recall(key, prompt) is not None]
    assert known == [1, 3, 4]


def test_a_last_block_is_found_by_what_the_template_writes_after_it(counted: Counted) -> None:
    first, (end,) = spoken("Hello there")
    assert counted.offsets.by_tail("Hello there", counted.prompt(first)) is None
    counted.offsets.remember_tail(first[end:])
    later, ends = spoken("Hello there", "and a question\n")
    counted.chars = 0
    found = counted.offsets.by_tail("and a question\n", counted.prompt(later))
    assert [found] == counted.offsets.count(later, [ends[1]], counted.prompt(later))
    assert counted.offsets.by_tail("and another", counted.prompt(later)) is None


_TAILS = ("<|im_end|>\n", END, "\n</tool_response>" + END, ">" + END)


@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["Hello", "x>", "caf\u00e9", "ab\n", "\U0001f600", ""]),
            st.sampled_from([*_TAILS, "<|im_end|>", ""]),
        ),
        max_size=8,
    )
)
def test_results_do_not_depend_on_earlier_prompts(
    tokenizer: Any, ends: list[tuple[str, str]]
) -> None:
    used = Counted(tokenizer)
    for tail in _TAILS:
        used.offsets.remember_tail(tail)
    for block, after in ends:
        fresh = Counted(tokenizer)
        for tail in _TAILS:
            fresh.offsets.remember_tail(tail)
        for prompt in (used.prompt(f"It says: {block}{after}"), used.prompt(after)):
            said = f"It says: {block}"
            assert used.offsets.by_tail(said, prompt) == fresh.offsets.by_tail(said, prompt)


def test_token_offsets_are_thread_safe() -> None:
    offsets = TokenOffsets(lambda text: list(map(ord, text)), lambda ids: "".join(map(chr, ids)), 2)
    prompts = [array("q", map(ord, f"some words here {n}")) for n in range(9)]

    def ask(thread: int) -> None:
        for n in range(1000):
            prompt = prompts[(thread + n) % len(prompts)]
            offsets.remember(n % 5, 3, prompt)
            offsets.recall((n + thread) % 5, prompt)
            offsets.remember_tail(f"<|im_end|>{(n + thread) % 9}")
            offsets.by_tail("another", prompt)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(ask, range(8)))
    finally:
        sys.setswitchinterval(interval)


@pytest.mark.parametrize(
    "last", ["words", "done):", "x = {}", "ends.", "tab\t", "50%", "caf\u00e9", "()"]
)
def test_a_last_block_is_found_whatever_token_it_ends_in(counted: Counted, last: str) -> None:
    """A token may contain the end of a block and the beginning of the text after it."""
    tail = "\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    counted.offsets.remember_tail(tail)
    text = f"<|im_start|>user\n<tool_response>\nIt says: {last}"
    prompt = counted.prompt(text + tail)
    found = counted.offsets.by_tail(f"It says: {last}", prompt)
    assert found is not None
    assert text.startswith(counted.tokenizer.decode(prompt[:found]))
    assert len(counted.tokenizer.decode(prompt[: found + 1])) > len(text)
