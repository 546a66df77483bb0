"""A chain in a header: what the balancer has read of a body, the engine need not read again.

The balancer says it of the bytes that it sends, and never passes on what a client says by this
name. It counts only with the bytes, the path, the cache group and the rules that it was read by:
an engine that finds anything else reads the body itself. So it does for a very long prompt, whose
header a server might refuse.

    Base64 of   a check of all that, and of what follows: where the session's hash is, tools,
                tool_segments, head_segments; the end of each segment; the hash of each segment
"""

from __future__ import annotations

from array import array
from base64 import b64decode, b64encode
from collections.abc import Sequence
from struct import Struct
from typing import Any

import xxhash

from sgl_ext.requests.headers import HeaderStrip
from sgl_ext.requests.segments import Chain

HEADER = "x-sgl-ext-chain"
# 32 KB. A head may have 64 KB in most servers.
MOST_SEGMENTS = 1024
HASH_BYTES = 16
# To be raised whenever a chain of the same body becomes another one.
_VERSION = 1
_CHECK_BYTES = 8
_FIXED = Struct("<iIII")
_NO_SESSION = -1
_END_BYTES = 8


class PackedHashes(Sequence[int]):
    """Hashes as bytes, of which numbers are made when they are asked for."""

    __slots__ = ("data",)

    def __init__(self, data: bytes) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data) // HASH_BYTES

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            begin, end, step = at.indices(len(self))
            if step != 1:
                return tuple(self)[at]
            return PackedHashes(self.data[begin * HASH_BYTES : end * HASH_BYTES])
        begin = range(len(self))[at] * HASH_BYTES
        return int.from_bytes(self.data[begin : begin + HASH_BYTES], "big")

    def __contains__(self, segment: object) -> bool:
        if not isinstance(segment, int):
            return False
        told = segment.to_bytes(HASH_BYTES, "big")
        at = self.data.find(told)
        while at >= 0 and at % HASH_BYTES:  # the end of one and the beginning of the next
            at = self.data.find(told, at + 1)
        return at >= 0


def bytes_of(hashes: Sequence[int]) -> bytes:
    """Hashes as bytes, the highest of each first."""
    if isinstance(hashes, PackedHashes):
        return hashes.data
    return b"".join([segment.to_bytes(HASH_BYTES, "big") for segment in hashes])


class ChainHeader:
    """Writes and reads it, where bodies are read by these rules: what is stripped, and whether
    tools are put in order."""

    def __init__(self, strip: HeaderStrip, *, sort_tools: bool) -> None:
        rules = repr((_VERSION, strip.names, sort_tools)).encode()
        self._seed = xxhash.xxh3_64_intdigest(rules)

    def line(self, path: str, salt: bytes, body: bytes | bytearray, chain: Chain) -> bytes:
        """The header's line for `read_chain(path, ..., salt=salt)` of a body; empty if it has
        none, or one that is too long."""
        hashes, session = chain.hashes, chain.session
        if not hashes or len(hashes) > MOST_SEGMENTS:
            return b""
        fixed = _FIXED.pack(
            _NO_SESSION if session is None else hashes.index(session),
            chain.tools,
            chain.tool_segments,
            chain.head_segments,
        )
        told = b"".join((fixed, array("Q", chain.ends).tobytes(), bytes_of(hashes)))
        check = self._check(path, salt, body, told)
        return b"%b: %b\r\n" % (HEADER.encode(), b64encode(check + told))

    def read(self, value: str | None, path: str, salt: bytes, body: bytes) -> Chain | None:
        """The chain that a header tells of exactly this; None if it does not. Never raises."""
        if value is None:
            return None
        try:
            decoded = b64decode(value)
        except ValueError:
            return None
        check, told = decoded[:_CHECK_BYTES], decoded[_CHECK_BYTES:]
        count, rest = divmod(len(told) - _FIXED.size, _END_BYTES + HASH_BYTES)
        if count <= 0 or rest or check != self._check(path, salt, body, told):
            return None
        session, tools, tool_segments, head_segments = _FIXED.unpack_from(told)
        if not _NO_SESSION <= session < count:
            return None
        begin = _FIXED.size + count * _END_BYTES
        ends = array("Q", told[_FIXED.size : begin])
        hashes = PackedHashes(told[begin:])
        begun = None if session == _NO_SESSION else hashes[session]
        return Chain(hashes, ends, begun, tools, tool_segments, head_segments)

    def _check(self, path: str, salt: bytes, body: bytes | bytearray, told: bytes) -> bytes:
        asked = b"\n".join((path.encode("utf-8", "surrogatepass"), salt, told))
        return xxhash.xxh3_64_digest(body, xxhash.xxh3_64_intdigest(asked, self._seed))
