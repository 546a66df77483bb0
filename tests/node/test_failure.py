"""What is shown of a log when its process failed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from sgl_ext.node.child import Child
from sgl_ext.node.failure import failure, reason_of

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


TAKEN = """\
[2026-01-02 03:04:05] Load weight end.
[2026-01-02 03:04:06] [Errno 98] error while attempting to bind on address ('::1', 31001): in use
Traceback (most recent call last):
  File "http_server.py", line 9, in _freeze_gc_after_server_warmup
    requests.post(url + "/freeze_gc", timeout=HANG_S)
requests.exceptions.ReadTimeout: HTTPConnectionPool(host='127.0.0.1', port=31001): Read timed out.
""".splitlines()


def test_a_port_that_is_taken_is_the_cause_and_not_what_waits_for_the_server() -> None:
    for exit_code in (1, 3, None):
        shown = failure(TAKEN, exit_code)
        assert shown[0].startswith("[Errno 98] error while attempting to bind on address")
        assert shown[1].startswith("Hint: another process took the port meanwhile")
        assert not any("freeze_gc" in line or "Timeout" in line for line in shown)


def test_a_port_of_a_socket_is_named_too() -> None:
    lines = """\
Traceback (most recent call last):
  File "socket.py", line 1, in bind
OSError: [Errno 98] Address already in use
[2026-01-02 03:04:06] Received sigquit from a child process.
""".splitlines()
    assert failure(lines, 1)[0] == "[Errno 98] Address already in use"


REQUEST = """\
[2026-01-02 03:04:05] The server is fired up and ready to roll!
[2026-01-02 03:04:06] Error in preprocessing prompt inputs: Traceback (most recent call last):
  File "serving.py", line 1, in create
ValueError: a body of some client
[2026-01-02 03:04:07] Prefill batch, #new-seq: 1
[2026-01-02 03:04:08] INFO:     127.0.0.1:4 - "POST /v1/messages HTTP/1.1" 200 OK
""".splitlines()
KILLED = "It was ended by SIGKILL: the system does so when memory runs out (dmesg)."


def test_an_older_request_s_exception_is_not_why_an_engine_was_killed() -> None:
    shown = failure(REQUEST, -9)
    assert shown[-1] == KILLED
    assert shown[:-1] == REQUEST[-5:], "the last lines of its log"
    assert not failure(REQUEST[:-2], -9)[-1].startswith("It was ended")


def test_a_scheduler_s_own_exception_counts_although_others_still_answer() -> None:
    lines = [*REQUEST, *SCHEDULER[1:5], '[2026-01-02 03:04:09] "GET /ready HTTP/1.1" 200 OK']
    assert failure(lines, -9)[0].startswith("torch.OutOfMemoryError")


def test_of_an_engine_whose_process_was_killed_what_the_others_say_is_shown() -> None:
    lines = [*REQUEST, *SCHEDULER[7:]]
    assert failure(lines, 1)[0].startswith("RuntimeError: Rank 0 scheduler died")


CHILD_KILLED = """\
[2026-01-02 03:04:10] Subprocess detokenizer (pid=7639) crashed with exit code -9. Triggering SIGQUI
[2026-01-02 03:04:10] SIGQUIT received. signum=None, frame=None. It usually means one child failed.
[2026-01-02 03:04:10] kill_process_tree called: parent_pid=7376, include_parent=True, pid=7376
""".splitlines()
OF_CHILD = "Its detokenizer (process 7639) was ended by SIGKILL"


def test_an_engine_that_ends_itself_after_one_of_its_processes_names_that_process() -> None:
    shown = failure([*REQUEST, *CHILD_KILLED], -9)
    memory = "the system does so when memory runs out (dmesg)"
    assert shown == [f"{OF_CHILD}: {memory}.", "It ended its other processes then."]
    shown = failure([*REQUEST, *CHILD_KILLED], -9, is_memory_short=False)
    somebody = "by somebody, for the system has ended no process for memory meanwhile"
    assert shown[0] == f"{OF_CHILD}: {somebody}."
    aborted = [CHILD_KILLED[0].replace("detokenizer", "scheduler_0").replace("-9", "-6")]
    assert failure(aborted, -9)[0] == "Its scheduler_0 (process 7639) was ended by SIGABRT."
    left = [CHILD_KILLED[0].replace("-9", "1")]
    assert failure(left, -9)[0] == "Its detokenizer (process 7639) ended with exit code 1."


def test_a_scheduler_s_exception_counts_more_than_that_its_process_ended() -> None:
    shown = failure([*SCHEDULER[:5], *CHILD_KILLED], -9)
    assert shown[0].startswith("torch.OutOfMemoryError")


def test_memory_is_not_blamed_where_the_system_ended_no_process_for_it() -> None:
    assert failure(REQUEST, -9, is_memory_short=False)[-1] == (
        "It was ended by SIGKILL: by somebody, for the system has ended no process for memory "
        "meanwhile."
    )


async def test_a_child_knows_whether_memory_ran_out_since_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = [3, 3, 4, None]
    monkeypatch.setattr("sgl_ext.node.child.ended_for_memory", lambda: ended.pop(0))
    child = Child("engine-0", [sys.executable, "-c", ""], {}, tmp_path / "log", "")
    await child.start()
    assert [child.is_memory_short for _ in range(3)] == [False, True, True]
    await child.wait()
