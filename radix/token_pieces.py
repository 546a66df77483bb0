"""Token ids of pieces of text, in an LRU cache bounded by bytes.

A piece's key is a hash of its text, and the ids that it finds replace that text in a prompt. So a
client must not be able to make two texts with the same hash. BLAKE2 (RFC 7693) with a random key
for each process ensures that; a hash that is only fast would not.
"""

import hashlib
import secrets
from array import array
from collections.abc import Sequence

from radix.byte_lru import ByteLRU

# The memory of a piece without its token ids: a digest, an array, and their slots in a table that
# may just have grown.
ENTRY_BYTES = 700
_DIGEST_BYTES = 16


class TokenPieces(ByteLRU["array[int]"]):
    """Token ids by the key of their piece, within `limit_bytes`."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(limit_bytes, ENTRY_BYTES)
        self._hash_key = secrets.token_bytes(32)

    def key(self, *texts: str) -> bytes:
        """The key of a piece that consists of these texts."""
        digest = hashlib.blake2b(digest_size=_DIGEST_BYTES, key=self._hash_key)
        for text in texts:
            data = text.encode("utf-8", "surrogatepass")
            digest.update(len(data).to_bytes(8, "little") + data)
        return digest.digest()

    def add_ids(self, key: bytes, ids: Sequence[int]) -> None:
        """Adds a piece's token ids, unless they alone exceed the bound."""
        added = array("q", ids)
        # Between arrays of many lengths, the allocator leaves up to a quarter unused.
        self.add(key, added, len(added) * added.itemsize * 5 // 4)
