"""A nursery: one process that has imported SGLang, from which servers are forked.

A small server spends most of its start on imports in three processes: the server, its scheduler
and its detokenizer. A process that is forked after the imports starts at once, so tests that
need many servers start them here:

    with running_nursery() as nursery:
        server = nursery.start(["--model-path", path, "--port", "21000"], log=log)
        ...
        server.stop()

SGLang starts its children as new interpreters because CUDA does not survive a fork. On the CPU a
fork is safe, as no thread and no operator has run before it. Two things differ from a server that
is started by itself: its children have the hooks that plugins made in the server in addition to
their own, and a variable that SGLang reads at import must be in the nursery's own environment.

A server is ordered at the nursery's Unix socket, by any process that knows its path: the command,
the environment, the folder and the standard streams. A process that is forked for the order alone
starts the server, answers with its process id, passes signals on (a byte each), and answers with
its exit status. When the order's connection closes, it kills the server. The nursery imports SGLang
at the first order, and ends when its standard input closes.

A launcher starts its engines itself. With `Nursery.environment` in its environment, each engine's
interpreter orders itself (`from_nursery/sitecustomize.py`).
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NoReturn

PRELOAD = (
    "sglang.launch_server",
    "sglang.srt.arg_groups.pipeline",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.managers.scheduler",
    "sglang.srt.models.registry",
    "transformers.models.auto.tokenization_auto",
)
"""The modules that a server and its children import."""

# A GPU must be hidden before SGLang is imported, which looks for it then.
_ON_THE_CPU = {"SGLANG_PLATFORM": "sgl_ext_cpu", "CUDA_VISIBLE_DEVICES": ""}


class Server:
    """A server forked from a nursery, and the processes it started."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._status: int | None = None
        self.pid = int.from_bytes(connection.recv(4), "big")
        if not self.pid:
            connection.close()
            raise RuntimeError("the nursery has ended")

    def running(self) -> bool:
        """Whether its first process still runs."""
        return self.exit_status() is None

    def exit_status(self) -> int | None:
        """Its first process's exit status, negative for a signal; None while it runs. The others
        end with the first."""
        if self._status is None and select.select([self._connection], [], [], 0)[0]:
            with self._connection:
                self._status = read_status(self._connection)
        return self._status

    def stop(self) -> None:
        """Kill it and all its processes. Can be called again."""
        while self.running():
            with contextlib.suppress(OSError):  # it ended a moment ago
                self._connection.sendall(bytes([signal.SIGKILL]))
            select.select([self._connection], [], [])


@dataclass(frozen=True)
class Nursery:
    """Starts servers from a process that has already imported SGLang.

    path: of its socket. variables: added to this process's in each server.
    """

    path: str
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        """The variables with which engines of launchers, too, are forked from this nursery."""
        hook = str(Path(__file__).with_name("from_nursery"))
        paths = filter(None, (hook, os.environ.get("PYTHONPATH")))
        return {"SGLEXT_CPU_NURSERY": self.path, "PYTHONPATH": os.pathsep.join(paths)}

    def start(
        self,
        flags: Sequence[str],
        log: Path,
        module: str = "sglang.launch_server",
        environment: Mapping[str, str] | None = None,
    ) -> Server:
        """Fork a server: `python -m module flags`, its output in `log`.

        Waits only for the nursery's imports, not until the server is ready.
        """
        whole = {**os.environ, **_ON_THE_CPU, **self.variables, **(environment or {})}
        with log.open("ab") as output, open(os.devnull) as empty:
            streams = empty.fileno(), output.fileno(), output.fileno()
            return Server(order(self.path, module, flags, whole, streams))


@contextlib.contextmanager
def running_nursery(
    variables: Mapping[str, str] | None = None,
    modules: Sequence[str] = (),
    errors: IO[bytes] | None = None,
) -> Iterator[Nursery]:
    """A nursery that ends with the block. A server ends with the process that ordered it.

    variables: added to this process's. modules: imported in addition to SGLang's own. errors: gets
    what it prints.
    """
    with tempfile.TemporaryDirectory(prefix="nursery-") as folder:
        path = os.path.join(folder, "socket")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen()
            process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(listener.fileno()), *modules],
                env={**os.environ, **_ON_THE_CPU, **(variables or {})},
                stdin=subprocess.PIPE,
                stdout=errors,
                stderr=errors,
                pass_fds=[listener.fileno()],
            )
        with process:  # closes the pipe and waits
            yield Nursery(path, dict(variables or {}))


