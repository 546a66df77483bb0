"""`python -m sgl_ext.launch`: N SGLang engines with the extension, one balancer in front.

The main path: read the configuration, start every process, wait until all are
ready, keep them running, and on Ctrl-C or SIGTERM let running requests finish
before everything ends.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
from msgspec.structs import replace
from rich.console import Console

from sgl_ext.balancer.conversations.document_store import StoreUnusable, check_store
from sgl_ext.key_file import new_key
from sgl_ext.node import hardware
from sgl_ext.node.child import Child
from sgl_ext.node.ports import free_ports, require_free
from sgl_ext.node.progress import StartProgress, summary
from sgl_ext.settings.checks import read_api_key
from sgl_ext.settings.schema import LaunchSettings
from sgl_ext.settings.sources import launch_settings
from sgl_ext.settings.types import SettingsError

_POLL_S = 0.25
_ENGINE_PATIENCE_S = 20.0
_BACKOFF_S = (1.0, 60.0)
_LAST_LINES = 15
_OWN_KEY = "SGL_EXT_OPERATOR_KEY"
_STORE = "store.sqlite"


class StartError(Exception):
    """A process that did not come up; the message is for the person who started it."""


def main(argv: list[str] | None = None) -> None:
    """Starts a node and serves until told to stop. Raises SystemExit with a reason on failure."""
    try:
        refuse_foreign_packages()
        config = with_own_key(launch_settings(sys.argv[1:] if argv is None else argv))
        found = hardware.find_hardware()
        hardware.check_capacity(config, found)
        asyncio.run(serve(config, found, Console()))
    except (SettingsError, StartError, StoreUnusable) as error:
        raise SystemExit(f"sgl-ext: {error}") from None


async def serve(config: LaunchSettings, found: hardware.Hardware, console: Console) -> None:
    """The node's life, from the first process to the last."""
    stop = _stop_event()
    engines, balancer = make_children(config, found)
    try:
        for child in (balancer, *engines):
            await child.start()
        ready = asyncio.create_task(wait_until_ready(config, engines, balancer, console))
        await _first(ready, stop)
        if stop.is_set():
            return
        console.print(summary(config, engines, config.log_dir))
        roster = Roster(balancer.url, read_api_key(config.balancer.api_key))
        keepers = [asyncio.create_task(keep_running(balancer, console))]
        keepers += [asyncio.create_task(keep_running(e, console, roster)) for e in engines]
        await stop.wait()
        for keeper in keepers:
            keeper.cancel()
    finally:
        await drain(config, engines, balancer, console)


def with_own_key(config: LaunchSettings) -> LaunchSettings:
    """Where tenants have keys and the operator has none: a key that nobody but this node knows,
    with which the launcher tells the balancer of its engines."""
    balancer = config.balancer
    if balancer.keys is None or balancer.api_key is not None:
        return config
    os.environ[_OWN_KEY] = new_key()
    return replace(config, balancer=replace(balancer, api_key=f"env:{_OWN_KEY}"))


def make_children(config: LaunchSettings, found: hardware.Hardware) -> tuple[list[Child], Child]:
    """The processes of the node, none of them started yet."""
    logs = Path(config.log_dir)
    logs.mkdir(parents=True, exist_ok=True)
    require_free(config.balancer.host, config.balancer.port)
    settings = replace(config.balancer, store=config.balancer.store or str(logs / _STORE))
    check_store(settings.store, settings.store_limit_bytes)
    engines = []
    for index, port in enumerate(free_ports(config.balancer.port + 1, config.instances)):
        command = hardware.engine_command(config, port)
        command += [*hardware.platform_flags(found), *config.engine_args]
        environment = hardware.engine_environment(config, found, index)
        engines.append(_child(f"engine-{index}", command, environment, logs, f"127.0.0.1:{port}"))
    settings = replace(settings, workers=tuple(engine.url for engine in engines))
    command = [sys.executable, "-m", "sgl_ext.balancer.serve"]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.balancer.host, config.balancer.host)
    at = f"[{host}]" if ":" in host else host
    return engines, _child(
        "balancer", command, settings.to_environment(), logs, f"{at}:{config.balancer.port}"
    )


