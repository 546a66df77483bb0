"""`python -m sgl_ext.launch`: N SGLang engines with the extension and one balancer in front.

The main path: read the settings, start every process, wait until all are ready, keep them
running, and on Ctrl-C or SIGTERM let running requests finish before the processes end. A second
signal ends them at once.
"""

import asyncio
import logging
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, Any, cast

import aiohttp
from rich.console import Console

from sgl_ext.balancer.reporting.event_log import EventLog
from sgl_ext.balancer.store.documents import StoreUnusable
from sgl_ext.node import hardware
from sgl_ext.node.checks import check_restart, check_start, open_shared_tier
from sgl_ext.node.child import FLEET, READY, Child, stage_of
from sgl_ext.node.children import Engine, events_path, make_children
from sgl_ext.node.control import Control, socket_path
from sgl_ext.node.failure import reason_of
from sgl_ext.node.flags import check_given_flags, why_one_start
from sgl_ext.node.in_effect import SettingsInEffect
from sgl_ext.node.keepers import (
    HUNG_LOOK_S,
    OWN_TLS,
    EngineCalls,
    HungEngines,
    Keepers,
    end_at_once,
)
from sgl_ext.node.log_dir import Operator, begin_log, launcher_log, locked, rotated
from sgl_ext.node.progress import start_progress, summary
from sgl_ext.node.reloads import Reloads, live_settings
from sgl_ext.node.restarts import Replacement, Restarts, store_limit_s
from sgl_ext.process import ENGINE_FOLDERS, LossyStream, hold_hangups, on_hangup, remove_stale
from sgl_ext.settings.fields import launch_flags
from sgl_ext.settings.schema import LaunchSettings, SettingsError, Unavailable
from sgl_ext.settings.sources import (
    config_of,
    launch_settings,
    names_file,
    sourced_settings,
)
from sgl_ext.supervision import supervise

log = logging.getLogger(__name__)

_POLL_S = 0.25
_ENGINE_STOP_S = 20.0, 0.0
# Actors stop their engines; in a hurry they are killed.
_FLEET_STOP_S = 80.0, 20.0
_HURRIED_STOP_S = 3.0
_LIST_S = 0.25
_EVENTS_S = 1.0
_ROTATE_S = 5.0
_LAST_LINES = 20
_SAID = "sgl-ext: "
WRONG_COMMAND = 2


class StartError(Exception):
    """A process did not start. The message is for the person who started the node."""


def main(argv: list[str] | None = None) -> None:
    """Runs a node until SIGTERM or Ctrl-C. Raises SystemExit with its exit code: 2 if the command
    line, the file or the model's folder is wrong, which no second start changes; 1 for any other
    failure."""
    # A terminal that closes ends nothing. The node's processes inherit this.
    hold_hangups()
    argv = sys.argv[1:] if argv is None else argv
    try:
        try:
            reject_foreign_packages()
            settings = launch_settings(argv)
            for one in settings.of_models:
                check_given_flags(one.engine_args, argv, config_of(argv), launch_flags())
            found, notes = check_start(settings)
        except SettingsError as error:
            say_error(error)
            raise SystemExit(1 if isinstance(error, Unavailable) else WRONG_COMMAND) from None
        console = Console(file=cast(IO[str], LossyStream(sys.stdout)))
        with locked(Path(settings.log_dir)):
            read = partial(launch_settings, argv) if names_file(argv) else None
            sources = partial(sourced_settings, argv)
            say = begin_log(settings, console)
            for note in notes:
                say(note)
            open_shared_tier(settings)
            try:
                asyncio.run(serve(settings, found, console, say, read, sources))
            except _FAILURES as error:
                log.error("the node ends: %s", error)
                raise
    except _FAILURES as error:
        say_error(error)
        raise SystemExit(1) from None
    finally:
        # Engines that were killed could not do so.
        remove_stale(ENGINE_FOLDERS)


_FAILURES = (SettingsError, StartError, StoreUnusable)


def say_error(error: Exception) -> None:
    """Prints why a node does not start, or ends."""
    print(f"sgl-ext serve: {error}", file=sys.stderr)


