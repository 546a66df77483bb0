"""Settings of the C library's allocator."""

import ctypes

# From <malloc.h>.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
# Smaller buffers, which most bodies need, are used again without a call of the system.
_SMALL_BYTES = 1024 * 1024
_KEPT_BYTES = 16 * 1024 * 1024


def return_freed_memory() -> None:
    """Lets the process give the memory of large buffers back to the system when they are freed.

    With glibc's defaults, each large buffer raises the limits under which freed memory is kept:
    up to 64 MB. Does nothing where the C library has no such settings.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _SMALL_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
