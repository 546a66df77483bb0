"""A prompt's tokens in the HTTP process: only what is new in it is tokenized.

The way is `sgl_ext.engine.host_cache.piecewise`, proven on the loaded tokenizer before the server
takes requests, and checked again on a prompt now and then beside serving. Where it does not hold,
SGLang tokenizes as it does without us, and a line in the log and a counter say why."""

from __future__ import annotations

import logging
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from inspect import unwrap
from typing import Any

from sgl_ext.engine import sglang_api
from sgl_ext.engine.core.counters import counter
from sgl_ext.engine.core.request_context import current
from sgl_ext.engine.host_cache import token_array
from sgl_ext.engine.host_cache.piecewise import Inexact, Piecewise

CHECK_EVERY_S = 60.0
_logger = logging.getLogger(__name__)
_active: TokenCache | None = None
_group: ContextVar[str | None] = ContextVar("sgl_ext_token_group", default=None)

Original = Callable[..., list[int]]


class TokenCache:
    """Encodes prompts for one tokenizer, for as long as that is right."""

    def __init__(self, tokenizer: Any, original: Original, limit_bytes: int) -> None:
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        self._original = original
        added = {
            token.content: number
            for number, token in self._backend.get_added_tokens_decoder().items()
            if token.content and not token.normalized
        }
        self._piecewise = Piecewise(added, self._whole, self._many, limit_bytes)
        self._checked_s = time.monotonic()
        self._counted = (0, 0)
        self.is_off = False

    def prove(self) -> None:
        """Turns it off if it is not right for this tokenizer."""
        if self._refused():
            self.turn_off("options")
        elif not self._piecewise.proven():
            self.turn_off("inexact")

    def turn_off(self, why: str) -> None:
        """SGLang tokenizes from now on."""
        self.is_off = True
        self._piecewise.clear()
        counter("token_cache_off").labels(why).inc()
        _logger.warning(
            "sgl-ext: prompts are tokenized whole: pieces of them come out otherwise (%s)", why
        )

    def serves(self, tokenizer: Any, asked: dict[str, Any]) -> bool:
        """Whether a prompt may be encoded here, for this tokenizer and with these options."""
        if self.is_off or tokenizer is not self._tokenizer or asked.keys() - {"add_special_tokens"}:
            return False
        if self._refused():
            return False
        return not asked.get("add_special_tokens", True) or not self._adds()

    def encode(self, text: str, group: str | None = None) -> array[int]:
        """The tokens of a prompt of a cache group, which knows no other group's pieces."""
        try:
            tokens = self._piecewise.encode(text, "" if group is None else f"g{group}")
        except Inexact:
            self.turn_off("inexact")
            return array("q", self._whole(text))
        self._count()
        if time.monotonic() - self._checked_s >= CHECK_EVERY_S:
            self._checked_s = time.monotonic()
            threading.Thread(target=self.check, args=(text, tokens.tolist()), daemon=True).start()
        return tokens

    def check(self, text: str, tokens: list[int]) -> None:
        """Compares with what the tokenizer itself makes of a prompt."""
        counter("token_cache_checks").inc()
        if self._whole(text) != tokens:
            self.turn_off("differs")

    def _refused(self) -> bool:
        """Whether an option makes the tokenizer do more than encode, or ignore added tokens."""
        backend = self._backend
        return bool(
            backend.truncation is not None
            or backend.padding is not None
            or backend.encode_special_tokens
            or getattr(self._tokenizer, "split_special_tokens", False)
        )

    def _adds(self) -> bool:
        processor = self._backend.post_processor
        return processor is not None and processor.num_special_tokens_to_add(False) > 0

    def _whole(self, text: str) -> list[int]:
        return list(self._original(self._tokenizer, text, {"add_special_tokens": False}))

    def _many(self, texts: Sequence[str]) -> list[list[int]]:
        # A long one is spread over cores by SGLang, many short ones by the library.
        if len(texts) == 1:
            return [self._whole(texts[0])]
        encodings = self._backend.encode_batch(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def _count(self) -> None:
        known, new = self._piecewise.known_tokens, self._piecewise.new_tokens
        before_known, before_new = self._counted
        self._counted = (known, new)
        counter("prompt_tokens_encoded").labels("known").inc(max(known - before_known, 0))
        counter("prompt_tokens_encoded").labels("new").inc(max(new - before_new, 0))


def start(tokenizer: Any, limit_bytes: int) -> None:
    """Makes and proves the cache for an engine's tokenizer; 0 bytes: none."""
    global _active
    if not limit_bytes:
        return
    if not getattr(tokenizer, "is_fast", False):
        counter("token_cache_off").labels("slow").inc()
        _logger.warning("sgl-ext: prompts are tokenized whole: the tokenizer is not a fast one")
        return
    cache = TokenCache(tokenizer, unwrap(sglang_api.parallel_prompt_encode), limit_bytes)
    cache.prove()
    _active = cache


def encode_prompt(
    original: Original, tokenizer: Any, text: Any, encode_kwargs: dict[str, Any] | None = None
) -> list[int] | array[int]:
    """Around `parallel_prompt_encode` of SGLang's chat: only new pieces are tokenized."""
    asked = encode_kwargs or {}
    if _active is None or not isinstance(text, str) or not _active.serves(tokenizer, asked):
        return original(tokenizer, text, encode_kwargs)
    context = current()
    tokens = _active.encode(text, _group.get() if context is None else context.group)
    return tokens if token_array.is_array_allowed() else tokens.tolist()


@contextmanager
def in_group(group: str | None) -> Iterator[None]:
    """Prompts that are tokenized meanwhile outside of a request's context are of this group."""
    token = _group.set(group)
    try:
        yield
    finally:
        _group.reset(token)
