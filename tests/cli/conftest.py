"""A node to command, and the command itself, run in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from sgl_ext.cli.app import main
from tests.cli.fake_node import FakeNode, fake_node

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNode]:
    """A fake node that verbs talk to by default."""
    monkeypatch.delenv("SGL_EXT_API_KEY", raising=False)
    with fake_node() as started:
        monkeypatch.setenv("SGL_EXT_URL", started.url)
        yield started


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command line. Returns its exit code, what it printed, and its errors."""

    def begin(*argv: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(list(argv))
        said = capsys.readouterr()
        code = ended.value.code
        assert isinstance(code, int | None), code
        return code or 0, said.out, said.err

    return begin
