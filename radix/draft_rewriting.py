"""The tokens of a prompt as a model writes them again.

An agent copies what its tools have shown, but rarely token by token. Tools show files with the
numbers of their lines, and the arguments of a call are JSON in most models' formats, where the end
of a line is `\\n` and a quotation mark is `\\"`:

    shown       11  def greet(name):          written   def greet(name):\\n    return \\"hello\\"\\n
                12      return "hello"

What follows the shown tokens is a wrong draft at each end of a line. So the prompt is rewritten
once, and drafts are looked for in both. Each token is rewritten for itself, with tables by token:
no text of the prompt is decoded or tokenized. Where a tokenizer joins what stands in two tokens
here, a draft is wrong there.
"""

import json
import re
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from radix.draft_memory import Tokens

REWRITTEN_TOKENS = 65_536
"""How many of a prompt's last tokens are rewritten."""

_MOST_DIGITS = 8
_PART_OF_NUMBER, _HAS_DIGIT, _ENDS_LINE, _IS_TAB = 1, 2, 4, 8
_TABS = ("\t", "→")
_WHOLE, _WITHOUT_INDENT, _WITHOUT_TAB = range(3)


class Rewriter:
    """Rewrites the tokens of one tokenizer.

    texts: of each token, by its number. encode: the tokens of a text. escapes: whether arguments
    of calls are written as JSON.
    """

    def __init__(
        self, texts: Sequence[str], encode: Callable[[str], Sequence[int]], *, escapes: bool
    ) -> None:
        self._kinds = np.array([_kind(text) for text in texts], np.uint8)
        pieces = [
            _written(token, form(text), texts, encode, escapes=escapes)
            if kind & of_kind == of_kind
            else [token]
            for form, of_kind in ((str, 0), (_without_indent, _ENDS_LINE), (_without_tab, _IS_TAB))
            for token, (text, kind) in enumerate(zip(texts, self._kinds, strict=True))
        ]
        self._pieces = np.array([number for piece in pieces for number in piece], np.int32)
        # Of each token its three forms, as parts of `_pieces`.
        self._lengths = np.array([len(piece) for piece in pieces]).reshape(3, -1)
        self._starts = (np.cumsum(self._lengths) - self._lengths.ravel()).reshape(3, -1)

    def rewrite(self, tokens: Tokens) -> Tokens:
        """The last REWRITTEN_TOKENS of these tokens as they would be written; an empty array if
        they are the same. What is no token of the tokenizer is left out."""
        tokens = tokens[-REWRITTEN_TOKENS:]
        tokens = tokens[(tokens >= 0) & (tokens < len(self._kinds))]
        if not len(tokens):
            return tokens
        forms, is_kept = self._without_numbers(tokens)
        lengths = np.where(is_kept, self._lengths[forms, tokens], 0)
        ends = np.cumsum(lengths)
        places = np.repeat(self._starts[forms, tokens] - (ends - lengths), lengths)
        written = self._pieces[places + np.arange(len(places))]
        return tokens[:0] if np.array_equal(written, tokens) else written

    def _without_numbers(self, tokens: Tokens) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """The form of each token, and whether it stays: numbers of lines go."""
        kinds = self._kinds[tokens]
        forms = np.full(len(tokens), _WHOLE)
        is_kept = np.ones(len(tokens), np.bool_)
        places = np.arange(len(tokens))
        # The last token before each one that is no part of a number.
        before = np.maximum.accumulate(np.where(kinds & _PART_OF_NUMBER, -1, places))
        digits = np.cumsum((kinds & _HAS_DIGIT) > 0)
        tabs = np.flatnonzero(kinds[1:] & _IS_TAB) + 1
        lines = before[tabs - 1]
        tabs, lines = tabs[lines >= 0], lines[lines >= 0]
        is_number = (kinds[lines] & _ENDS_LINE > 0) & (tabs - lines <= _MOST_DIGITS + 1)
        has_digit = (digits[tabs - 1] > digits[lines]) | (kinds[lines] & _HAS_DIGIT > 0)
        tabs, lines = tabs[is_number & has_digit], lines[is_number & has_digit]
        forms[lines], forms[tabs] = _WITHOUT_INDENT, _WITHOUT_TAB
        removed = np.zeros(len(tokens) + 1, np.int64)
        removed[lines + 1] += 1
        removed[tabs] -= 1
        is_kept[np.cumsum(removed)[:-1] > 0] = False
        return forms, is_kept


def _without_indent(text: str) -> str:
    return text[: text.rfind("\n") + 1]


def _without_tab(text: str) -> str:
    return text[1:]


def _written(
    token: int,
    kept: str,
    texts: Sequence[str],
    encode: Callable[[str], Sequence[int]],
    *,
    escapes: bool,
) -> Sequence[int]:
    """The tokens of the part of a token's text that stays; the token itself where they differ."""
    text = texts[token]
    written = json.dumps(kept, ensure_ascii=False)[1:-1] if escapes else kept
    if written == text or "\ufffd" in text:
        return [token]
    found = list(encode(written)) if written else []
    is_same = "".join(texts[number] for number in found) == written
    return found if is_same else [token]


def _kind(text: str) -> int:
    kind = 0
    if text and re.fullmatch(r" *[0-9]*", text):
        kind |= _PART_OF_NUMBER
    if ends := re.search(r"\n *([0-9]*)\Z", text):
        kind |= _ENDS_LINE
        kind |= _HAS_DIGIT if ends[1] else 0
    elif kind & _PART_OF_NUMBER and text.strip(" "):
        kind |= _HAS_DIGIT
    if text.startswith(_TABS):
        kind |= _IS_TAB
    return kind


def writes_json(render: Callable[[list[dict[str, object]]], str]) -> bool:
    """Whether the calls of a chat template hold their arguments as JSON. render: the text of a
    conversation; what it raises counts as no."""
    function = {"name": "write", "arguments": {"text": "one\ntwo"}}
    calls = [{"type": "function", "function": function}]
    asked: dict[str, object] = {"role": "user", "content": "three"}
    try:
        text = render([asked, {"role": "assistant", "content": "", "tool_calls": calls}])
    except Exception:  # a template is a program of its model's maker
        return False
    return "one\\ntwo" in text
