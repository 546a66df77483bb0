"""`sgl-ext top` in a pseudo-terminal: it lives, resizes, reconnects, and leaves no trace."""

from __future__ import annotations

import queue
import signal
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pexpect
import pyte
import pytest

from tests.cli.fake_node import FakeNode, Refused, fake_node, state_of

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
_LIMIT_S = 30


class Terminal:
    """A terminal of 24 lines and 80 columns in which `sgl-ext top` runs."""

    def __init__(self, url: str) -> None:
        self.screen = pyte.Screen(80, 24)
        self._stream = pyte.Stream(self.screen)
        self.raw = ""
        environment = {"PATH": "/usr/bin:/bin", "TERM": "xterm", "LANG": "C.UTF-8", "COLUMNS": "7"}
        self.process = pexpect.spawn(
            sys.executable,
            ["-m", "sgl_ext", "top", "--url", url],
            cwd=str(ROOT),
            dimensions=(24, 80),
            encoding="utf-8",
            env=environment,  # type: ignore[arg-type]
        )
        self.modes = termios.tcgetattr(self.process.child_fd)

    def until(self, holds: Callable[[], bool]) -> None:
        """Reads what it prints until something holds."""
        deadline = time.monotonic() + _LIMIT_S
        while not holds():
            assert time.monotonic() < deadline, self.text
            try:
                self.feed(self.process.read_nonblocking(65536, 0.1))
            except pexpect.TIMEOUT:
                continue
            except pexpect.EOF:
                assert holds(), self.text
                return

    def until_end(self) -> None:
        """Reads what it prints until it ends."""
        with suppress(pexpect.EOF):
            while True:
                self.feed(self.process.read_nonblocking(65536, _LIMIT_S))

    def feed(self, text: str) -> None:
        self.raw += text
        self._stream.feed(text)

    @property
    def text(self) -> str:
        return "\n".join(self.screen.display)

    def shows(self, *texts: str) -> None:
        self.until(lambda: all(text in self.text for text in texts))

    def exit_code(self) -> int | None:
        """Waits for its end, which leaves the terminal as it was."""
        self.until_end()
        assert termios.tcgetattr(self.process.child_fd) == self.modes
        self.process.close()
        # The other screen, and a hidden cursor, are switched on once and off again.
        for on, off in (("\x1b[?1049h", "\x1b[?1049l"), ("\x1b[?25l", "\x1b[?25h")):
            assert self.raw.count(on) == self.raw.count(off) == 1
            assert self.raw.index(on) < self.raw.index(off)
        code: int | None = self.process.exitstatus
        return code


class Source:
    """The documents of a fake node's stream: each that `say` is given, and again the last one."""

    def __init__(self, node: FakeNode) -> None:
        self._said: queue.Queue[Any] = queue.Queue()
        node.answers["GET /sgl_ext/state"] = state_of()
        node.live = self._documents

    def say(self, document: Any) -> None:
        """None ends the stream."""
        self._said.put(document)

    def _documents(self) -> Iterator[Any]:
        while (document := self._said.get()) is not None:
            yield document


@pytest.fixture
def node() -> Iterator[FakeNode]:
    with fake_node() as started:
        yield started


def model(name: str) -> dict[str, Any]:
    return state_of(node=state_of()["node"] | {"model": name})


def test_it_shows_the_latest_state_in_the_size_of_the_terminal(node: FakeNode) -> None:
    source = Source(node)
    terminal = Terminal(node.url)
    terminal.shows("ok  tiny", "engine-0  ready", "sessions", "tenants", "q: quit")
    source.say(model("\x1b]0;owned\x07[red]small"))
    terminal.shows("?]0;owned?[red]small")
    assert "\x07" not in terminal.raw
    terminal.screen.resize(10, 60)
    terminal.process.setwinsize(10, 60)
    terminal.until(lambda: terminal.screen.display[0].endswith("q: quit"))
    terminal.process.send("q")
    assert terminal.exit_code() == 0
    source.say(None)


@pytest.mark.parametrize(
    ("end", "code"),
    [
        (lambda terminal: terminal.process.sendintr(), 0),
        (lambda terminal: terminal.process.kill(signal.SIGTERM), 143),
        (lambda terminal: terminal.process.kill(signal.SIGHUP), 129),
    ],
    ids=["Ctrl-C", "SIGTERM", "SIGHUP"],
)
def test_it_leaves_the_terminal_as_it_was(
    node: FakeNode, end: Callable[[Terminal], None], code: int
) -> None:
    source = Source(node)
    terminal = Terminal(node.url)
    terminal.shows("q: quit")
    end(terminal)
    assert terminal.exit_code() == code
    source.say(None)


def test_it_connects_again_when_the_balancer_is_back() -> None:
    with fake_node() as node:
        source = Source(node)
        terminal = Terminal(node.url)
        source.say(model("first"))
        terminal.shows("first")
        source.say(None)
        terminal.shows("ended the stream")
        node.live = lambda: iter(())
    terminal.shows("no node answers")
    with closing(terminal.process), fake_node(urlsplit(node.url).port or 0) as again:
        source = Source(again)
        source.say(model("second"))
        terminal.shows("ok  second")
        terminal.process.send("q")
        assert terminal.exit_code() == 0
        source.say(None)


def test_a_node_that_is_not_there_leaves_the_terminal_alone(node: FakeNode) -> None:
    node.answers["GET /sgl_ext/state"] = Refused(401, "Invalid or missing API key.")
    terminal = Terminal(node.url)
    terminal.until_end()
    terminal.process.close()
    assert terminal.process.exitstatus == 1
    assert "needs a key" in terminal.raw
    assert "\x1b" not in terminal.raw


@pytest.mark.parametrize("no_color", [False, True])
def test_colours_are_for_terminals_that_want_them(node: FakeNode, no_color: bool) -> None:
    node.answers["GET /sgl_ext/state"] = state_of()
    environment = {"PATH": "/usr/bin:/bin", "TERM": "xterm"} | (
        {"NO_COLOR": "1"} if no_color else {}
    )
    said = pexpect.run(
        f"{sys.executable} -m sgl_ext status --url {node.url}",
        cwd=str(ROOT),
        encoding="utf-8",
        env=environment,
    )
    assert "ready" in said
    assert ("\x1b[32m" in said) is not no_color
