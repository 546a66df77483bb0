"""In the HTTP process: the tokens of earlier prompts, so that a prompt needs only its new ones.

`sgl_ext.engine.host_cache.piece_tokenizer` computes them. It is proven on the loaded tokenizer
before the server takes requests, and checked on a prompt now and then while it serves. Where its
tokens are not SGLang's, the cache turns itself off: SGLang tokenizes, and a log line and a counter
say why.
"""

from __future__ import annotations

import logging
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from inspect import unwrap
from typing import Any, NamedTuple

import numpy as np

from sgl_ext.engine import sglang_api
from sgl_ext.engine.core.counters import counter
from sgl_ext.engine.host_cache.piece_tokenizer import Inexact, PieceTokenizer
from sgl_ext.engine.host_cache.worth import Worth, turned_off

CHECK_EVERY_S = 60.0
# A check tokenizes a whole prompt, which takes seconds for a million tokens.
_CHECKED_SHARE = 0.01
_logger = logging.getLogger(__name__)

Original = Callable[..., list[int]]


class _Before(NamedTuple):
    """The clock and what was tokenized, before a prompt."""

    begun_s: float
    new_tokens: int
    new_chars: int
    new_s: float


class TokenCache:
    """Encodes prompts for one tokenizer. `original` encodes as SGLang does.

    prompts: how many it has encoded. worth: its account, in characters.
    """

    def __init__(self, tokenizer: Any, original: Original, limit_bytes: int) -> None:
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        self._original = original
        added_tokens = self._backend.get_added_tokens_decoder().items()
        added = {
            token.content: number
            for number, token in added_tokens
            if token.content and not token.normalized
        }
        self._added = {token.content: number for number, token in added_tokens}
        self._added_ids = np.array(list(self._added.values()), dtype=np.int64)
        self._pieces = PieceTokenizer(added, self._whole, self._many, limit_bytes)
        self._checked_s = time.monotonic()
        self._check_after_s = CHECK_EVERY_S
        self.is_off = False
        self.prompts = 0
        self.worth = Worth("tokens")

    @property
    def new_tokens(self) -> int:
        """How many tokens were not found in the cache."""
        return self._pieces.new_tokens

    @property
    def used_bytes(self) -> int:
        """The size of what it holds."""
        return self._pieces.pieces.used_bytes + self._pieces.prompts.used_bytes

    @property
    def limit_bytes(self) -> int:
        """The bound of that."""
        return self._pieces.pieces.limit_bytes + self._pieces.prompts.limit_bytes

    def prove(self) -> None:
        """Turns the cache off unless its tokens are the tokenizer's on texts made to tell."""
        if self._has_options():
            self.turn_off("options")
        elif not self._pieces.proven():
            self.turn_off("inexact")

    def turn_off(self, why: str) -> None:
        """SGLang tokenizes from now on."""
        self.is_off = True
        self._pieces.clear()
        counter("token_cache_disabled").labels(why).inc()
        _logger.warning("sgl-ext: the token cache is off: its tokens are not SGLang's (%s)", why)

    def serves(self, tokenizer: Any, options: dict[str, Any] | None) -> bool:
        """Whether the cache may encode a prompt for this tokenizer with these options."""
        options = options or {}
        if self.is_off or tokenizer is not self._tokenizer or not self.worth.is_on():
            return False
        if options.keys() - {"add_special_tokens"} or self._has_options():
            return False
        processor = self._backend.post_processor
        adds = processor is not None and processor.num_special_tokens_to_add(False) > 0
        return not (adds and options.get("add_special_tokens", True))

    def serves_backend(self, backend: Any) -> bool:
        """Whether the cache may encode texts for the library's tokenizer itself."""
        is_served = not self.is_off and backend is self._backend and not self._has_options()
        return is_served and self.worth.is_on()

    def added_before(self) -> list[int] | None:
        """What the tokenizer puts before a text; None if it puts something after it, too."""
        before: list[int] = self._backend.encode("").ids
        plain: list[int] = self._backend.encode("a", add_special_tokens=False).ids
        return before if self._backend.encode("a").ids == before + plain else None

    def encode(self, text: str, group: str | None = None) -> array[int]:
        """A prompt's tokens. Cache groups do not find each other's pieces."""
        before = self._before()
        try:
            tokens = self._pieces.encode(text, _space(group))
        except Inexact:
            self.turn_off("inexact")
            return array("q", self._whole(text))
        self._note(tokens, text, before, lambda: self._whole(text))
        return tokens

    def encode_with(
        self,
        added: Sequence[str],
        text: str,
        group: str | None,
        whole: Callable[[], list[int]],
    ) -> array[int] | None:
        """As `encode`; None if the text's added tokens are not exactly these, in their order.

        whole: how SGLang makes the tokens, for the checks.
        """
        before = self._before()
        try:
            tokens = self._pieces.encode(text, _space(group))
        except Inexact:
            self.turn_off("inexact")
            return None
        ids = np.frombuffer(tokens, dtype=np.int64)
        found = ids[np.isin(ids, self._added_ids)].tolist()
        if found != [self._added.get(token) for token in added]:
            counter("prompt_tokens_encoded").labels("new").inc(len(tokens))
            self._weigh(before, 0)
            return None
        self._note(tokens, text, before, whole)
        return tokens

    def _before(self) -> _Before:
        pieces = self._pieces
        return _Before(self.worth.now(), pieces.new_tokens, pieces.new_chars, pieces.new_s)

    def _weigh(self, before: _Before, chars: int) -> None:
        """Notes what a prompt of so many characters took, for the cache's worth."""
        pieces, took_s = self._pieces, self.worth.now() - before.begun_s
        if pieces.new_chars > before.new_chars:
            self.worth.learn(pieces.new_chars - before.new_chars, pieces.new_s - before.new_s)
        if self.worth.note(took_s, chars):
            turned_off(self.worth)
            pieces.clear()

    def _note(
        self, tokens: array[int], text: str, before: _Before, whole: Callable[[], list[int]]
    ) -> None:
        """Counts a prompt's tokens, and checks them now and then."""
        self.prompts += 1
        new = self._pieces.new_tokens - before.new_tokens
        self._weigh(before, len(text))
        counter("prompt_tokens_encoded").labels("known").inc(max(len(tokens) - new, 0))
        counter("prompt_tokens_encoded").labels("new").inc(new)
        if time.monotonic() - self._checked_s >= self._check_after_s:
            self._checked_s = time.monotonic()
            ids = tokens.tolist()

            def check() -> None:
                begun_s = self.worth.now()
                expected = whole()
                took_s = self.worth.now() - begun_s
                self._check_after_s = max(CHECK_EVERY_S, took_s / _CHECKED_SHARE)
                self.worth.learn(len(text), took_s)
                self.check(expected, ids)

            threading.Thread(target=check, daemon=True).start()

    def check(self, whole: list[int], tokens: list[int]) -> None:
        """Turns the cache off unless a prompt's tokens are those that SGLang makes of it."""
        counter("token_cache_checks").inc()
        if whole != tokens:
            self.turn_off("differs")

    def _has_options(self) -> bool:
        """Whether an option makes the tokenizer do more than encode, or ignore added tokens."""
        backend = self._backend
        return bool(
            backend.truncation is not None
            or backend.padding is not None
            or backend.encode_special_tokens
            or getattr(self._tokenizer, "split_special_tokens", False)
        )

    def _whole(self, text: str) -> list[int]:
        return list(self._original(self._tokenizer, text, {"add_special_tokens": False}))

    def _many(self, texts: Sequence[str]) -> list[list[int]]:
        # SGLang spreads a long text over cores, and the library spreads many short ones.
        if len(texts) == 1:
            return [self._whole(texts[0])]
        encodings = self._backend.encode_batch(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]


def _space(group: str | None) -> str:
    return "" if group is None else f"g{group}"


def make_token_cache(tokenizer: Any, limit_bytes: int) -> TokenCache | None:
    """The cache for an engine's tokenizer, proven on it; None: 0 bytes, or no fast tokenizer."""
    if not limit_bytes:
        return None
    if not getattr(tokenizer, "is_fast", False):
        counter("token_cache_disabled").labels("slow").inc()
        _logger.warning("sgl-ext: the token cache is off: this tokenizer is not a fast one")
        return None
    cache = TokenCache(tokenizer, unwrap(sglang_api.parallel_prompt_encode), limit_bytes)
    cache.prove()
    return cache
