"""What a release is installed with, and the audit of what is installed."""

from __future__ import annotations

import json
import re
import threading
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from launch import audit

ROOT = Path(__file__).parent.parent
# A major version of these may change what the balancer or the plugin relies on.
HOOKED = {"aiohttp", "httptools", "httpx", "msgspec", "orjson", "uvloop", "wsproto", "xxhash"}


def requirements() -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    stated = [*project["dependencies"], *project["optional-dependencies"]["engine"]]
    return [Requirement(each) for each in stated]


def constraints() -> dict[str, tuple[Requirement, list[str]]]:
    """The requirement and the hashes of each package of the constraints file."""
    text = (ROOT / "launch/constraints.txt").read_text().replace("\\\n", " ")
    found = {}
    for line in filter(None, text.splitlines()):
        stated, *hashes = re.split(r"\s+--hash=", line.strip())
        found[canonicalize_name(Requirement(stated).name)] = Requirement(stated), hashes
    return found


def test_a_release_s_dependencies_are_pinned_within_their_ranges() -> None:
    pinned = constraints()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for wanted in map(Requirement, project["dependencies"]):
        (pin,) = pinned[canonicalize_name(wanted.name)][0].specifier
        assert pin.operator == "=="
        assert wanted.specifier.contains(pin.version), wanted


def test_every_pin_has_hashes_and_no_address() -> None:
    for pin, hashes in constraints().values():
        assert hashes, pin
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", each) for each in hashes), pin
    text = (ROOT / "launch/constraints.txt").read_text()
    assert "://" not in text
    assert "index" not in text


def test_what_we_hook_into_has_a_ceiling() -> None:
    stated = {each.name: each.specifier for each in requirements()}
    for name in HOOKED:
        assert any(each.operator == "<" for each in stated[name]), name


@contextmanager
def database(answer: Any) -> Iterator[tuple[str, list[Any]]]:
    """A database with one answer; yields its URL and what it was sent."""
    sent: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            sent.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", sent
        finally:
            server.shutdown()
            thread.join()


PACKAGES = [("a", "1"), ("b", "2")]


def test_the_audit_names_vulnerabilities() -> None:
    with database({"results": [{}, {"vulns": [{"id": "X-1"}, {"id": "X-2"}]}]}) as (url, sent):
        lines = audit.report(url, PACKAGES)
    assert lines == [
        "audit: b 2: X-1, X-2",
        "audit: 1 of 2 packages have known vulnerabilities",
    ]
    query = {"package": {"name": "b", "ecosystem": "PyPI"}, "version": "2"}
    assert sent[0]["queries"][1] == query


@pytest.mark.parametrize("answer", [{}, [], {"results": [{}]}, {"results": [{}, {"vulns": 5}]}])
def test_an_audit_without_a_usable_answer_is_skipped(answer: Any) -> None:
    with database(answer) as (url, _):
        (line,) = audit.report(url, PACKAGES)
    assert line.startswith("audit: skipped, ")


@pytest.mark.parametrize("url", ["", "http://127.0.0.1:1/"])
def test_an_audit_without_a_database_is_skipped(url: str) -> None:
    (line,) = audit.report(url, PACKAGES)
    assert line.startswith("audit: skipped, ")


def test_local_packages_are_not_named_to_the_database() -> None:
    names = {name for name, _ in audit.installed()}
    assert "pytest" in names
    assert "sgl-ext" not in names
