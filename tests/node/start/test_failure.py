"""What is shown of a log when its process failed."""

from __future__ import annotations

import sys
from pathlib import Path

from sgl_ext.node.child import Child
from sgl_ext.node.start.failure import failure, reason_of

SCHEDULER = """\
[2026-01-02 03:04:05] Load weight begin. avail mem=21.06 GB
[2026-01-02 03:04:06] Scheduler hit an exception: Traceback (most recent call last):
  File "scheduler.py", line 1, in run_scheduler_process
    scheduler = Scheduler(args)
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.25 GiB.
GPU 0 has a total capacity of 79 GiB.
[2026-01-02 03:04:06] Received sigquit from a child process.
Traceback (most recent call last):
  File "engine.py", line 9, in <module>
    main()
RuntimeError: Rank 0 scheduler died during initialization (exit code: -9).
""".splitlines()


def test_the_exception_of_the_process_that_failed_first_is_shown_with_a_hint() -> None:
    assert failure(SCHEDULER, 1) == [
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.25 GiB.",
        "GPU 0 has a total capacity of 79 GiB.",
        "Hint: lower mem-fraction-static or max-total-tokens, raise tp, or free memory.",
    ]


def test_a_chain_is_shown_with_its_cause() -> None:
    lines = """\
Traceback (most recent call last):
  File "a.py", line 1, in f
KeyError: 'foo'

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "a.py", line 3, in g
ValueError: Model architectures ['Foo'] are not supported for now.
""".splitlines()
    assert failure(lines, 1) == [
        "ValueError: Model architectures ['Foo'] are not supported for now.",
        "caused by KeyError: 'foo'",
        "Hint: this version of SGLang does not serve the model's architecture.",
    ]


def test_if_processes_only_say_that_another_failed_that_is_shown() -> None:
    assert failure(SCHEDULER[7:], 1) == [SCHEDULER[-1]]


def test_what_a_scheduler_of_ours_says_is_shown_and_not_that_it_ended() -> None:
    said = "sgl-ext: --nnodes 2: page_size is 1 on the first machine and 16 on another"
    assert failure([said, *SCHEDULER[6:]], 1) == [said]


def test_what_we_or_a_parser_say_without_a_traceback_is_shown() -> None:
    lines = ["a warning", "sgl-ext: --host 0.0.0.0: other machines can reach this address"]
    assert failure(lines, 1) == lines[1:]
    lines = ["noise", "usage: sglang serve [-h]", "sglang serve: error: bad flag"]
    assert failure(lines, 2) == lines[2:]


def test_a_process_that_was_killed_says_so_after_its_last_lines() -> None:
    lines = [f"line {number}" for number in range(100)]
    assert failure(lines, -9) == [
        *lines[-5:],
        "It was ended by SIGKILL: the system does so when memory runs out (dmesg).",
    ]


def test_a_long_message_is_cut() -> None:
    lines = ["Traceback (most recent call last):", "  File", "ValueError: " + "x" * 20_000]
    lines += [f"more {number}" for number in range(50)]
    shown = failure(lines, 1)
    assert len(shown) == 8
    assert max(map(len, shown)) < 500


async def test_only_the_latest_start_counts(tmp_path: Path) -> None:
    log = tmp_path / "engine-0.log"
    log.write_text("\n".join(SCHEDULER))
    code = "import sys; print('sgl-ext: no', flush=True); sys.exit(3)"
    child = Child("engine-0", [sys.executable, "-c", code], {}, log, "")
    await child.start()
    await child.wait()
    assert reason_of(child) == f"  sgl-ext: no\nIts whole log: {log}"


def test_host_memory_has_a_hint_of_its_own() -> None:
    lines = """\
Traceback (most recent call last):
  File "base.py", line 1, in _allocate_host_buffer
ValueError: Not enough host memory available. Requesting 200.00 GB but only have 61.00 GB free.
""".splitlines()
    assert failure(lines, 1)[-1].startswith("Hint: lower hicache-size or hicache-ratio")
