"""A zstd frame (RFC 8878), decoded in steps of a bounded size, as `zlib` does it for its formats.

A library decodes. It gives all that its input becomes at once, however much that is. So it gets its
input up to the end of one block at a time, which becomes 128 KiB at most. What a block becomes is
given in steps.

    frame   header, blocks, checksum
    block   3 bytes: whether it is the last, its kind, its size; then its content
"""

from typing import Final

import zstandard

from sgl_ext.balancer.http.chunked import MAX_SMALL_CHUNKS, MIN_CHUNK_BYTES

Error = zstandard.ZstdError
MAX_WINDOW_BYTES: Final = 8 << 20
"""What a decoder must be able to look back, and need not exceed (RFC 9659)."""
_MAX_HEADER_BYTES, _BLOCK_HEADER_BYTES, _CHECKSUM_BYTES = 18, 3, 4
_RLE = 1


class ZstdDecoder:
    """The decoder of one frame, with the interface of `zlib.decompressobj`.

    unconsumed_tail: input that waits for the next call. unused_data: what follows the frame.
    """

    def __init__(self) -> None:
        self._decoder = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES).decompressobj()
        self._head: bytearray | None = bytearray()
        self._header = bytearray()
        self._left = 0
        self._has_checksum = False
        self._blocks = self._arrived = 0
        self._made = memoryview(b"")
        self.unconsumed_tail: bytes | memoryview = b""
        self.unused_data = b""

    @property
    def eof(self) -> bool:
        """Whether the frame is complete, and all of it was given."""
        return self._decoder.eof and not self._made

    def decompress(self, data: bytes | bytearray | memoryview, max_length: int) -> memoryview:
        """The next bytes, at most so many. Raises Error if the data is no such frame."""
        view = memoryview(data)
        while view and not self._made and not self._decoder.eof:
            size = self._step(view)
            self._made = memoryview(self._decoder.decompress(view[:size]))
            view = view[size:]
        if self._decoder.eof and view:
            self.unused_data, view = bytes(view), view[:0]
        # A view of nothing would still forbid its owner to change.
        self.unconsumed_tail = view if view else b""
        given, self._made = self._made[:max_length], self._made[max_length:]
        return given

    def _step(self, view: memoryview) -> int:
        """How much of the input ends within or at the end of a block, or of the frame's header."""
        if self._head is not None:
            return self._read_head(view)
        if not self._left:
            size = min(_BLOCK_HEADER_BYTES - len(self._header), len(view))
            self._header += view[:size]
            if len(self._header) == _BLOCK_HEADER_BYTES:
                self._begin_block(int.from_bytes(self._header, "little"))
            return size
        size = min(self._left, len(view))
        self._left -= size
        self._arrived += size
        return size

    def _read_head(self, view: memoryview) -> int:
        """Takes one byte more of the frame's header, until it is complete."""
        assert self._head is not None
        self._head += view[:1]
        try:
            is_complete = len(self._head) >= zstandard.frame_header_size(self._head)
        except zstandard.ZstdError:
            if len(self._head) >= _MAX_HEADER_BYTES:
                raise
            is_complete = False
        if is_complete:
            self._has_checksum = zstandard.get_frame_parameters(self._head).has_checksum
            self._head = None
        return 1

    def _begin_block(self, header: int) -> None:
        self._header.clear()
        self._blocks += 1
        if self._blocks > MAX_SMALL_CHUNKS and self._blocks * MIN_CHUNK_BYTES > self._arrived:
            raise Error(f"its blocks are smaller than {MIN_CHUNK_BYTES} bytes on average")
        self._left = 1 if header >> 1 & 3 == _RLE else header >> 3
        if header & 1 and self._has_checksum:
            self._left += _CHECKSUM_BYTES
