"""The balancer's process: `python -m sgl_ext.balancer.serve --worker http://HOST:PORT ...`."""

import asyncio
import gc
import logging
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

import uvloop

from radix.index_memory import segments_within
from sgl_ext.balancer.cluster.group_memory import GroupMemory
from sgl_ext.balancer.cluster.peers import PeerGroup
from sgl_ext.balancer.reporting.request_log import check_file
from sgl_ext.balancer.reporting.spans import check_export
from sgl_ext.balancer.server import Balancer
from sgl_ext.balancer.store.documents import StoreUnusable
from sgl_ext.balancer.store.opening import check_store
from sgl_ext.limits.byte_account import return_freed_memory
from sgl_ext.logs import write_logs
from sgl_ext.membership.member import Membership
from sgl_ext.membership.sources import open_sources
from sgl_ext.ports import base_url, require_free
from sgl_ext.process import (
    BALANCER_FOLDERS,
    end_with_parent,
    handle_hangups,
    hold_hangups,
    make_folder,
    on_hangup,
)
from sgl_ext.settings.fields import changed
from sgl_ext.settings.schema import VARIABLE, BalancerSettings, SettingsError
from sgl_ext.settings.sources import balancer_settings, names_file
from sgl_ext.version import versions

log = logging.getLogger(__name__)


class Front(Protocol):
    """Another way by which requests reach a balancer, beside its own port."""

    async def start(self) -> None: ...
    async def stop(self) -> None: ...


S = TypeVar("S", bound=BalancerSettings)
MakeFront = Callable[[Balancer, S], Front]


def main(argv: list[str]) -> None:
    """Serves until SIGTERM or SIGINT, then lets running requests finish, unless a second one comes.
    Raises SystemExit."""
    serve(argv, balancer_settings)


def serve(
    argv: list[str],
    settings_of: Callable[[list[str]], S],
    make_front: MakeFront[S] | None = None,
) -> None:
    """As `main`. settings_of: reads a command line. make_front: called in each process."""
    try:
        config = settings_of(argv)
        write_logs("balancer", config.log_format, config.log_level)
        log.info("starting", extra=versions()._asdict())
        log.info("settings other than the defaults", extra=changed(config))
        # A launcher has checked that the store's server answers.
        is_restart = VARIABLE in os.environ
        check_store(config.store, config.store_limit_bytes, is_restart=is_restart)
        if config.request_log is not None:
            check_file(config.request_log)
        check_export(config)
        sources = open_sources(config)
        if config.processes > 1:
            # With a shared port the kernel would not report that another program uses it.
            require_free(config.host, config.port)
    except (SettingsError, StoreUnusable) as error:
        raise SystemExit(f"sgl-ext balancer: {error}") from None
    read = partial(settings_of, argv) if names_file(argv) else None
    serve_one = partial(_serve, config, sources, make_front, read)
    if config.processes == 1:
        uvloop.run(serve_one())
    else:
        run(
            config.processes,
            segments_within(config.index_limit_bytes),
            lambda group, folder: uvloop.run(serve_one(group, folder)),
        )


async def _serve(
    config: S,
    sources: Sequence[Membership],
    make_front: MakeFront[S] | None,
    read: Callable[[], S] | None,
    group: PeerGroup | None = None,
    folder: Path | None = None,
) -> None:
    stop = asyncio.Event()
    balancer = Balancer(config, group, folder, sources=sources, read=read)
    front = None if make_front is None else make_front(balancer, config)
    reloading: set[asyncio.Task[None]] = set()

    def signalled() -> None:
        if stop.is_set():
            log.warning("second signal: ending at once")
            balancer.hurry()
        stop.set()

    def reload() -> None:
        task = asyncio.create_task(balancer.reload())
        reloading.add(task)  # an event loop keeps no reference to it
        task.add_done_callback(reloading.discard)

    # In a group only the first process heeds Ctrl-C, which reaches all, and passes it on.
    for number in (signal.SIGTERM, signal.SIGINT) if group is None else (signal.SIGTERM,):
        asyncio.get_running_loop().add_signal_handler(number, signalled)
    # Requests create few reference cycles, and collecting them costs a tenth of a request. So the
    # collector skips the objects that exist now, and runs rarely.
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)
    return_freed_memory()
    try:
        await balancer.start()
    except OSError as error:
        raise SystemExit(f"sgl-ext balancer: port={config.port}: {error.strerror}") from None
    on_hangup(partial(asyncio.get_running_loop().call_soon_threadsafe, reload))
    log.info("listening", extra={"url": base_url(config)})
    if front is not None:
        await front.start()
    await stop.wait()
    log.info("draining for up to %g s; a second signal ends at once", config.drain_s)
    await balancer.stop()
    if front is not None:
        await front.stop()


