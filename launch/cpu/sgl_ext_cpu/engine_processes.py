"""The processes of a running engine, by what they do."""

from __future__ import annotations

from dataclasses import dataclass

import psutil


@dataclass(frozen=True)
class EngineProcesses:
    """One engine's processes."""

    url: str
    http: psutil.Process
    scheduler: psutil.Process
    detokenizer: psutil.Process


def find_engine(url: str) -> EngineProcesses:
    """The processes of the engine that listens at `url`. Raises LookupError if one is missing."""
    port = int(url.rpartition(":")[2])
    listening = {
        connection.pid
        for connection in psutil.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
    }
    if len(listening) != 1 or None in listening:
        raise LookupError(f"{len(listening)} processes listen for {url}")
    http = psutil.Process(listening.pop())
    return EngineProcesses(url, http, *_parts(http))


def named(processes: list[psutil.Process], name: str) -> psutil.Process:
    """The first process with this name in its command line. Raises LookupError."""
    for process in processes:
        if any(name in word for word in process.cmdline()):
            return process
    raise LookupError(f"no process is called {name!r}")


def _parts(http: psutil.Process) -> tuple[psutil.Process, psutil.Process]:
    """An engine's scheduler and its detokenizer. In a process that a nursery forked they have
    no title; SGLang starts them in this order."""
    children = sorted(http.children(), key=lambda process: process.create_time())
    try:
        return named(children, "sglang::scheduler"), named(children, "sglang::detokenizer")
    except LookupError:
        scheduler, detokenizer = children
        return scheduler, detokenizer
