"""Prompts as they are written again: without the numbers of lines, and as JSON where calls are."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radix.draft_memory import Tokens
from radix.draft_rewriting import REWRITTEN_TOKENS, Rewriter, writes_json

# Every text of these parts is tokens of one or more of them, the longest first.
TEXTS = [
    *'abcdefghijklmnopqrstuvwxyz0123456789 \n\t→"\\<>|{}:,=()',
    *("  ", "   ", "\n ", "\n  ", "\n   ", "\t  ", "\\n", '\\"', "\\t", "\\\\", "return", "\ufffd"),
]


def encode(text: str) -> list[int]:
    longest = sorted(filter(None, TEXTS), key=len, reverse=True)
    return [TEXTS.index(part) for part in re.findall("|".join(map(re.escape, longest)), text)]


def decode(tokens: Sequence[int] | Tokens) -> str:
    return "".join(TEXTS[token] for token in tokens)


def rewritten(text: str, *, escapes: bool = False) -> str:
    tokens = np.array(encode(text), np.int32)
    found = Rewriter(TEXTS, encode, escapes=escapes).rewrite(tokens)
    return decode(found) if len(found) else text


@pytest.mark.parametrize(
    ("shown", "written"),
    [
        ("\n   11\tdef\n   12\t   return", "\ndef\n   return"),
        ("\n 9\ta\n10\tb\n", "\na\nb\n"),
        ("\n     1→a\n     2→  b", "\na\n  b"),
        ("\n1\t\n2\t\n", "\n\n\n"),
        ("\n1\t\ta", "\n\ta"),
    ],
)
def test_numbers_of_lines_are_left_out(shown: str, written: str) -> None:
    assert rewritten(shown) == written


@pytest.mark.parametrize(
    "text",
    [
        "a 12\tb",
        "\n   \ta",
        "\na12\tb",
        "\n12 a\tb",
        "12",
        "\n12",
        "\n1234567890\ta",
        "12\ta",
        "",
        "\t",
    ],
)
def test_other_numbers_and_tabs_stay(text: str) -> None:
    assert rewritten(text) == text


def test_ends_of_lines_and_quotation_marks_are_escaped_where_calls_are_json() -> None:
    shown = '\n  1\treturn "a\\b"\n  2\t\tc\n'
    assert rewritten(shown, escapes=True) == '\\nreturn \\"a\\\\b\\"\\n\\tc\\n'


def test_a_token_that_is_no_text_stays() -> None:
    assert rewritten("\ufffd\n", escapes=True) == "\ufffd\\n"


def test_a_token_stays_where_the_tokenizer_cannot_write_its_other_form() -> None:
    texts = ["a", "\n"]
    rewriter = Rewriter(texts, lambda text: [0] * len(text), escapes=True)
    assert not len(rewriter.rewrite(np.array([0, 1, 0], np.int32)))


@given(st.lists(st.sampled_from([*TEXTS[:20], *TEXTS[36:]]), max_size=60), st.booleans())
def test_text_without_numbered_lines_is_written_as_json_has_it(
    parts: list[str], escapes: bool
) -> None:
    text = "".join(part for part in parts if not set(part) & {*"0123456789"})
    expected = json.dumps(text, ensure_ascii=False)[1:-1] if escapes else text
    assert rewritten(text, escapes=escapes) == expected


@given(st.lists(st.integers(-5, len(TEXTS) + 5), max_size=80), st.booleans())
def test_any_tokens_are_rewritten(tokens: list[int], escapes: bool) -> None:
    found = Rewriter(TEXTS, encode, escapes=escapes).rewrite(np.array(tokens, np.int32))
    assert found.dtype == np.int32
    assert all(0 <= token < len(TEXTS) for token in found)


def test_only_the_last_tokens_are_rewritten() -> None:
    line = encode("\n1\ta")
    tokens = np.array(line * REWRITTEN_TOKENS, np.int32)
    found = Rewriter(TEXTS, encode, escapes=False).rewrite(tokens)
    assert len(found) == REWRITTEN_TOKENS // len(line) * len(encode("\na"))


def test_a_template_says_whether_calls_are_json() -> None:
    def arguments(messages: list[dict[str, object]]) -> dict[str, str]:
        said: list = messages[-1]["tool_calls"]  # type: ignore[type-arg,assignment]
        found: dict[str, str] = said[0]["function"]["arguments"]
        return found

    assert writes_json(lambda messages: json.dumps(arguments(messages)))
    assert not writes_json(lambda messages: arguments(messages)["text"])
    assert not writes_json(lambda messages: str(1 / 0))
