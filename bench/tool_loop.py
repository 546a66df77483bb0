"""What does a tool loop of 20 calls cost over HTTP, with stored turns, and over a WebSocket?

    python -m bench.tool_loop [--codex PATH]

The engine answers at once, so that all of the time is the transport's and the balancer's. A client
sends 21 KB of tools with each turn, as Codex does, first a prompt of 20 KB, and then 4 KB of a
tool's result for each call:

    http         the whole conversation each time
    stored       only new items and `previous_response_id`, over HTTP; the balancer stores each turn
    websocket    the same over one WebSocket, with `store: false`

`--codex` is the command of Codex, which then runs the same loop, with and without WebSockets: from
its first request to its last. Figures are milliseconds for a whole loop, and the bytes that the
client sent.
"""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import requests
from sgl_ext_cpu.node import free_port, is_healthy, running_balancer, running_process

from bench.lib.engines import rotated
from bench.lib.script import Size, parser_of, require, run
from bench.lib.spread import spread

_CALLS = 20
_WAYS = ("http", "stored", "websocket")
_ROUNDS = {"full": 15, "quick": 5, "smallest": 1}
_TOOLS = [
    {
        "type": "function",
        "name": f"tool_{number}",
        "description": "word " * 500,
        "parameters": {"type": "object", "properties": {}},
    }
    for number in range(8)
]
_PROMPT, _RESULT = "word " * 4000, "line " * 800
_BASE: dict[str, Any] = {"model": "bench", "stream": True, "instructions": "Work.", "tools": _TOOLS}
_CONFIG = """
model = "bench"
model_provider = "bench"
[model_providers.bench]
name = "bench"
base_url = "{url}/v1"
wire_api = "responses"
supports_websockets = {websockets}
[analytics]
enabled = false
"""
_CODEX_TIMEOUT_S = 120.0

_Json = dict[str, Any]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--codex", type=Path)
    given = parser.parse_args()
    run("tool_loop", partial(compare, given.size, given.codex))


def compare(size: Size, codex: Path | None) -> dict[str, object]:
    """The figures of each way."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        engine = f"http://127.0.0.1:{free_port()}"
        command = [sys.executable, "-m", "bench.lib.tool_caller"]
        command += [engine.rpartition(":")[2], str(_CALLS)]
        healthy = partial(is_healthy, engine)
        stack.enter_context(running_process(command, folder / "engine.log", healthy))
        balancer = stack.enter_context(running_balancer([engine], folder / "balancer.log"))
        figures = asyncio.run(_client_figures(balancer.url, _ROUNDS[size]))
        if codex is not None:
            figures |= _codex_figures(codex, engine, balancer.url, folder, _ROUNDS[size])
        return figures


async def _client_figures(url: str, rounds: int) -> dict[str, object]:
    times: dict[str, list[float]] = defaultdict(list)
    sent: dict[str, int] = {}
    async with aiohttp.ClientSession(url) as session:
        for number in range(rounds + 1):
            for way in rotated(_WAYS, number):
                begun_s = time.perf_counter()
                sent[way] = await _loop(session, way)
                if number:  # the first round warms up
                    times[way].append((time.perf_counter() - begun_s) * 1e3)
    return {way: {"loop_ms": spread(times[way], 1), "sent_bytes": sent[way]} for way in _WAYS}


async def _loop(session: aiohttp.ClientSession, way: str) -> int:
    """Runs the loop, and returns how many bytes of messages or bodies were sent."""
    socket = await session.ws_connect("/v1/responses") if way == "websocket" else None
    items: list[_Json] = [{"role": "user", "content": _PROMPT}]
    body: _Json = {**_BASE, "store": way == "stored", "input": items}
    sent = calls = 0
    while True:
        if socket is not None:
            data = orjson.dumps({"type": "response.create", **body})
            await socket.send_str(data.decode())
            response = await _last([m async for m in _messages(socket)])
        else:
            data = orjson.dumps(body)
            headers = {"content-type": "application/json"}
            async with session.post("/v1/responses", data=data, headers=headers) as answer:
                events = (await answer.read()).split(b"\n\n")
                response = await _last([event.partition(b"data: ")[2] for event in events])
        sent += len(data)
        (item,) = response["output"]
        if item["type"] != "function_call":
            break
        calls += 1
        result = {"type": "function_call_output", "call_id": item["call_id"], "output": _RESULT}
        items += [item, result]
        if way != "http":
            body |= {"input": [result], "previous_response_id": response["id"]}
    if socket is not None:
        await socket.close()
    require(calls == _CALLS, "every call was made", way=way, calls=calls)
    return sent


async def _messages(socket: aiohttp.ClientWebSocketResponse) -> Any:
    async for message in socket:
        yield message.data.encode()
        if '"response.completed"' in message.data[:60] or '"error"' in message.data[:60]:
            return


async def _last(events: list[bytes]) -> _Json:
    completed = [event for event in events if b'"response.completed"' in event[:60]]
    require(bool(completed), "each response is complete", events=events[-1:])
    response: _Json = orjson.loads(completed[0])["response"]
    return response


def _codex_figures(
    codex: Path, engine: str, url: str, folder: Path, rounds: int
) -> dict[str, object]:
    times: dict[str, list[float]] = defaultdict(list)
    for number, websockets in _turns(rounds):
        home = folder / f"{number}-{websockets}"
        (home / ".codex").mkdir(parents=True)
        (home / "work").mkdir()
        config = _CONFIG.format(url=url, websockets=json.dumps(websockets))
        (home / ".codex" / "config.toml").write_text(config)
        command = [str(codex), "exec", "--skip-git-repo-check"]
        command += ["--dangerously-bypass-approvals-and-sandbox", "Work."]
        requests.get(f"{engine}/seen", timeout=10)
        done = subprocess.run(
            command,
            cwd=home / "work",
            env={"HOME": str(home), "PATH": os.environ["PATH"]},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_CODEX_TIMEOUT_S,
            check=False,
        )
        require(done.returncode == 0, "Codex ends well", error=done.stderr[-500:])
        seen = requests.get(f"{engine}/seen", timeout=10).json()
        name = "codex_websocket" if websockets else "codex_http"
        times[name].append((seen["latest_s"] - seen["first_s"]) * 1e3)
    return {name: {"loop_ms": spread(found, 1)} for name, found in times.items()}


def _turns(rounds: int) -> Iterator[tuple[int, bool]]:
    for number in range(rounds):
        yield from ((number, False), (number, True))


if __name__ == "__main__":
    main()
