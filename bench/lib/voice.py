"""How a model with random weights is made to answer as an agent's does.

By itself it would neither think nor call a tool nor end: a grammar gives the form, and leaves it
the words.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

# What the model says, words and what is between them. Short: on a CPU, an engine that ten
# people share would do little else than answer.
_WORD = " [a-z]+"
_THOUGHT = ("<think>", _WORD, "</think>")
_CALL = ("[next()]",)
_TEXT = (_WORD,)
_OPENED, _CLOSED = "<|im_start|>", "<|im_end|>"


class Voice:
    """How a random model is made to speak as an agent's does. `tokenizer`: of `tokenizers`."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # Where the grammar leaves no whole word, all tokens are as likely. Of those that it
        # allows, one that ends a word is taken before one that goes on with it, and one that
        # spells more before one that spells less. Any whole word is likelier still.
        self._bias = {
            str(number): round((0.2 if _is_of_word(token) else 0.5) + len(token) / 100, 2)
            for part in (*_THOUGHT, *_CALL, *_TEXT, _CLOSED)
            if part != _WORD
            for number, token in self._pieces(part)
        }

    def form(self, *, is_call: bool) -> dict[str, Any]:
        """A request's fields that make its answer a thought, and a call or a text."""
        parts = (*_THOUGHT, *(_CALL if is_call else _TEXT))
        regex = "".join(part if part == _WORD else re.escape(part) for part in parts)
        return {"regex": regex, "logit_bias": self._bias}

    def own_tokens(self, text: str) -> int:
        """How many tokens of a prompt are of its last message, a person's, and come after it."""
        framed = f"{_OPENED}user\n{text}{_CLOSED}\n{_OPENED}assistant\n"
        return len(self._tokenizer.encode(framed).ids)

    def _pieces(self, text: str) -> Iterable[tuple[int, str]]:
        coded = self._tokenizer.encode(text)
        return zip(coded.ids, coded.tokens, strict=True)


def _is_of_word(token: str) -> bool:
    return token.isascii() and token.isalpha()
