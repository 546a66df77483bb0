"""The encoder of DeepSeek V4's prompts, which are a text in which some places are special tokens.

The encoder takes the rest as plain text: where it spells a special token, it gets other tokens than
the text as a whole would. Such a prompt is left to the encoder, and any other one is tokenized by
the token cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sgl_ext.engine.core.request_context import current
from sgl_ext.engine.host_cache.token_cache import TokenCache


class RecipeEncoding:
    """Stands in for `encoding`, which deepseek-recipe made for `tokenizer`.

    The first prompt is encoded in both ways. If they differ, the cache turns itself off.
    """

    def __init__(
        self, encoding: Any, tokenizer: Any, token_cache: Callable[[], TokenCache | None]
    ) -> None:
        self._encoding = encoding
        self._tokenizer = tokenizer
        self._token_cache = token_cache
        self._is_proven = False

    def render_conversation(self, conversation: Any) -> Any:
        """The prompt as text, with the ranges of its special tokens."""
        return self._encoding.render_conversation(conversation)

    def encode(self, conversation: Any) -> list[int]:
        """The tokens of a conversation's prompt."""
        cache = self._token_cache()
        if cache is not None and cache.serves_backend(self._tokenizer):
            tokens = self._cached(cache, conversation)
            if tokens is not None:
                return tokens
        return self._whole(conversation)

    def _cached(self, cache: TokenCache, conversation: Any) -> list[int] | None:
        rendered = self._encoding.render_conversation(conversation)
        text, context = rendered.prompt, current()
        special = [text[start:end] for start, end in rendered.special_ranges]
        group = None if context is None else context.group
        tokens = cache.encode_with(special, text, group, lambda: self._whole(conversation))
        if tokens is None:
            return None
        found = tokens.tolist()
        if not self._is_proven:
            cache.check(self._whole(conversation), found)
            self._is_proven = not cache.is_off
        return None if cache.is_off else found

    def _whole(self, conversation: Any) -> list[int]:
        return list(self._encoding.encode(conversation))
