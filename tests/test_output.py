"""What a process prints holds it up no more than it ends it."""

from __future__ import annotations

import io
import os

from sgl_ext.output import LossyStream


def test_a_pipe_that_nobody_reads_takes_what_fits_and_then_more_once_it_is_read() -> None:
    read, write = os.pipe()
    with os.fdopen(write, "w") as pipe:
        stream = LossyStream(pipe)
        for _ in range(200):  # 200 KB, and a pipe holds 64 KiB
            stream.write("x" * 1000)
            stream.flush()
        os.read(read, 1 << 20)
        stream.write("the end\n")
        stream.flush()
        assert os.read(read, 1 << 20).endswith(b"the end\n")
    os.close(read)


def test_what_is_no_file_of_the_system_is_written() -> None:
    file = io.StringIO()
    LossyStream(file).write("a line")
    assert file.getvalue() == "a line"
