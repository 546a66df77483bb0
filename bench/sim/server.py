"""Simulated engines with SGLang's HTTP API: a port each, all in one process.

    python -m bench.sim.server --port 30001 --port 30002 --plugin

Stock engines by default. With `--plugin` they strip billing headers and publish
their segments at `/sgl_ext/events`, as engines with our plugin do. `/sim/figures`
says what an engine has computed. Chat completions and `/generate` are served,
streamed or whole; every other POST is 404. A client that leaves frees nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import orjson
import uvloop
from aiohttp import web

from bench.sim.engine import EngineConfig, Request
from bench.sim.live_engine import Live, TooLong
from bench.trace.calls import CHAT, MODEL
from sgl_ext.process import end_with_parent
from sgl_ext.wire.events import EVENTS_PATH

_GENERATE = "/generate"
_FIRST_BYTES = 8


LIVE = web.AppKey("live", Live)


async def generate(request: web.Request) -> web.StreamResponse:
    """Both protocols, streamed and whole."""
    live, path = request.app[LIVE], request.path
    try:
        body = orjson.loads(await request.read())
        job, answer = live.read(path, body)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        document = {"error": {"message": f"{error!r}", "code": 400}}
        return web.json_response(document, status=400)
    steps = live.generate(job)
    try:
        await anext(steps)
    except TooLong:
        document = {"error": {"message": "The prompt is longer than the memory.", "code": 400}}
        return web.json_response(document, status=400)
    shape = _chat_chunk if path == CHAT else _generate_chunk
    if not body.get("stream"):
        await anext(steps)
        whole = shape(job, answer, "", whole=True, last=True)
        return web.Response(body=orjson.dumps(whole), content_type="application/json")
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    first, rest = answer[:_FIRST_BYTES], answer[_FIRST_BYTES:]
    await response.write(_event(shape(job, first, first, whole=False, last=False)))
    await anext(steps)
    await response.write(
        _event(shape(job, rest, answer, whole=False, last=True)) + b"data: [DONE]\n\n"
    )
    return response


def _event(document: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(document) + b"\n\n"


def _chat_chunk(job: Request, text: str, _: str, *, whole: bool, last: bool) -> dict[str, Any]:
    part = {"role": "assistant", "content": text}
    choice = {"index": 0, "finish_reason": "length" if last else None}
    chunk: dict[str, Any] = {
        "id": f"{id(job):x}",
        "object": "chat.completion" if whole else "chat.completion.chunk",
        "created": 0,
        "model": MODEL,
        "choices": [{**choice, "message" if whole else "delta": part}],
    }
    if last:
        chunk["usage"] = {
            "prompt_tokens": job.prompt_tokens,
            "completion_tokens": job.output_tokens,
            "total_tokens": job.prompt_tokens + job.output_tokens,
            "prompt_tokens_details": {"cached_tokens": job.cached_tokens},
        }
    return chunk


def _generate_chunk(
    job: Request, text: str, so_far: str, *, whole: bool, last: bool
) -> dict[str, Any]:
    meta = {
        "id": f"{id(job):x}",
        "prompt_tokens": job.prompt_tokens,
        "completion_tokens": job.output_tokens if last else 1,
        "cached_tokens": job.cached_tokens,
        "finish_reason": {"type": "length", "length": job.output_tokens} if last else None,
    }
    return {"text": text if whole else so_far, "output_ids": [], "meta_info": meta}


async def healthy(_: web.Request) -> web.Response:
    return web.Response()


async def models(_: web.Request) -> web.Response:
    card = {"id": MODEL, "object": "model", "owned_by": "sglang", "max_model_len": 200_000}
    return web.json_response({"object": "list", "data": [{**card, "root": MODEL}]})


async def model_info(_: web.Request) -> web.Response:
    names = ("model_path", "served_model_name", "tokenizer_path")
    return web.json_response({**dict.fromkeys(names, MODEL), "is_generation": True})


async def server_info(request: web.Request) -> web.Response:
    config = request.app[LIVE].engine.config
    names = ("model_path", "served_model_name", "tokenizer_path", "model_id")
    sizes = {"max_total_num_tokens": int(config.capacity_tokens), "tp_size": 1, "dp_size": 1}
    more = {"max_running_requests": config.max_running, "version": "0.5.23", "page_size": 64}
    return web.json_response({**dict.fromkeys(names, MODEL), **sizes, **more})


async def loads(request: web.Request) -> web.Response:
    load = request.app[LIVE].engine.load
    document = {
        "dp_rank": 0,
        "num_running_reqs": load.running,
        "num_waiting_reqs": load.queued,
        "num_total_reqs": load.running + load.queued,
        "num_used_tokens": load.used_tokens,
        "num_total_tokens": load.used_tokens + load.pending_tokens,
        "max_total_num_tokens": int(load.capacity_tokens),
        "token_usage": load.used_tokens / load.capacity_tokens,
        "gen_throughput": 0.0,
    }
    return web.json_response({"version": "0.5.23", "dp_rank_count": 1, "loads": [document]})


async def metrics(request: web.Request) -> web.Response:
    load = request.app[LIVE].engine.load
    usage = load.used_tokens / load.capacity_tokens
    return web.Response(
        text=f"sglang:num_running_reqs {load.running}\nsglang:num_queue_reqs {load.queued}\n"
        f"sglang:token_usage {usage}\n"
    )


async def flush_cache(request: web.Request) -> web.Response:
    request.app[LIVE].flush()
    return web.Response(text="Cache flushed.\n")


async def figures(request: web.Request) -> web.Response:
    live = request.app[LIVE]
    names = ("prompt_tokens", "cached_tokens", "output_tokens")
    engine: dict[str, Any] = {"prefill_s": live.engine.prefill_s, "requests": live.engine.finished}
    engine["arrivals"] = live.arrivals
    return web.json_response({**{name: getattr(live, name) for name in names}, **engine})


async def events(request: web.Request) -> web.StreamResponse:
    """The prefix events of the plugin: a snapshot, then what changes."""
    response = web.StreamResponse(headers={"content-type": "application/x-ndjson"})
    await response.prepare(request)
    async for lines in request.app[LIVE].publisher.follow():
        await response.write(lines)
    return response


def make_app(live: Live) -> web.Application:
    app = web.Application(client_max_size=1 << 28)
    app[LIVE] = live
    get = app.router.add_get
    for path in ("/health", "/health_generate", "/ready"):
        get(path, healthy)
    for path in ("/model_info", "/get_model_info"):
        get(path, model_info)
    for path in ("/server_info", "/get_server_info"):
        get(path, server_info)
    for path in ("/get_load", "/v1/loads"):
        get(path, loads)
    get("/v1/models", models)
    get("/metrics", metrics)
    get("/sim/figures", figures)
    if live.plugin:
        get(EVENTS_PATH, events)
    app.router.add_route("*", "/flush_cache", flush_cache)
    for path in (CHAT, _GENERATE):
        app.router.add_post(path, generate)
    return app


async def serve(ports: Sequence[int], config: EngineConfig, *, plugin: bool) -> None:
    """Serves until cancelled; says so on standard output once it listens."""
    for port in ports:
        runner = web.AppRunner(make_app(Live(config, plugin=plugin)), access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
    print(json.dumps({"ports": list(ports)}), flush=True)
    await asyncio.Event().wait()


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, action="append", required=True, help="repeat")
    parser.add_argument("--plugin", action="store_true", help="strip, and publish segments")
    config = EngineConfig()
    for name, value in asdict(config).items():
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=type(value), default=argparse.SUPPRESS)
    flags = vars(parser.parse_args(argv))
    ports, plugin = flags.pop("port"), flags.pop("plugin")
    uvloop.run(serve(ports, replace(config, **flags), plugin=plugin))


if __name__ == "__main__":
    end_with_parent()
    main(sys.argv[1:])
