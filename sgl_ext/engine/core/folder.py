"""The engine's own folder, which its processes find by the environment.

Other users of the machine cannot read it, and no client knows its name. In it are a file for each
process that has verified its hooks, and the sockets between the HTTP process and the scheduler.
"""

import os
from collections import Counter
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import zmq

from sgl_ext.process import ENGINE_FOLDERS, make_folder
from sgl_ext.wire.orders import Orders, encode_orders, read_orders

_READABLE = int(zmq.POLLIN)
_FOLDER, _NAME = "SGLEXT_ENGINE_FOLDER", "SGLEXT_ENGINE_NAME"
_PROCESS = "SGLEXT_ENGINE_PROCESS"


def open_folder() -> None:
    """Makes a new folder for this engine, which ends with this process. Its child processes find
    it by the environment."""
    os.environ[_FOLDER] = str(make_folder(ENGINE_FOLDERS))
    os.environ[_PROCESS] = str(os.getpid())


def folder() -> Path:
    """The engine's folder on this machine."""
    return Path(os.environ[_FOLDER])


def main_process() -> psutil.Process:
    """The engine's first process, which has started all others."""
    return psutil.Process(int(os.environ.get(_PROCESS, os.getpid())))


def engine_name() -> str:
    """The engine's name, which no client knows: that of its folder on its first machine."""
    return os.environ.get(_NAME) or folder().name


def adopt_name(name: str) -> None:
    """Gives this process the name that its engine has on another machine."""
    os.environ[_NAME] = name
    secret.cache_clear()


@cache
def secret(mark: str) -> str:
    """A text that begins with `mark` and that no client can forge, as none knows the name."""
    return f"{mark}{engine_name()}-"


def acknowledge(role: str) -> None:
    """Records that this process has verified its hooks."""
    (folder() / f"{role}-{os.getpid()}.ack").touch()


def acknowledged() -> Counter[str]:
    """How many processes of each role have acknowledged."""
    return Counter(path.name.rsplit("-", 1)[0] for path in folder().glob("*.ack"))


def address(name: str) -> str:
    """The address of one of the engine's sockets: the scheduler of rank 1 sends "events-1", and the
    HTTP process sends it "orders-1"."""
    return f"ipc://{folder() / name}"


class Outbox:
    """Sends orders from the HTTP process to the scheduler of a data-parallel rank."""

    def __init__(self, rank: int = 0) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(address(f"orders-{rank}"))

    def unpin(self, prefixes: list[str]) -> None:
        """Orders that these pins are given up, which takes a second or two."""
        self._socket.send(encode_orders(Orders(unpin=tuple(prefixes))), zmq.NOBLOCK)

    def change(self, settings: Mapping[str, Any]) -> None:
        """Orders that these settings are in effect from the next iteration on."""
        self._socket.send(encode_orders(Orders(settings=settings)), zmq.NOBLOCK)

    def store(self) -> None:
        """Orders that what the engine holds goes to the tier that engines share."""
        self._socket.send(encode_orders(Orders(store=True)), zmq.NOBLOCK)


class Inbox:
    """Receives these orders in the first process of that rank."""

    def __init__(self, rank: int = 0) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PULL)
        self._socket.bind(address(f"orders-{rank}"))

    def take(self, earlier: Orders) -> Orders:
        """Earlier orders, and those that came since the last call."""
        # Not `poll`: it makes a poller at each call, and this runs before each step of decoding.
        while int(self._socket.getsockopt(zmq.EVENTS)) & _READABLE:
            earlier = earlier.and_then(read_orders(self._socket.recv()))
        return earlier
