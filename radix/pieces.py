"""Tokens of pieces of text, the most recently used of them, within a bound of bytes.

A piece is known by a hash that whoever writes a prompt cannot make alike for two of them: what
is found here stands for text in a prompt, and must be that of this very text. So the hash is
BLAKE2 (RFC 7693) under a key of this process's own, and not one that is only fast.
"""

from __future__ import annotations

import hashlib
import secrets
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock

# What a piece takes beside its tokens: a digest, the array, and their place in the table.
ENTRY_BYTES = 300
_DIGEST_BYTES = 16


class Pieces:
    """Tokens by piece. Of more than `limit_bytes`, what was not used for longest is forgotten.

    Several threads may use it at once.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._key = secrets.token_bytes(32)
        self._tokens: OrderedDict[bytes, array[int]] = OrderedDict()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._tokens)

    def name(self, *texts: str) -> bytes:
        """What a piece is known by, whose parts these are."""
        digest = hashlib.blake2b(digest_size=_DIGEST_BYTES, key=self._key)
        for text in texts:
            data = text.encode("utf-8", "surrogatepass")
            digest.update(len(data).to_bytes(8, "little") + data)
        return digest.digest()

    def find(self, name: bytes) -> array[int] | None:
        """A piece's tokens, if they are known."""
        with self._lock:
            found = self._tokens.get(name)
            if found is not None:
                self._tokens.move_to_end(name)
        return found

    def keep(self, name: bytes, tokens: Sequence[int]) -> None:
        """Remembers a piece's tokens, unless they alone are more than the bound."""
        kept = array("I", tokens)
        size = _size(kept)
        if size > self.limit_bytes:
            return
        with self._lock:
            if name in self._tokens:
                return
            self._tokens[name] = kept
            self.used_bytes += size
            while self.used_bytes > self.limit_bytes:
                _, gone = self._tokens.popitem(last=False)
                self.used_bytes -= _size(gone)

    def clear(self) -> None:
        """Forgets all."""
        with self._lock:
            self._tokens.clear()
            self.used_bytes = 0

    def check(self) -> None:
        """Asserts that what is counted is what is there, and within the bound."""
        assert self.used_bytes == sum(map(_size, self._tokens.values())) <= self.limit_bytes


def _size(tokens: array[int]) -> int:
    return ENTRY_BYTES + len(tokens) * tokens.itemsize
