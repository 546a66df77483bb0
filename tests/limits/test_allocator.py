"""What a process gives back to the system when it frees large buffers."""

from __future__ import annotations

import subprocess
import sys

import pytest

# As bodies are, buffers grow. With glibc's defaults, each raises the size up to which freed memory
# is kept for the next one.
_CODE = r"""
import re
def own_kb():
    return int(re.search(r"RssAnon:\s+(\d+)", open("/proc/self/status").read())[1])
before = own_kb()
for size in (2, 4, 8, 16, 30):
    one = bytes(b"x" * (size << 20))
    del one
several = [b"x" * (12 << 20) for _ in range(4)]
del several
print(own_kb() - before)
"""
_OURS = "from sgl_ext.limits.allocator import return_freed_memory; return_freed_memory()\n"


def kept_kb(code: str) -> int:
    """What a process still has of the buffers that it freed."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_freed_buffers_leave_the_process() -> None:
    assert kept_kb(_CODE) > 2 * kept_kb(_OURS + _CODE)
