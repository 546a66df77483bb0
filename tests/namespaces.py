"""Another network namespace beside this one, joined to it by a pair of virtual interfaces.

Programs in it reach this machine at `address` as a program on another machine would: the loopback
address there is their own.
"""

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
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
    """address: of the side of this process, as programs inside reach it. name: "" for none."""

    name: str
    address: str

    def command(self, *words: str) -> list[str]:
        """A command line that runs another one inside."""
        return ["ip", "netns", "exec", self.name, *words] if self.name else list(words)


HERE = Namespace("", "127.0.0.1")
"""This machine, for want of another."""


@contextmanager
def joined_namespace() -> Iterator[Namespace]:
    """Makes a namespace, and removes it at the end. Skips the test where none can be made."""
    if os.geteuid() != 0:
        pytest.skip("a network namespace is made by root alone")
    name = f"sgl{secrets.token_hex(4)}"
    here, there = f"{name}a", f"{name}b"
    subnet = f"10.{200 + secrets.randbelow(50)}.{secrets.randbelow(256)}"
    with ExitStack() as stack:
        _require("netns", "add", name)
        stack.callback(_ip, "netns", "delete", name)  # and with it the interfaces
        _require("link", "add", here, "type", "veth", "peer", "name", there, "netns", name)
        stack.callback(_ip, "link", "delete", here)
        for inside, interface, number in (((), here, 1), (("-n", name), there, 2)):
            _require(*inside, "address", "add", f"{subnet}.{number}/24", "dev", interface)
            _require(*inside, "link", "set", interface, "up")
        _require("-n", name, "link", "set", "lo", "up")
        yield Namespace(name, f"{subnet}.1")


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


def _require(*words: str) -> None:
    ran = _ip(*words)
    if ran is None or ran.returncode:
        why = "there is no `ip`" if ran is None else ran.stderr.strip()
        pytest.skip(f"a network namespace cannot be made here: {why}")


def _ip(*words: str) -> subprocess.CompletedProcess[str] | None:
    command: Sequence[str] = ["ip", *words]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30)
    except FileNotFoundError:
        return None
