"""A nursery: one process that has imported SGLang, from which servers are forked.

A small server spends most of its start on imports in three processes: the server, its scheduler
and its detokenizer. A process that is forked after the imports starts at once, so tests that
need many servers start them here:

    with Nursery() as nursery:
        server = nursery.start(["--model-path", path, "--port", "21000"], log=log)
        ...
        server.stop()

SGLang starts its children as new interpreters because CUDA does not survive a fork. On the CPU a
fork is safe, as no thread and no operator has run before it. Two things differ from a server that
is started by itself: its children have the hooks that plugins made in the server in addition to
their own, and a variable that SGLang reads at import must be in the nursery's own environment.

The nursery reads orders from its standard input, a line of JSON each, and answers each with a
line. When standard input closes, it ends every server and then itself.

A launcher starts its engines itself. With `Nursery.environment` in its environment, each engine's
interpreter sends its command to the nursery's socket (`from_nursery/sitecustomize.py`), and the
nursery forks the engine.
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
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NoReturn, TextIO

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

    def __init__(self, nursery: Nursery, pid: int) -> None:
        self.pid = pid
        self._nursery = nursery

    def running(self) -> bool:
        """Whether its first process still runs."""
        return self.exit_status() is None

    def exit_status(self) -> int | None:
        """Its first process's exit status, negative for a signal; None while it runs."""
        status: int | None = self._nursery.ask({"status": self.pid})
        return status

    def stop(self) -> None:
        """Kill it and all its processes. Can be called again."""
        self._nursery.ask({"stop": self.pid})


class Nursery:
    """Starts servers from a process that has already imported SGLang.

    `environment` adds to this process's variables. `modules` are imported in
    addition to SGLang's own. `errors` gets what it prints. A context manager: leaving it ends
    every server.
    """

    def __init__(
        self,
        environment: Mapping[str, str] | None = None,
        modules: Sequence[str] = (),
        errors: IO[bytes] | None = None,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="nursery-")
        path = os.path.join(self._folder.name, "socket")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen()
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(listener.fileno()), *modules],
                env={**os.environ, **_ON_THE_CPU, **(environment or {})},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                pass_fds=[listener.fileno()],
            )
        hook = str(Path(__file__).with_name("from_nursery"))
        paths = filter(None, (hook, os.environ.get("PYTHONPATH")))
        self.environment = {"SGLEXT_CPU_NURSERY": path, "PYTHONPATH": os.pathsep.join(paths)}
        """The variables with which engines of launchers, too, are forked from this nursery."""

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
        order = {
            "start": module,
            "flags": list(flags),
            "log": str(log),
            "environment": dict(environment or {}),
        }
        return Server(self, int(self.ask(order)))

    def ask(self, order: dict[str, Any]) -> Any:
        """Send one order and return the answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the nursery ended with status {self._process.wait()}")
        return json.loads(answer)

    def close(self) -> None:
        """End every server and the nursery. Can be called again."""
        with self._process:  # closes both pipes and waits
            self._folder.cleanup()

    def __enter__(self) -> Nursery:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def main(listener_number: int, modules: Sequence[str]) -> None:
    """Import everything, then follow orders until standard input closes."""
    listener = socket.socket(fileno=listener_number)
    orders, answers = sys.stdin, os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Output of an import must not look like an answer.
    gc.disable()  # Imported modules are never garbage.
    for module in (*PRELOAD, *modules):
        __import__(module)
    gc.freeze()
    servers: set[int] = set()
    supervisors: set[int] = set()
    try:
        while True:
            ready, _, _ = select.select([orders.fileno(), listener.fileno()], [], [])
            if listener.fileno() in ready:
                supervisors = {one for one in supervisors if os.waitpid(one, os.WNOHANG)[0] == 0}
                supervisors.add(_fork_supervisor(listener, orders, answers))
                continue
            if not (line := orders.readline()):
                break
            order = json.loads(line)
            answer: int | bool | None = True
            if "start" in order:
                server = _fork(order, orders, answers)
                servers.add(server)
                answer = server
            elif "status" in order:
                server = order["status"]
                answer = _exit_status(server) if server in servers else -signal.SIGKILL
            elif order["stop"] in servers:
                servers.remove(order["stop"])
                _end(order["stop"])
            print(json.dumps(answer), file=answers, flush=True)
    finally:
        for server in servers:
            _end(server)


def _fork(order: dict[str, Any], orders: TextIO, answers: TextIO) -> int:
    """Fork a server; return its process id, which names its process group too."""
    child = os.fork()
    if child:
        return child
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(log, answers.fileno())
    os.environ.update(order["environment"])
    _become_server(order, (empty, log, log))


def _fork_supervisor(listener: socket.socket, orders: TextIO, answers: TextIO) -> int:
    """Fork a process that serves one interpreter that stands in for a server."""
    client, _ = listener.accept()
    child = os.fork()
    if child:
        client.close()
        return child
    try:
        listener.close()
        empty = os.open(os.devnull, os.O_RDWR)
        os.dup2(empty, orders.fileno())
        os.dup2(empty, answers.fileno())
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
    for stream in streams:
        os.close(stream)
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


def _exit_status(server: int) -> int | None:
    ended = os.waitid(os.P_PID, server, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def _end(server: int) -> None:
    """Kill a server's process group: on SIGTERM SGLang would first wait for a diagnosis."""
    try:
        os.killpg(server, signal.SIGKILL)
    except ProcessLookupError:  # it was forked a moment ago, and has no group of its own yet
        os.kill(server, signal.SIGKILL)
    os.waitpid(server, 0)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