async def wait_until_ready(
    config: LaunchSettings, engines: list[Child], balancer: Child, console: Console
) -> None:
    """Returns once the balancer sees every engine ready. Raises StartError otherwise."""
    deadline = time.monotonic() + config.start_timeout_s
    waiting = {engine.url: engine for engine in engines}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
        with StartProgress(console, engines) as progress:
            while waiting:
                for child in (balancer, *engines):
                    if child.exit_code is not None:
                        raise _did_not_start(child, f"ended with exit code {child.exit_code}")
                if time.monotonic() > deadline:
                    late = next(iter(waiting.values()))
                    raise _did_not_start(late, f"was not ready in {config.start_timeout_s:g} s")
                await asyncio.sleep(_POLL_S)
                for url in await _ready_workers(session, balancer):
                    waiting.pop(url, None)
                progress.show(ready={e.name for e in engines if e.url not in waiting})


async def keep_running(child: Child, console: Console, roster: Roster | None = None) -> None:
    """Starts a child again whenever it ends, later each time it ends soon.

    With a roster, the balancer is told that it is away and that it is back.
    """
    shortest, longest = _BACKOFF_S
    backoff = shortest
    while True:
        started = time.monotonic()
        code = await child.wait()
        if roster is not None:
            await roster.left(child)
        backoff = shortest if time.monotonic() - started > longest else backoff
        console.print(
            f"{child.name} ended with exit code {code}; starting it again in {backoff:g} s. "
            f"Its log: {child.log}",
            highlight=False,
        )
        await asyncio.sleep(backoff)
        backoff = min(backoff * 2, longest)
        await child.start()
        if roster is not None:
            await roster.joined(child)


async def drain(
    config: LaunchSettings, engines: list[Child], balancer: Child, console: Console
) -> None:
    """The balancer takes nothing new and lets what runs finish; then the engines end."""
    if balancer.exit_code is None:
        console.print(f"stopping; running requests have {config.balancer.drain_s:g} s")
    await balancer.stop(config.balancer.drain_s + 5)
    await asyncio.gather(*(engine.stop(_ENGINE_PATIENCE_S) for engine in engines))


class Roster:
    """The balancer's list of workers, as its administration keeps it.

    A balancer that does not answer has just ended itself: it starts with all engines
    on its list, and finds out by its own probes which of them are there.
    """

    def __init__(self, balancer_url: str, key: str | None) -> None:
        self._url = f"{balancer_url}/sgl_ext/workers"
        self._headers = {} if key is None else {"authorization": f"Bearer {key}"}

    async def left(self, engine: Child) -> None:
        """Nothing is to be sent to an engine that has ended."""
        await self._say("DELETE", params={"url": engine.url})

    async def joined(self, engine: Child) -> None:
        """An engine starts, and may be sent requests as soon as it is ready."""
        await self._say("POST", json={"url": engine.url})

    async def _say(self, method: str, **what: Any) -> None:
        with suppress(aiohttp.ClientError, TimeoutError):
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=15)) as session,
                session.request(method, self._url, headers=self._headers, **what),
            ):
                pass


def refuse_foreign_packages() -> None:
    """Raises SettingsError if another distribution's `radix` or `scheduler` shadows ours."""
    import radix
    import scheduler

    home = Path(__file__).parent.parent
    for package in (radix, scheduler):
        where = Path(package.__path__[0])
        if where.parent != home:
            raise SettingsError(
                f"{package.__name__}={str(where)!r}: another distribution's package stands in "
                "front of sgl-ext's; install sgl-ext into an environment of its own"
            )


def _stop_event() -> asyncio.Event:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


async def _first(task: asyncio.Task[None], stop: asyncio.Event) -> None:
    """Waits for the task or for the stop, whichever comes first; the task's error is raised."""
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if task.done():
        task.result()
    else:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def _ready_workers(session: aiohttp.ClientSession, balancer: Child) -> list[str]:
    """The engines that the balancer would send a request to now."""
    try:
        async with session.get(f"{balancer.url}/health") as answer:
            workers = (await answer.json())["workers"]
    except (aiohttp.ClientError, TimeoutError):
        return []
    return [worker["url"] for worker in workers if worker["ready"]]


def _did_not_start(child: Child, what: str) -> StartError:
    lines = "\n".join(f"  {line}" for line in child.last_lines(_LAST_LINES))
    return StartError(f"{child.name} {what}. The end of its log ({child.log}):\n{lines}")


def _child(
    name: str, command: list[str], environment: dict[str, str], logs: Path, at: str
) -> Child:
    log = logs / f"{name}.log"
    log.unlink(missing_ok=True)
    return Child(name, command, environment, log, f"http://{at}")


if __name__ == "__main__":
    main()