async def serve(
    settings: LaunchSettings,
    found: hardware.Hardware | None,
    console: Console,
    say: Operator,
    read: Callable[[], LaunchSettings] | None = None,
    sources: Callable[[], tuple[LaunchSettings, Mapping[str, str]]] | None = None,
) -> None:
    """Starts all processes, keeps them running, and stops them.

    found: None if the engines run on Ray; in place of them there is the process that keeps them.
    read: reads the settings again; None if there is no file. sources: as of SettingsInEffect.
    say: tells the operator.
    """
    stop, hurry = asyncio.Event(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(
            number, lambda: (hurry if stop.is_set() else stop).set()
        )
    socket = socket_path(Path(settings.log_dir))
    engines, balancer, listed = make_children(settings, found, socket)
    listed.update()
    events = EventLog(events_path(Path(settings.log_dir)))
    keepers = Keepers(say, events)
    has_served = False
    live = live_settings(settings, read)
    in_effect = SettingsInEffect(live, engines, sources or (lambda: (settings, {})))
    await asyncio.to_thread(in_effect.write)
    reloads = Reloads(live, engines, say, say.error, events)
    control = Control(socket, engines, _why_no_restarts(settings))
    control.reload = reloads.reload
    on_hangup(partial(asyncio.get_running_loop().call_soon_threadsafe, reloads.begin))
    try:
        await control.start()
        for child in (balancer, *engines):
            await child.start()
            log.info("process started", extra={"process_name": child.name, "log": str(child.log)})
        await _unless_stopped(wait_until_ready(settings, engines, balancer, console), stop)
        if stop.is_set():
            say("the start is cancelled")
            return
        console.print(summary(settings, engines, balancer.url))
        has_served = True
        events.add("started", "node", f"{settings.model_name}, {len(engines)} engines")
        log.info("serving", extra={"url": balancer.url})
        logs = [launcher_log(settings), *(child.log for child in (balancer, *engines))]
        rotate = partial(_rotate, logs, settings.log_limit_bytes, say)
        works: list[tuple[str, Callable[[], Awaitable[None] | None], float]] = [
            ("the list of engines", listed.update, _LIST_S),
            ("the rotation of logs", rotate, _ROTATE_S),
            ("the file of settings", partial(asyncio.to_thread, in_effect.write), _EVENTS_S),
            ("the log of events", partial(asyncio.to_thread, events.write), _EVENTS_S),
        ]
        # The launcher has no metrics; its log has the reason of a failure.
        own = [engine for engine in engines if isinstance(engine, Engine)]
        calls = EngineCalls(balancer.url, settings.balancer.engine_secret)
        hung = HungEngines(own, listed, calls, say, end_at_once)
        works.append(("the end of engines that hang", hung.look, HUNG_LOOK_S))
        tasks = [
            asyncio.create_task(supervise(name, lambda task: None, work, pause_s))
            for name, work, pause_s in works
        ]
        for child in (balancer, *engines):
            keepers.resume(child)
        replacement = Replacement(settings, own, listed, keepers, calls, say, events=events)
        control.restarts = Restarts(replacement, _check_engine)
        await stop.wait()
        events.add("stopping", "node")
        for task in tasks:
            task.cancel()
    finally:
        await control.stop()
        keepers.end()
        with suppress(OSError):
            await asyncio.to_thread(events.write)
        limits = _ENGINE_STOP_S if found is not None else _FLEET_STOP_S
        if settings.disk_tier is not None:
            limits = limits[0] + store_limit_s(live.current), limits[1]
        await drain(
            live.current.balancer.drain_s, engines, balancer, say, hurry, limits, has_served
        )


async def wait_until_ready(
    settings: LaunchSettings, engines: list[Child], balancer: Child, console: Console
) -> None:
    """Returns once the balancer reports every engine as ready. Raises StartError otherwise."""
    limit_s = settings.start_timeout_s
    deadline = time.monotonic() + limit_s
    waiting = {engine.url: engine for engine in engines}
    timeout, connector = aiohttp.ClientTimeout(total=5), aiohttp.TCPConnector(ssl=OWN_TLS)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        with start_progress(console, engines) as show:
            while waiting:
                for child in (balancer, *engines):
                    if child.exit_code is not None:
                        raise _start_error(child, f"ended with exit code {child.exit_code}")
                if time.monotonic() > deadline:
                    late = next(iter(waiting.values()))
                    raise _start_error(late, f"was not ready after {limit_s:g} s")
                await asyncio.sleep(_POLL_S)
                ready = await _ready_workers(session, balancer)
                if len(ready) >= settings.instances and _fleet_serves(engines[0]):
                    waiting.clear()
                for url in ready:
                    waiting.pop(url, None)
                show({engine.name for engine in engines if engine.url not in waiting})


async def _rotate(logs: list[Path], limit_bytes: int, say: Callable[[str], None]) -> None:
    """Keeps each log and its predecessors within the limit."""
    for path in logs:
        if not await asyncio.to_thread(rotated, path, limit_bytes):
            say(f"{path} was emptied, as its disk has no room for a copy")


async def drain(
    drain_s: float,
    engines: list[Child],
    balancer: Child,
    say: Callable[[str], None],
    hurry: asyncio.Event,
    engine_limits_s: tuple[float, float] = _ENGINE_STOP_S,
    has_served: bool = True,
) -> None:
    """Stops the balancer, which lets running requests finish unless it has to `hurry`, and then the
    engines.

    engine_limits_s: the longest time for the engines to stop, and that in a hurry.
    has_served: False if the node has not taken requests yet.
    """
    normal_s, hurried_s = engine_limits_s
    if has_served and balancer.exit_code is None:
        what = f"running requests have {drain_s:g} s to finish; a second signal ends them at once"
        say(f"stopping; {what}")
    await _unless_stopped(_stop_all(engines, balancer, drain_s + 5, normal_s), hurry)
    if hurry.is_set():
        say("second signal: ending at once")
        await _stop_all(engines, balancer, _HURRIED_STOP_S, hurried_s)


async def _stop_all(
    engines: list[Child], balancer: Child, balancer_s: float, engine_s: float
) -> None:
    await balancer.stop(balancer_s)
    await asyncio.gather(*(engine.stop(engine_s) for engine in engines))


def reject_foreign_packages() -> None:
    """Raises SettingsError if another distribution's `radix` or `scheduler` shadows ours."""
    import radix
    import scheduler

    home = Path(__file__).parent.parent
    for package in (radix, scheduler):
        where = Path(package.__path__[0])
        if where.parent != home:
            raise SettingsError(
                f"{package.__name__}={str(where)!r}: Python imports another distribution's package "
                "in place of sgl-ext's; install sgl-ext into an environment of its own"
            )


async def _unless_stopped(work: Coroutine[Any, Any, None], stop: asyncio.Event) -> None:
    """Runs `work` until it ends or `stop` is set. Raises the error of `work`."""
    task, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not task.done():
        task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def _check_engine(settings: LaunchSettings) -> None:
    """Raises SettingsError for settings with which no engine would start."""
    await asyncio.to_thread(check_restart, settings)


def _why_no_restarts(settings: LaunchSettings) -> str:
    """Why this launcher restarts no engines; "" if it does."""
    if settings.ray_address is None:
        return next(filter(None, map(why_one_start, settings.of_models)), "")
    command = f"--ray-address {settings.ray_address} --ray-fleet {settings.ray_fleet} restart"
    return f"The engines run on Ray: python -m sgl_ext.fleet {command}"


def _fleet_serves(child: Child) -> bool:
    """Whether a child that keeps engines on Ray has logged that they all serve."""
    return child.name == FLEET and stage_of(child)[0] == READY


async def _ready_workers(session: aiohttp.ClientSession, balancer: Child) -> list[str]:
    """The URLs of the engines that the balancer reports as ready."""
    try:
        async with session.get(f"{balancer.url}/health") as answer:
            workers = (await answer.json())["workers"]
    except (aiohttp.ClientError, TimeoutError):
        return []
    return [worker["url"] for worker in workers if worker["ready"]]


def _start_error(child: Child, reason: str) -> StartError:
    last = child.last_lines(_LAST_LINES)
    if child.name == FLEET:
        # It says itself what is wrong, with an engine's log or without.
        said = next((at for at, line in enumerate(last) if line.startswith(_SAID)), None)
        if said is not None:
            return StartError("\n".join(last[said:]).removeprefix(_SAID))
    return StartError(f"{child.name} {reason}:\n{reason_of(child)}")


if __name__ == "__main__":
    main()
