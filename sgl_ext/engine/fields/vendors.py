"""Values that are in the vendors' ranges and not in SGLang's, with what means the same there.

A client's file of settings often states them. SGLang refuses them. On its own paths they stay
out of range.
"""

from collections.abc import Iterator, Mapping
from typing import Any

_ALL_TOKENS = -1
LEAST_TOP_P = 1e-30
"""It leaves the one most probable token, as 0 does."""


def in_sglangs_words(params: Mapping[str, Any], body: Any) -> Iterator[tuple[str, Any]]:
    """The sampling parameters that SGLang writes in another way, each with that value.

    top_k 0         no limit: Anthropic's and Ollama's ranges begin there
    top_p 0         the most probable token alone: OpenAI's and Anthropic's ranges begin there
    max_tokens 0    the prompt alone, which fills the cache. SGLang's own bodies have 1 at least
    num_predict     of Ollama; -1 and -2: no limit
    """
    if _is(params.get("top_k"), 0):
        yield "top_k", _ALL_TOKENS
    if _is(params.get("top_p"), 0):
        yield "top_p", LEAST_TOP_P
    if _is(params.get("max_new_tokens"), -1, -2):
        yield "max_new_tokens", None
    elif isinstance(body, Mapping) and _is(body.get("max_tokens"), 0):
        yield "max_new_tokens", 0


def _is(value: Any, *numbers: int) -> bool:
    """Whether a value is one of these numbers. JSON has no other type for them."""
    return type(value) in (int, float) and value in numbers
