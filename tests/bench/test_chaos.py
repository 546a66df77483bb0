"""The judge of bench/chaos: what a client was told of an answer that failed, and when."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from bench.agents.client import Reply, send
from bench.agents.conversations import Turn
from bench.agents.judge import CHAT, MESSAGES, RESPONSES, outcome_of, read_answer
from bench.agents.mixed_load import Sent
from bench.faults.disk import Disk, disk
from bench.faults.effect import Effect
from bench.faults.growth import Growth
from bench.faults.tables import over_bound
from bench.faults.trial import figures
from sgl_ext.protocols.anthropic import ANTHROPIC
from sgl_ext.protocols.chat import CHAT as CHAT_PROTOCOL
from sgl_ext.protocols.responses import RESPONSES as RESPONSES_PROTOCOL

PROTOCOLS = {MESSAGES: ANTHROPIC, CHAT: CHAT_PROTOCOL, RESPONSES: RESPONSES_PROTOCOL}
BEGUN = {
    MESSAGES: b'event: message_start\ndata: {"type": "message_start", "message": {}}\n\n',
    CHAT: b'data: {"choices": [{"delta": {"content": "Hello"}}]}\n\n',
    RESPONSES: b'data: {"type": "response.output_text.delta", "delta": "Hello"}\n\n',
}
ENDS = {
    MESSAGES: b'event: message_stop\ndata: {"type": "message_stop"}\n\n',
    CHAT: b"data: [DONE]\n\n",
    RESPONSES: b'data: {"type": "response.completed", "response": {}}\n\n',
}


def reply(body: bytes = b"", *, status: int = 200, complete: bool = True, **headers: str) -> Reply:
    return Reply(status=status, body=body, is_complete=complete, headers=headers)


@pytest.mark.parametrize("path", PROTOCOLS)
def test_a_stream_is_whole_told_or_torn_in_each_protocol(path: str) -> None:
    def judged(body: bytes, *, complete: bool = True) -> str:
        return outcome_of(reply(body, complete=complete), path, streams=True, continues=False)

    begun, error = BEGUN[path], PROTOCOLS[path].errors.event("The engine stopped.", 3, "id")
    assert judged(begun + ENDS[path]) == "whole"
    assert judged(begun + ENDS[path], complete=False) == "torn"
    assert judged(begun) == "torn"
    assert judged(begun + error) == "told"
    assert judged(begun + error, complete=False) == "told"
    assert judged(begun + error[: len(error) // 2]) == "torn"


@pytest.mark.parametrize(
    ("got", "outcome"),
    [
        (reply(b'{"id": 1}'), "whole"),
        (reply(b'{"id": 1'), "torn"),
        (reply(b'{"id": 1}', complete=False), "torn"),
        (reply(status=0, complete=False), "lost"),
        (reply(b"{}", status=502), "lost"),
        (reply(b"{}", status=503), "lost"),
        (reply(b"{}", status=503, **{"retry-after": "5"}), "refused"),
        (reply(b"{}", status=529, **{"retry-after": "5"}), "refused"),
        (reply(b'{"code": "previous_response_not_found"}', status=400), "lost"),
    ],
)
def test_an_answer_without_a_stream(got: Reply, outcome: str) -> None:
    assert outcome_of(got, CHAT, streams=False, continues=False) == outcome


def test_a_turn_whose_history_is_not_stored_is_not_lost() -> None:
    unknown = reply(b'{"error": {"code": "previous_response_not_found"}}', status=400)
    assert outcome_of(unknown, RESPONSES, streams=True, continues=True) == "forgotten"


def test_what_an_answer_says_is_the_same_streamed_or_not() -> None:
    whole = {"choices": [{"message": {"content": "Hello"}, "finish_reason": "stop"}]}
    usage = {"usage": {"completion_tokens": 2}}
    streamed: list[dict[str, Any]] = [
        {"choices": [{"delta": {"content": "Hel"}}]},
        {"choices": [{"delta": {"content": "lo"}, "finish_reason": "stop"}]},
        {"choices": [], **usage},
    ]
    body = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in streamed)
    answer = read_answer(CHAT, body, streams=True)
    assert answer == read_answer(CHAT, json.dumps(whole | usage).encode(), streams=False)
    assert answer.content == ("Hello", "", "stop", 2)


Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Any]


async def asked(serve: Serve, leave_after_s: float | None = None) -> Reply:
    """What a client sees of a server."""
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        return await send(Reply(), url, CHAT, {}, {}, 30, leave_after_s)


def answering(data: bytes) -> Serve:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(data)
        await writer.drain()
        writer.close()

    return serve


_HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


async def test_the_client_knows_how_much_of_an_answer_came() -> None:
    whole = await asked(answering(_HEAD + b"2\r\nHi\r\n0\r\n\r\n"))
    assert (whole.status, whole.body, whole.is_complete, whole.failure) == (200, b"Hi", True, "")
    cut = await asked(answering(_HEAD + b"2\r\nHi\r\n"))
    assert (cut.status, cut.body, cut.is_complete) == (200, b"Hi", False)
    assert cut.first_byte_s is not None
    none = await asked(answering(b""))
    assert (none.status, none.first_byte_s, none.is_complete) == (0, None, False)
    assert none.failure


async def test_a_client_that_leaves_says_so() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()  # until the client is gone
        gone.set()
        writer.close()

    gone = asyncio.Event()
    left = await asked(serve, leave_after_s=0.01)
    await gone.wait()
    assert left.has_left
    assert outcome_of(left, CHAT, streams=True, continues=False) == "left"


def sent(outcome: Any, *, at_s: float = 10, waited_s: float = 1, wrong: bool = False) -> Sent:
    first = at_s + waited_s if outcome in ("whole", "told", "torn") else None
    got = Reply(sent_s=at_s, first_byte_s=first, ended_s=at_s + waited_s + 1)
    made = Sent(Turn("a turn", CHAT, {"stream": True}, {}), "", False, got, outcome)
    made.is_wrong = wrong
    return made


def test_the_figures_of_a_fault() -> None:
    effect = Effect(11.5, dies_with=lambda each: each.reply.sent_s == 5, hung_after_s=20)
    seen = [
        *(sent("whole"), sent("whole", wrong=True), sent("whole", waited_s=30), sent("left")),
        *(sent("told"), sent("torn"), sent("lost"), sent("refused"), sent("forgotten")),
        *(sent("torn", at_s=5), sent("lost", at_s=5), sent("whole", at_s=12)),
    ]
    found = figures(effect, seen, [sent("whole", wrong=True)])
    assert (found["lost_before_first_byte"], found["hung"]) == (3, 1)
    assert (found["cut_told"], found["torn"], found["died_with_process"]) == (1, 1, 2)
    assert (found["wrong_answers"], found["not_stored"], found["checked"]) == (2, 1, 1)
    assert (found["requests"], found["in_flight"]) == (12, 11)


_WRITER = """
import sys
for line in sys.stdin:
    try:
        open(sys.argv[1], "ab", buffering=0).write(b"x")
        print("written", flush=True)
    except OSError:
        print("refused", flush=True)
