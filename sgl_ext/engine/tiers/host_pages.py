"""The bytes of a host pool's pages, as the parts in which they lie in its memory.

A page is written from there and read into there without a copy.
"""

from collections.abc import Iterator
from ctypes import c_ubyte
from functools import cache
from typing import Any

from sgl_ext.engine.sglang_types import HostPool, Tensor
from sgl_ext.settings.schema import SettingsError

# A subclass may have another layout.
_POOLS = ("MHATokenToKVPoolHost", "MLATokenToKVPoolHost")
_LAYOUTS = ("layer_first", "page_first", "page_first_direct")


class HostPages:
    """The pages of one host pool, each named by its first slot.

    tokens, bytes: of a page. form: what must be equal for one engine to read what another wrote.
    """

    def __init__(self, pool: HostPool) -> None:
        """Raises SettingsError for a pool whose pages lie in an unknown way."""
        kind = type(pool).__name__
        if kind not in _POOLS or pool.layout not in _LAYOUTS:
            known = f"engines share pages of {', '.join(_LAYOUTS)}, of {' and '.join(_POOLS)}"
            raise SettingsError(f"--hicache-mem-layout={pool.layout} of a {kind}: {known}")
        self._pool = pool
        self.tokens = pool.page_size
        self.bytes = sum(part.nbytes for part in self._parts(0))
        self.form = (
            *(kind, str(pool.dtype), self.tokens, self.bytes, pool.layout),
            *(pool.start_layer, pool.end_layer, pool.storage_format_tag),
        )

    def parts(self, slots: "Tensor") -> Iterator[list[memoryview]]:
        """The memory of each page that these slots make up."""
        for first in slots[:: self.tokens].tolist():
            yield self._parts(int(first))

    def _parts(self, first: int) -> list[memoryview]:
        slots = _Slots(range(first, first + self.tokens))
        addresses, sizes = self._pool.get_page_buffer_meta(slots)
        return [_memory(*part) for part in zip(addresses, sizes, strict=True)]


class _Slots(list[int]):
    """Slots in place of a tensor, of which the pool wants a list."""

    def tolist(self) -> list[int]:
        return self


@cache
def _block(size: int) -> Any:
    return c_ubyte * size


def _memory(address: int, size: int) -> memoryview:
    return memoryview(_block(size).from_address(address)).cast("B")
