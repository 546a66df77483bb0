"""Several balancer processes on one port: started, restarted, and stopped together.

The first process makes the sockets for the peers' messages and the memory that all share, forks
the others, and serves nothing itself. The kernel spreads connections over all processes that listen
on the port. A process that dies is forked again with the same socket.
"""

import logging
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from sgl_ext.balancer.cluster.group_memory import GroupMemory
from sgl_ext.balancer.cluster.peers import PeerGroup
from sgl_ext.process import BALANCER_FOLDERS, handle_hangups, hold_hangups, make_folder

_RESTART_S = 1.0
_RECEIVE_BYTES = 4 * 1024 * 1024
log = logging.getLogger(__name__)

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
