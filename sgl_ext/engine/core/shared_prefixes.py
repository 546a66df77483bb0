"""Prefixes that all cache groups share, in a tree where each group has a name space of its own.

A group's requests have their own name space in SGLang's tree, by their salt (`request_names.py`). A
request that begins like a prompt that the operator listed goes into the common name space instead.
There, the first token after the listed prefix is replaced by one that belongs to the group:

    listed          t0 t1 t2 t3
    group "a"       t0 t1 t2 | t4' t5 t6        t4' encodes t4 and "a"
    group "b"       t0 t1 t2 | t4" t5 t6        t4" encodes t4 and "b"

A lookup walks the tree from its root, so a group never reaches the tokens of another group after
the bar. The length of the listed prefix follows from a prompt's tokens alone, so two prompts of a
group that continue alike have the bar in the same place. Only the tree's keys change: the model
computes the original tokens.

Each key of a request is made with the request's salt, so the salt states where the bar is, and
`RadixKey.__init__` is the only place that reads it. A salt that begins with this engine's secret is
never a client's: a client's own salt is written after its group, and clients do not know the
secret.
"""

import sys
from array import array
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sgl_ext.engine.core.counters import counter
from sgl_ext.engine.core.folder import secret
from sgl_ext.engine.core.hints import is_slice
from sgl_ext.engine.core.request_names import is_whole_group

ALL = sys.maxsize
"""In place of a number of tokens: all of them."""
_MARK = "sgl_ext-shared-"
# With one of these, equal tokens do not mean equal keys and values.
_MORE_THAN_TOKENS = (
    "input_embeds",
    "mm_inputs",
    "token_type_ids",
    "positional_embed_overrides",
    "session_params",
    "num_items_assigned",
    "encoder_urls",
    "multi_item_delimiter_indices",
    "token_indices_to_pool",
)


class Prefixes:
    """The listed prompts as tokens, for each adapter (None: the model itself)."""

    def __init__(self) -> None:
        self._listed: dict[str | None, list[array[int]]] = {}

    def add(self, ids: Sequence[int], adapter: str | None = None) -> None:
        """Lists a prompt."""
        self._listed.setdefault(adapter, []).append(array("q", ids))

    def shared(self, ids: "array[int]", adapter: str | None = None) -> int:
        """The length of the longest listed prefix of a prompt, in tokens."""
        most = 0
        for prefix in self._listed.get(adapter, ()):
            if prefix[most : most + 1] == ids[most : most + 1]:  # or it shares no more
                most = max(most, common_tokens(prefix, ids))
        return most


@cache
def prefixes() -> Prefixes:
    """The listed prefixes of this engine, in its HTTP process."""
    return Prefixes()


def share(tokenized: Any, _: Any, asked: Any, *__: Any, **___: Any) -> None:
    """After `TokenizerManager._create_tokenized_object`: gives a group's request that begins with
    a listed prefix the salt that shares it. Not a request with its own salt or key, nor one with
    more than tokens: it computes something else. Slices have theirs by `salt_of_slices`."""
    salt = getattr(tokenized, "cache_salt", None)
    if salt is None or not is_whole_group(salt) or is_slice(tokenized):
        return
    if tokenized.extra_key or tokenized.need_wait_for_mm_inputs or tokenized.input_ids is None:
        return
    if any(getattr(tokenized, field) is not None for field in _MORE_THAN_TOKENS):
        return
    tokens = prefixes().shared(tokenized.input_ids, asked.lora_path)
    if not tokens:
        return
    tokenized.cache_salt = shared_salt(salt, tokens)
    counter("shared_prefix_requests").inc()
    counter("shared_prefix_tokens").inc(tokens)


def salt_of_slices(asked: Any, ids: "array[int]") -> str | None:
    """The salt for the slices of a prompt, which are sent without most of its tokens."""
    salt: str | None = asked.cache_salt
    if salt is None or not is_whole_group(salt) or asked.extra_key:
        return salt
    tokens = prefixes().shared(ids, asked.lora_path)
    return shared_salt(salt, tokens) if tokens else salt


def common_tokens(one: "array[int]", other: "array[int]", most: int = ALL) -> int:
    """The length of the common prefix of two prompts, in tokens; `most` of them are compared."""
    length = min(len(one), len(other), most)
    differs = _view(one, length) != _view(other, length)
    first = int(differs.argmax()) if length else 0
    return first if length and differs[first] else length


def shared_salt(salt: str, tokens: int) -> str:
    """The salt of a group's prompt that shares its first `tokens`."""
    return f"{secret(_MARK)}{tokens}:{salt}"


def group_salt(salt: str) -> str | None:
    """The group's salt within the salt of a shared prompt; None if the prompt is not shared."""
    return _read(salt)[1] if _is_shared(salt) else None


def tokens_in_common(one: str | None, other: str | None) -> int:
    """How many tokens two prompts with these salts share, if their tokens are equal."""
    if one == other:
        return ALL
    (one_tokens, one_group), (other_tokens, other_group) = _reach(one), _reach(other)
    is_one_groups = one_group is not None and one_group == other_group
    return ALL if is_one_groups else min(one_tokens, other_tokens)


def make_key(
    original: Callable[..., None],
    key: Any,
    token_ids: "array[int]",
    extra_key: str | None = None,
    is_bigram: bool = False,
    limit: int | None = None,
    cache_salt: str | None = None,
) -> None:
    """Around `RadixKey.__init__`: replaces the token after the bar if the salt states one."""
    if cache_salt is not None and _is_shared(cache_salt):
        tokens, own = _read(cache_salt)
        cache_salt = None
        if tokens < len(token_ids):
            token_ids = token_ids[:]  # a copy: the request keeps its tokens
            token_ids[tokens] = _groups_own(token_ids[tokens], own)
    original(key, token_ids, extra_key, is_bigram, limit, cache_salt)


def _is_shared(salt: str) -> bool:
    return salt.startswith(_MARK) and salt.startswith(secret(_MARK))


def _reach(salt: str | None) -> tuple[int, str | None]:
    """How many tokens of a prompt are in the common name space, and the group of the rest."""
    if salt is None:
        return ALL, None
    return _read(salt) if _is_shared(salt) else (0, None)


@lru_cache(maxsize=4096)
def _read(salt: str) -> tuple[int, str]:
    tokens, _, own = salt[len(secret(_MARK)) :].partition(":")
    return int(tokens), own


def _groups_own(token: int, salt: str) -> int:
    """The token of one group in place of `token`. It is negative, as no token of a model or a
    picture is; no client without the secret can compute an equal one."""
    text = b"%d:%b" % (token, salt.encode("utf-8", "surrogatepass"))
    digest = blake2b(text, digest_size=8, key=secret(_MARK).encode()[-64:]).digest()
    return -1 - (int.from_bytes(digest) >> 1)


def _view(tokens: "array[int]", length: int) -> NDArray[np.int64]:
    return np.frombuffer(tokens, dtype=np.int64, count=length)
