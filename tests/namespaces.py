"""Another network namespace beside this one, joined to it by a pair of virtual interfaces.

Programs in it reach this machine at `address` as a program on another machine would: the loopback
address there is their own.
"""

import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

_FETCH = """
import http.client, json, sys
host, port, method, path, headers, body = json.loads(sys.argv[1])
connection = http.client.HTTPConnection(host, port, timeout=120)
try:
    connection.request(method, path, body, headers)
except ConnectionRefusedError:
    print(json.dumps([0, {}, ""]))
else:
    answer = connection.getresponse()
    print(json.dumps([answer.status, dict(answer.getheaders()), answer.read().decode()]))
"""


@dataclass(frozen=True)
class Namespace:
    """address: of the side of this process, as programs inside reach it. pid: of the process that
    keeps the namespace; 0 for none."""

    pid: int
    address: str

    def command(self, *words: str) -> list[str]:
        """A command line that runs another one inside."""
        return ["nsenter", f"--target={self.pid}", "--net", *words] if self.pid else list(words)


HERE = Namespace(0, "127.0.0.1")
"""This machine, for want of another."""


@contextmanager
def joined_namespace() -> Iterator[Namespace]:
    """Makes a namespace. Skips the test where none can be made.

    It lives as long as the process that keeps it, which ends when this one does, however that is.
    With the namespace its interface ends, and so does the one that is joined to it.
    """
    if os.geteuid() != 0:
        pytest.skip("a network namespace is made by root alone")
    if not all(map(shutil.which, ("ip", "unshare", "nsenter"))):
        pytest.skip("a network namespace is made with ip, unshare and nsenter")
    name = f"sgl{secrets.token_hex(4)}"
    here, there = f"{name}a", f"{name}b"
    subnet = f"10.{200 + secrets.randbelow(50)}.{secrets.randbelow(256)}"
    ready_and_wait = ["unshare", "--net", "sh", "-c", "echo ready; cat"]
    with subprocess.Popen(ready_and_wait, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as keeper:
        assert keeper.stdout is not None
        if keeper.stdout.readline() != b"ready\n":
            pytest.skip("a network namespace cannot be made here")
        made = Namespace(keeper.pid, f"{subnet}.1")
        _run("ip", "link", "add", here, "type", "veth", "peer", "name", there, "netns", keeper.pid)
        _run("ip", "address", "add", f"{subnet}.1/24", "dev", here)
        _run("ip", "link", "set", here, "up")
        _run(*made.command("ip", "address", "add", f"{subnet}.2/24", "dev", there))
        for interface in (there, "lo"):
            _run(*made.command("ip", "link", "set", interface, "up"))
        yield made


def fetch(
    inside: Namespace,
    host: str,
    port: int,
    method: str,
    path: str,
    headers: dict[str, str] | None = None,
    body: str | None = None,
) -> tuple[int, dict[str, str], str]:
    """Sends a request from inside a namespace; returns status, headers and body of the answer.

    The status is 0 if nothing listens there.
    """
    order: list[Any] = [host, port, method, path, headers or {}, body]
    command = inside.command(sys.executable, "-c", _FETCH, json.dumps(order))
    ran = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert ran.returncode == 0, ran.stderr
    status, lines, text = json.loads(ran.stdout)
    return status, {name.lower(): value for name, value in lines.items()}, text


def _run(*words: object) -> None:
    ran = subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=30)
    if ran.returncode:
        pytest.skip(f"a network namespace cannot be made here: {ran.stderr.strip()}")