# Several balancer processes on one port: started, restarted, and stopped together.
#
# The first process makes the sockets for the peers' messages and the memory that all share, forks
# the others, and serves nothing itself. The kernel spreads connections over all processes that
# listen on the port. A process that dies is forked again with the same socket.

_RESTART_S = 1.0
_RECEIVE_BYTES = 4 * 1024 * 1024

Serve = Callable[[PeerGroup, Path], None]


def run(count: int, limit_segments: int, serve: Serve) -> None:
    """Runs `serve` in `count` processes until SIGTERM or SIGINT, and passes each of these
    on to them as SIGTERM.

    `serve` gets its peer group and a folder that all processes share. limit_segments: the most in
    their prefix index.
    """
    sockets = tuple(_socket() for _ in range(count))
    secret = secrets.token_bytes(16)
    memory = GroupMemory(limit_segments)
    groups = [PeerGroup(number, secret, sockets, memory) for number in range(count)]
    _Supervisor(groups, serve, make_folder(BALANCER_FOLDERS)).run()


def _socket() -> socket.socket:
    made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BYTES)
    made.bind(("127.0.0.1", 0))
    return made


class _Supervisor:
    def __init__(self, groups: list[PeerGroup], serve: Serve, folder: Path) -> None:
        self._groups = groups
        self._serve = serve
        self._folder = folder
        self._running: dict[int, PeerGroup] = {}
        self._stopping = False
        # Nothing is written to it. Its end closes when this process ends, however that happens.
        self._lifeline = os.pipe()

    def run(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        for group in self._groups:
            self._fork(group)
        while self._running:
            pid, status = os.wait()
            group = self._running.pop(pid)
            if self._stopping:
                continue
            code = os.waitstatus_to_exitcode(status)
            log.error("balancer process %s ended with code %s; restarting it", group.number, code)
            time.sleep(_RESTART_S)
            if not self._stopping:
                self._fork(group)

    def _fork(self, group: PeerGroup) -> None:
        # Held from its first moment on: threads that it begins inherit that.
        hold_hangups()
        pid = os.fork()
        if pid:
            handle_hangups(self._reload)
            self._running[pid] = group
            return
        code = 1
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            os.close(self._lifeline[1])
            threading.Thread(target=_exit_with, args=(self._lifeline[0],), daemon=True).start()
            self._serve(group, self._folder)
            code = 0
        except SystemExit as error:
            log.error("%s", error)
        except BaseException:
            log.exception("balancer process %s", group.number)
        finally:
            logging.shutdown()  # its lines are written by a thread
            os._exit(code)

    def _reload(self, number: int, _: object) -> None:
        """One process reads the settings again, and the others apply what it finds."""
        for pid in tuple(self._running)[:1]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGHUP)

    def _stop(self, number: int, _: object) -> None:
        self._stopping = True
        for pid in self._running:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)


def _exit_with(lifeline: int) -> None:
    """Ends this process when its parent is gone."""
    os.read(lifeline, 1)
    os._exit(1)


if __name__ == "__main__":
    end_with_parent()
    # A terminal that closes ends nothing, and at most reads a file again.
    hold_hangups()
    main(sys.argv[1:])
