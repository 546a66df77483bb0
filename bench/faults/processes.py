"""The processes of a running node, by what they do."""

from __future__ import annotations

from dataclasses import dataclass

import psutil

_GONE_S = 30.0


@dataclass(frozen=True)
class Engine:
    """An engine's processes."""

    url: str
    http: psutil.Process
    scheduler: psutil.Process
    detokenizer: psutil.Process


@dataclass(frozen=True)
class NodeProcesses:
    """All processes of a node. supervisor: the parent of several balancer processes."""

    launcher: psutil.Process
    supervisor: psutil.Process
    balancers: tuple[psutil.Process, ...]
    engines: tuple[Engine, ...]

    @property
    def all(self) -> dict[psutil.Process, str]:
        """Each process, with its name."""
        named = {self.launcher: "launcher", self.supervisor: "balancer"}
        named |= {process: f"balancer process {n}" for n, process in enumerate(self.balancers)}
        for number, engine in enumerate(self.engines):
            parts = {"http": engine.http, "scheduler": engine.scheduler}
            parts["detokenizer"] = engine.detokenizer
            named |= {process: f"engine {number}, {part}" for part, process in parts.items()}
        return named


def find_processes(launcher: int, engines: tuple[str, ...]) -> NodeProcesses:
    """The processes of a node that serves. Raises LookupError if one is missing."""
    top = psutil.Process(launcher)
    supervisor = _one(top.children(), "sgl_ext.balancer.serve")
    balancers = tuple(sorted(supervisor.children(), key=lambda process: process.pid))
    return NodeProcesses(top, supervisor, balancers, tuple(_engine(url) for url in engines))


def _engine(url: str) -> Engine:
    port = int(url.rpartition(":")[2])
    listening = {
        connection.pid
        for connection in psutil.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
    }
    if len(listening) != 1 or None in listening:
        raise LookupError(f"{len(listening)} processes listen for {url}")
    http = psutil.Process(listening.pop())
    return Engine(url, http, *_parts(http))


def _parts(http: psutil.Process) -> tuple[psutil.Process, psutil.Process]:
    """An engine's scheduler and its detokenizer. In a process that a nursery forked they have
    no title; SGLang starts them in this order."""
    children = sorted(http.children(), key=lambda process: process.create_time())
    try:
        return _one(children, "sglang::scheduler"), _one(children, "sglang::detokenizer")
    except LookupError:
        scheduler, detokenizer = children
        return scheduler, detokenizer


def _one(processes: list[psutil.Process], name: str) -> psutil.Process:
    for process in processes:
        if any(name in word for word in process.cmdline()):
            return process
    raise LookupError(f"no process is called {name!r}")


def have_ended(processes: list[psutil.Process], limit_s: float = _GONE_S) -> bool:
    """Waits until all processes have ended; false if one has not in time."""
    _, alive = psutil.wait_procs(processes, timeout=limit_s)
    return not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def client_ports(server: psutil.Process, port: int) -> set[int]:
    """The ports of the clients that are connected to this process's port."""
    return {
        connection.raddr.port
        for connection in server.net_connections("tcp")
        if connection.raddr and connection.laddr.port == port
    }
