"""Tokens of pieces of text, the most recently used of them, within a bound of bytes.

A piece is known by a hash that whoever writes a prompt cannot make alike for two of them: what
is found here stands for text in a prompt, and must be that of this very text. So the hash is
BLAKE2 (RFC 7693) under a key of this process's own, and not one that is only fast.
"""

from __future__ import annotations

import hashlib
import secrets
from array import array
from collections.abc import Sequence

from radix.byte_lru import Parts

# What a piece takes beside its tokens: a digest, the array, and their place in the table, with
# the room that a table wants while it grows. Between arrays of all lengths, an allocator leaves
# up to a quarter unused.
ENTRY_BYTES = 700
_DIGEST_BYTES = 16


class Pieces:
    """Tokens by piece. Of more than `limit_bytes`, what was not used for longest is forgotten.

    Several threads may use it at once.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._key = secrets.token_bytes(32)
        self._known: Parts[array[int]] = Parts(limit_bytes, ENTRY_BYTES)

    def __len__(self) -> int:
        return len(self._known)

    def name(self, *texts: str) -> bytes:
        """What a piece is known by, whose parts these are."""
        digest = hashlib.blake2b(digest_size=_DIGEST_BYTES, key=self._key)
        for text in texts:
            data = text.encode("utf-8", "surrogatepass")
            digest.update(len(data).to_bytes(8, "little") + data)
        return digest.digest()

    def find(self, name: bytes) -> array[int] | None:
        """A piece's tokens, if they are known."""
        return self._known.find(name)

    def keep(self, name: bytes, tokens: Sequence[int]) -> None:
        """Remembers a piece's tokens, unless they alone are more than the bound."""
        kept = array("q", tokens)
        self._known.keep(name, kept, len(kept) * kept.itemsize * 5 // 4)

    def clear(self) -> None:
        """Forgets all."""
        self._known.clear()

    def check(self) -> None:
        """Asserts that what is counted is what is there, and within the bound."""
        self._known.check()
