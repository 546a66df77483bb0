"""Faults that leave every process alone: a flush, and a cut event feed."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import aiohttp
from sgl_ext_cpu.node import running_balancer

from bench.faults.effect import Effect, Scene, under_load
from bench.faults.feed_relay import FeedRelay
from bench.lib.script import require

_TIMEOUT = aiohttp.ClientTimeout(total=90)
_TRIES = 3
_IDLE_S = 5
_RETURNS_S = 30.0
_LOOK_S = 0.1
_EVENTS = re.compile(r"^sgl_ext_prefix_events_total\{.*\} (\S+)", re.MULTILINE)


@asynccontextmanager
async def flushed(scene: Scene) -> AsyncIterator[Effect]:
    """`/flush_cache` through the balancer. An engine flushes when it is idle: after some tries
    under load, new requests are held back."""
    await under_load(scene)
    effect, statuses = Effect(time.monotonic()), list[int]()
    async with aiohttp.ClientSession(timeout=_TIMEOUT) as http:
        for attempt in range(_TRIES):
            if attempt == _TRIES - 1:
                scene.load.open.clear()
            url, wait = f"{scene.target.url}/flush_cache", {"timeout": _IDLE_S * (attempt + 1)}
            async with http.post(url, params=wait) as answer:
                text = await answer.text()
                statuses.append(answer.status)
            if answer.status == 200:
                break
    scene.load.open.set()
    require(statuses[-1] == 200, "every engine was flushed", answer=text)
    effect.notes["statuses"] = statuses
    effect.ended_s = time.monotonic()
    yield effect


@asynccontextmanager
async def feed_cut(scene: Scene) -> AsyncIterator[Effect]:
    """The engines' prefix events do not reach the balancer, which here is one of its own before
    the node's engines: between them stand relays, which know the feed's connections."""
    old_url = scene.load.url
    async with AsyncExitStack() as stack:
        engines = scene.target.node.engines
        relays = [await stack.enter_async_context(FeedRelay(engine)) for engine in engines]
        urls = [relay.url for relay in relays]
        log = scene.target.folder / "relayed.log"
        starting = running_balancer(urls, log, "--store", ":memory:")
        balancer = await asyncio.to_thread(starting.__enter__)
        stack.callback(starting.__exit__, None, None, None)
        try:
            require(await _heard_more(balancer.url, 0), "engines send events through relays")
            scene.load.url = balancer.url
            await asyncio.sleep(1)
            await under_load(scene)
            for relay in relays:
                relay.cut()
            effect = Effect(time.monotonic())
            await asyncio.sleep(1)
            before = await _heard(balancer.url)
            await asyncio.sleep(scene.hold_s)
            more = await _heard(balancer.url) - before
            require(more == 0, "no engine's events reach the balancer", events=more)
            for relay in relays:
                relay.mend()
            effect.ended_s = time.monotonic()
            effect.notes["feed_returned"] = await _heard_more(balancer.url, before)
            effect.notes["feed_back_s"] = round(time.monotonic() - effect.ended_s, 1)
            yield effect
        finally:
            scene.load.url = old_url
            await scene.load.at_rest(_RETURNS_S, balancer.url)


async def _heard_more(url: str, than: float) -> bool:
    """Waits until the balancer has had more prefix events; false if it has none in time."""
    deadline = time.monotonic() + _RETURNS_S
    while time.monotonic() < deadline:
        if await _heard(url) > than:
            return True
        await asyncio.sleep(_LOOK_S)
    return False


async def _heard(url: str) -> float:
    """The prefix events that a balancer has had."""
    async with (
        aiohttp.ClientSession(timeout=_TIMEOUT) as http,
        http.get(f"{url}/metrics") as answer,
    ):
        return sum(map(float, _EVENTS.findall(await answer.text())))
