"""Has a nursery start an engine in place of this interpreter, which would import SGLang first.

Python imports a module of this name at its start if the module's folder is in PYTHONPATH.
SGLEXT_CPU_NURSERY names the nursery's socket. A server's interpreter sends it the command,
the environment and the standard streams, and waits for the server's end. The two end together:
if this process is killed, the nursery kills the server.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from contextlib import suppress

_SERVERS = ("sgl_ext.engine.serve", "sglang.launch_server")


def stand_in(path: str, module: str, flags: list[str]) -> int:
    """Forwards SIGTERM and SIGINT to the server, and returns its exit status."""
    order = {"start": module, "flags": flags, "environment": dict(os.environ)}
    data = json.dumps({**order, "folder": os.getcwd()}).encode()
    with socket.socket(socket.AF_UNIX) as nursery:
        nursery.connect(path)
        socket.send_fds(nursery, [len(data).to_bytes(4, "big")], [0, 1, 2])
        nursery.sendall(data)
        nursery.recv(4)  # the server's process id
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, _: nursery.sendall(bytes([number])))
        status = nursery.recv(4)
    return int.from_bytes(status, "big", signed=True) if status else -signal.SIGKILL


def is_server(command: list[str]) -> bool:
    return command[1:2] == ["-m"] and command[2] in _SERVERS


if (_path := os.environ.get("SGLEXT_CPU_NURSERY")) and is_server(sys.orig_argv):
    _status = stand_in(_path, sys.orig_argv[2], sys.orig_argv[3:])
    if _status < 0:
        with suppress(OSError):  # SIGKILL has no handler
            signal.signal(-_status, signal.SIG_DFL)
        os.kill(os.getpid(), -_status)
    os._exit(_status)
