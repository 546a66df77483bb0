"""The processes of a running node, by what they do."""

from __future__ import annotations

from dataclasses import dataclass

import psutil
from sgl_ext_cpu.engine_processes import EngineProcesses, find_engine, named

_GONE_S = 30.0


@dataclass(frozen=True)
class NodeProcesses:
    """All processes of a node. supervisor: the parent of several balancer processes."""

    launcher: psutil.Process
    supervisor: psutil.Process
    balancers: tuple[psutil.Process, ...]
    engines: tuple[EngineProcesses, ...]

    @property
    def all(self) -> dict[psutil.Process, str]:
        """Each process, with its name."""
        names = {self.launcher: "launcher", self.supervisor: "balancer"}
        names |= {process: f"balancer process {n}" for n, process in enumerate(self.balancers)}
        for number, engine in enumerate(self.engines):
            parts = {"http": engine.http, "scheduler": engine.scheduler}
            parts["detokenizer"] = engine.detokenizer
            names |= {process: f"engine {number}, {part}" for part, process in parts.items()}
        return names


def find_processes(launcher: int, engines: tuple[str, ...]) -> NodeProcesses:
    """The processes of a node that serves. Raises LookupError if one is missing."""
    top = psutil.Process(launcher)
    supervisor = named(top.children(), "sgl_ext.balancer.serve")
    balancers = tuple(sorted(supervisor.children(), key=lambda process: process.pid))
    return NodeProcesses(top, supervisor, balancers, tuple(map(find_engine, engines)))


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