def order(
    path: str,
    module: str,
    flags: Sequence[str],
    environment: Mapping[str, str],
    streams: Sequence[int],
) -> socket.socket:
    """Orders a server of the nursery at this path; the connection on which it is answered."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(path)
        data = json.dumps(
            {
                "start": module,
                "flags": list(flags),
                "environment": dict(environment),
                "folder": os.getcwd(),
            }
        ).encode()
        socket.send_fds(connection, [len(data).to_bytes(4, "big")], streams)
        connection.sendall(data)
    except BaseException:
        connection.close()
        raise
    return connection


def read_status(connection: socket.socket) -> int:
    """The exit status at the end of an order's connection; that of a kill if there is none."""
    try:
        status = connection.recv(4)
    except OSError:
        status = b""
    return int.from_bytes(status, "big", signed=True) if status else -signal.SIGKILL


def main(listener_number: int, modules: Sequence[str]) -> None:
    """Import everything at the first order, then fork until standard input closes."""
    listener = socket.socket(fileno=listener_number)
    sources = [sys.stdin.fileno(), listener.fileno()]
    supervisors: set[int] = set()
    has_imported = False
    while sys.stdin.fileno() not in select.select(sources, [], [])[0]:
        if not has_imported:
            gc.disable()  # Imported modules are never garbage.
            for module in (*PRELOAD, *modules):
                __import__(module)
            gc.freeze()
            has_imported = True
        supervisors = {one for one in supervisors if os.waitpid(one, os.WNOHANG)[0] == 0}
        supervisors.add(_fork_supervisor(listener))


def _fork_supervisor(listener: socket.socket) -> int:
    """Fork a process that follows one order."""
    client, _ = listener.accept()
    child = os.fork()
    if child:
        client.close()
        return child
    try:
        listener.close()
        empty = os.open(os.devnull, os.O_RDONLY)
        os.dup2(empty, sys.stdin.fileno())
        _supervise(client)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(0)


def _supervise(client: socket.socket) -> None:
    """Start the server that the client orders, pass signals on, and end both together."""
    prefix, streams, _, _ = socket.recv_fds(client, 4, 3)
    order = json.loads(client.recv(int.from_bytes(prefix, "big"), socket.MSG_WAITALL))
    server = os.fork()
    if not server:
        client.close()
        os.chdir(order["folder"])
        os.environ.clear()
        os.environ.update(order["environment"])
        _become_server(order, streams)
    for ignored in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)  # it outlives its group, to end the server
    for stream in streams:
        os.close(stream)
    client.sendall(server.to_bytes(4, "big"))
    ending = os.pidfd_open(server)
    while True:
        ready, _, _ = select.select([client.fileno(), ending], [], [])
        if ending in ready:
            break
        signals = client.recv(16)
        for number in signals or bytes([signal.SIGKILL]):
            os.kill(server, number)
        if not signals:
            break
    _, status = os.waitpid(server, 0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server, signal.SIGKILL)
    with contextlib.suppress(OSError):
        client.sendall(os.waitstatus_to_exitcode(status).to_bytes(4, "big", signed=True))


def _become_server(order: dict[str, Any], streams: Sequence[int]) -> NoReturn:
    """Run the server in this forked process, with these standard streams, and exit."""
    status = 1
    try:
        os.setsid()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        # A new interpreter would do the same with the variable.
        sys.path[1:1] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
        gc.enable()
        fork_children()
        sys.argv = [order["start"], *order["flags"]]
        runpy.run_module(order["start"], run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as ending:
        if isinstance(ending.code, str):  # An interpreter would print this at its end.
            print(ending.code, file=sys.stderr)
        status = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def fork_children() -> None:
    """Make SGLang fork in a server's process, in place of starting new interpreters."""
    import multiprocessing

    multiprocessing.set_start_method("fork", force=True)

    def keep(method: str | None, force: bool = False) -> None:
        del method, force

    multiprocessing.set_start_method = keep
    os.register_at_fork(after_in_child=_load_plugins_again)


def _load_plugins_again() -> None:
    """Make a server's child load plugins itself, as a new interpreter would."""
    from sglang.srt import plugins

    plugins._plugins_loaded = False


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
