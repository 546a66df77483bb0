"""Prefixes that the operator has all cache groups share, in a tree whose name spaces are whole.

A group's requests have a name space of their own in SGLang's tree, by their salt
(`sgl_ext.engine.core.isolation`). One that begins as a listed prompt does goes into the common
space instead, and there the first token behind what is listed is its group's alone:

    listed          t0 t1 t2 t3
    group "a"       t0 t1 t2 | t4' t5 t6        t4' stands for t4 and "a"
    group "b"       t0 t1 t2 | t4" t5 t6        t4" for t4 and "b"

A tree is walked from its root, so nothing behind the bar is anybody else's. How much of a prompt
is listed follows from its tokens alone, so two prompts of one group that go on alike behind it
have the bar at one place. The tree sees keys only: what a model computes is of the tokens.

Whoever makes a key of a request gives its salt, so the salt says where the bar is, and
`RadixKey.__init__` is the one place that reads it. A salt that begins with this engine's secret
is of no client: what a client sends stands behind its group, and the secret it cannot know.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sgl_ext.engine.core import acknowledgements
from sgl_ext.engine.core.counters import counter
from sgl_ext.engine.core.isolation import is_whole_group
from sgl_ext.engine.core.slices import is_slice

ALL = sys.maxsize
"""In place of a number of tokens: however many there are."""
_MARK = "sgl_ext-shared-"
# What makes of equal tokens other keys and values, or comes to stand where tokens are.
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
    """What is listed, as tokens, for each adapter (None: the model itself)."""

    def __init__(self) -> None:
        self._listed: dict[str | None, list[array[int]]] = {}

    def add(self, ids: Sequence[int], adapter: str | None = None) -> None:
        """Lists one more."""
        self._listed.setdefault(adapter, []).append(array("q", ids))

    def shared(self, ids: array[int], adapter: str | None = None) -> int:
        """With how many listed tokens a prompt begins."""
        most = 0
        for prefix in self._listed.get(adapter, ()):
            if prefix[most : most + 1] == ids[most : most + 1]:  # or it shares no more
                most = max(most, common_tokens(prefix, ids))
        return most


@cache
def prefixes() -> Prefixes:
    """Those of this engine, in its HTTP process."""
    return Prefixes()


def share(tokenized: Any, _: Any, asked: Any, *__: Any, **___: Any) -> None:
    """After `TokenizerManager._create_tokenized_object`: puts a group's request that begins with
    listed tokens behind these. Not one with a salt or key of the client's own, nor one that is
    of more than tokens: what it computes is not what others would."""
    salt = getattr(tokenized, "cache_salt", None)
    if salt is None or not is_whole_group(salt):
        return
    if tokenized.extra_key or tokenized.need_wait_for_mm_inputs or tokenized.input_ids is None:
        return
    if any(getattr(tokenized, field) is not None for field in _MORE_THAN_TOKENS):
        return
    tokens = prefixes().shared(tokenized.input_ids, asked.lora_path)
    if not tokens:
        return
    tokenized.cache_salt = shared_salt(salt, tokens)
    if not is_slice(tokenized):
        counter("shared_prefix_requests").inc()
        counter("shared_prefix_tokens").inc(tokens)


def common_tokens(one: array[int], other: array[int]) -> int:
    """With how many of the same tokens two prompts begin."""
    length = min(len(one), len(other))
    differs = _view(one, length) != _view(other, length)
    first = int(differs.argmax()) if length else 0
    return first if length and differs[first] else length


def shared_salt(salt: str, tokens: int) -> str:
    """The salt of a group's prompt that shares its first `tokens`."""
    return f"{_prefix()}{tokens}:{salt}"


def group_salt(salt: str) -> str | None:
    """The salt that a shared prompt's group gave it; None: it is none."""
    return _read(salt)[1] if _is_shared(salt) else None


def tokens_in_common(one: str | None, other: str | None) -> int:
    """How far two prompts with these salts are in one name space, if their tokens are equal."""
    if one == other:
        return ALL
    (one_tokens, one_group), (other_tokens, other_group) = _reach(one), _reach(other)
    is_one_groups = one_group is not None and one_group == other_group
    return ALL if is_one_groups else min(one_tokens, other_tokens)


def make_key(
    original: Callable[..., None],
    key: Any,
    token_ids: array[int],
    extra_key: str | None = None,
    is_bigram: bool = False,
    limit: int | None = None,
    cache_salt: str | None = None,
) -> None:
    """Around `RadixKey.__init__`: a key whose salt says that it is shared is made as told above."""
    if cache_salt is not None and _is_shared(cache_salt):
        tokens, own = _read(cache_salt)
        cache_salt = None
        if tokens < len(token_ids):
            token_ids = token_ids[:]  # the request's own, and not to be changed
            token_ids[tokens] = _groups_own(token_ids[tokens], own)
    original(key, token_ids, extra_key, is_bigram, limit, cache_salt)


@cache
def _prefix() -> str:
    # No client knows the folder's name.
    return f"{_MARK}{acknowledgements.folder().name}-"


def _is_shared(salt: str) -> bool:
    return salt.startswith(_MARK) and salt.startswith(_prefix())


def _reach(salt: str | None) -> tuple[int, str | None]:
    """Up to which token a prompt is in the common space, and whose of it from there on."""
    if salt is None:
        return ALL, None
    return _read(salt) if _is_shared(salt) else (0, None)


@lru_cache(maxsize=4096)
def _read(salt: str) -> tuple[int, str]:
    tokens, _, own = salt[len(_prefix()) :].partition(":")
    return int(tokens), own


def _groups_own(token: int, salt: str) -> int:
    """What stands for a token of one group: no token of a model, picture or client is negative
    there, and without the secret nobody can look for a second one that comes to the same."""
    told = b"%d:%b" % (token, salt.encode("utf-8", "surrogatepass"))
    secret = _prefix().encode()[-64:]
    digest = blake2b(told, digest_size=8, key=secret).digest()
    return -1 - (int.from_bytes(digest) >> 1)


def _view(tokens: array[int], length: int) -> NDArray[np.int64]:
    return np.frombuffer(tokens, dtype=np.int64, count=length)