"""


def test_a_disk_is_full_for_a_process_without_a_file_system_of_its_own(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _WRITER, str(tmp_path / "file")]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, bufsize=1) as writer:
        assert writer.stdin is not None
        assert writer.stdout is not None
        folder, seen = Disk(tmp_path, is_mounted=False), list[str]()
        for change in (None, lambda: folder.fill([psutil.Process(writer.pid)]), folder.free):
            if change is not None:
                change()
            writer.stdin.write("\n")
            seen.append(writer.stdout.readline().strip())
            assert folder.is_full() is (seen[-1] == "refused")
    assert seen == ["written", "refused", "written"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts a file system")
def test_a_small_disk_is_filled_and_freed(tmp_path: Path) -> None:
    with disk(tmp_path / "disk") as made:
        if not made.is_mounted:
            pytest.skip("this root may not mount")
        seen = [made.is_full()]
        for change in (lambda: made.fill([]), made.free):
            change()
            seen.append(made.is_full())
        assert seen == [False, True, False]


def test_a_slope_leaves_out_the_warm_up() -> None:
    growth = Growth(warm_up_s=100)
    for at_s in range(0, 1000, 10):
        growth.add(at_s, {"flat": 5, "steps": at_s if at_s < 100 else 100, "grows": at_s / 36})
    found = growth.figures()
    assert [found[name]["slope_per_hour"] for name in ("flat", "steps", "grows")] == [0, 0, 100]
    assert (found["grows"]["first"], found["steps"]["largest"]) == (100 / 36, 100)


def test_a_table_over_its_bound_is_named() -> None:
    found = {"sgl_ext_worker_in_flight engine 0": 8, "pins": 9}
    limits = {"sgl_ext_worker_in_flight": 7, "pins": 9}
    assert list(over_bound(found, limits)) == ["sgl_ext_worker_in_flight engine 0: 8 of 7"]
