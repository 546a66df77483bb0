"""A real node that reads its settings again: its launcher, its balancer's processes, its engine."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
import requests
from sgl_ext_cpu.node import Node, StartNode

from tests.node.test_pins import body, pins, text
from tests.waiting import HANG_S, until

START = """
[launch]
platform = "cpu"
pin-budget = 0.5
[tenants.people]
max-priority = 5
"""


class Configured(NamedTuple):
    """A node of a file."""

    node: Node
    file: Path

    def reload(self, settings: str) -> requests.Response:
        self.file.write_text(settings)
        return requests.post(f"{self.node.url}/sgl_ext/reload", timeout=HANG_S)

    def said(self, what: str) -> bool:
        return what in (self.node.log_dir / "launch.out").read_text()

    def hang_up(self, settings: str) -> None:
        self.file.write_text(settings)
        self.node.process.send_signal(signal.SIGHUP)

    def priority(self, tenant: str) -> int:
        """The priority of a request that wants more than it may have."""
        answer = self.node.post(
            "/sgl_ext/explain/v1/messages",
            body("s", "q"),
            headers={"x-tenant-id": tenant, "x-sgl-ext-priority": "900"},
        )
        return int(answer.json()["priority"])


@pytest.fixture(scope="module")
def configured(
    start_node: StartNode, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Configured]:
    """A node with two balancer processes and one engine."""
    folder = tmp_path_factory.mktemp("reload")
    file = folder / "node.toml"
    file.write_text(START)
    with start_node(folder, "--config", str(file), "--processes", "2") as node:
        yield Configured(node, file)


def test_a_smaller_pin_budget_releases_pins_and_a_larger_one_grants_them(
    configured: Configured,
) -> None:
    node = configured.node
    assert node.post("/v1/messages", body(text(50), "q", "1h")).ok
    until(lambda: len(pins(node)) == 1)
    answer = configured.reload(START.replace("0.5", "0.0"))
    assert answer.json()["changed"] == ["pin-budget"], answer.text
    assert [row["applied"] for row in answer.json()["engines"]] == [True]
    until(lambda: pins(node) == [])
    assert node.post("/v1/messages", body(text(50), "q", "1h")).ok
    assert pins(node) == []
    assert configured.reload(START).json()["changed"] == ["pin-budget"]
    assert node.post("/v1/messages", body(text(50), "q", "1h")).ok
    until(lambda: len(pins(node)) == 1)


def test_sighup_changes_every_process_and_says_what_it_changed(configured: Configured) -> None:
    before = START.replace("[tenants", "[balancer]\nport = 1\n[tenants")
    configured.hang_up(before.replace("max-priority = 5", "max-priority = 25"))
    until(lambda: configured.said("reload: changed: tenants.people"))
    until(lambda: {configured.priority("people") for _ in range(8)} == {25})
    configured.hang_up(START)
    until(lambda: {configured.priority("people") for _ in range(8)} == {5})


def test_a_wrong_file_changes_nothing_and_is_told(configured: Configured) -> None:
    wrong = START.replace("0.5", "5")
    answer = configured.reload(wrong)
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert f"{configured.file}: [launch] pin-budget=5: must be a number from 0 to 1" in message
    assert configured.said("nothing was changed")
    assert configured.reload(START).json()["changed"] == []


def test_default_hints_pin_the_prompts_of_a_tenant(configured: Configured) -> None:
    node = configured.node
    hinted = START + "[hints.tenant.people]\nttl-s = 900\n"
    assert configured.reload(hinted).json()["changed"] == ["hints.tenant.people"]

    def owners() -> set[str]:
        return {pin["owner"] for pin in pins(node)}

    def ask() -> bool:
        headers = {"x-tenant-id": "people"}
        return node.post("/v1/messages", body(text(50), "q"), headers=headers).ok

    until(lambda: ask() and "people" in owners())
    assert {pin["ttl_s"] for pin in pins(node) if pin["owner"] == "people"} == {900.0}
    configured.reload(START)


def test_an_engine_that_starts_again_has_what_was_changed(configured: Configured) -> None:
    node = configured.node
    configured.reload(START.replace("0.5", "0.0"))

    def started() -> list[psutil.Process]:
        children = psutil.Process(node.process.pid).children()
        return [child for child in children if "sgl_ext.engine.serve" in child.cmdline()]

    (engine,) = started()
    engine.kill()
    until(lambda: not engine.is_running())
    until(lambda: bool(started()))
    assert '"pin_budget":0.0' in started()[0].environ()["SGLEXT_SETTINGS"]
    # The balancer may learn of the engine's end from the request that fails.
    until(lambda: node.post("/v1/messages", body(text(50), "q", "1h")).ok)
    assert pins(node) == []
