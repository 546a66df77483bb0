"""What can go wrong with any verb is one line, and an exit code that says whose fault it is."""

from __future__ import annotations

import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

from sgl_ext.cli.node import Node
from tests.cli.conftest import Run
from tests.cli.fake_node import FakeNode, Refused, state_of

ROOT = Path(__file__).parents[2]
NOBODY = "http://127.0.0.1:1"
VERBS = [
    ["status"],
    ["restart", "--rolling"],
    ["drain", "engine-0"],
    ["add", "http://127.0.0.1:30001"],
    ["explain", "some-id"],
    ["pins"],
    ["pins", "delete", "d9b8"],
    ["clients"],
    ["reload"],
]


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: " ".join(verb[:2]))
def test_a_node_that_is_not_there_is_one_line(run: Run, verb: list[str]) -> None:
    code, out, err = run(*verb, "--url", NOBODY)
    assert (code, out) == (1, "")
    assert err == (
        f"sgl-ext: no node answers at {NOBODY} (Connection refused): is it running? "
        "Start one: sgl-ext serve --model-path PATH\n"
    )


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: " ".join(verb[:2]))
def test_a_node_of_another_version_is_one_line(node: FakeNode, run: Run, verb: list[str]) -> None:
    code, out, err = run(*verb)
    assert (code, out) == (1, "")
    assert "it runs another version of sgl-ext, or is no node of sgl-ext" in err
    assert err.count("\n") == 1


def test_a_missing_key_is_not_called_wrong(
    node: FakeNode, run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    node.answers["GET /sgl_ext/state"] = Refused(401, "Invalid or missing API key.")
    code, _, err = run("status")
    assert code == 1
    assert "needs a key: give --key file:PATH or env:VARIABLE, or set SGL_EXT_API_KEY" in err
    monkeypatch.setenv("SGL_EXT_API_KEY", "secret-1")
    code, _, err = run("status")
    assert (code, "does not accept this key" in err) == (1, True)
    (tmp_path / "key").write_text("secret-2\n")
    code, _, err = run("status", "--key", f"file:{tmp_path}/key")
    assert (code, "secret" in err) == (1, False)
    assert node.keys == [None, "Bearer secret-1", "Bearer secret-2"]


def test_what_the_node_says_is_shown_in_one_line_without_control_characters(
    node: FakeNode, run: Run
) -> None:
    node.answers["POST /sgl_ext/reload"] = Refused(400, "limits.toml:\n [tenants.a] x\x1b[2J = 1")
    code, _, err = run("reload")
    assert code == 1
    assert err == f"sgl-ext: {node.url}: limits.toml: [tenants.a] x?[2J = 1\n"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["statsu"], "No such command 'statsu'. Did you mean 'status'"),
        (["status", "--jsno"], "No such option: --jsno (Possible options: --json)"),
        (["status", "--key", "sk-123"], "--key: must be file:PATH or env:VARIABLE"),
        (["status", "--key", "env:SGL_EXT_NONE"], "--key='env:SGL_EXT_NONE': cannot be read"),
        (["status", "--url", "ftp://host"], "--url='ftp://host': must be http://HOST:PORT"),
        (["status", "--url", "http://host:port"], "must be http://HOST:PORT"),
        (["drain"], "drain: Missing argument 'ENGINE' (see sgl-ext drain --help)"),
        (["restart"], "give one ENGINE, or --rolling"),
        (["restart", "engine-0", "--rolling"], "give one ENGINE, or --rolling"),
        (["restart", "engine-0", "engine-1"], "flags of the engines go after --"),
        (["restart", "--", "--tp", "2"], "give one ENGINE, or --rolling"),
        (["pins", "delete"], "give PREFIX ... or --session ID"),
        (["completion", "tcsh"], "is not one of 'bash', 'zsh', 'fish'"),
        (["top"], "needs a terminal"),
        (["keys"], "sgl-ext keys: the following arguments are required: FILE"),
        (["recipes", "--wrote", "x"], "sgl-ext recipes: unrecognized arguments: --wrote"),
        (["size"], "sgl-ext size: the following arguments are required: --model"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_command_line_is_one_line_and_exit_code_2(
    run: Run, argv: list[str], said: str
) -> None:
    code, out, err = run(*argv)
    assert (code, out) == (2, "")
    assert said in err
    assert err.startswith("sgl-ext")
    assert err.count("\n") == 1
    assert "sk-123" not in err


def test_a_url_needs_no_scheme() -> None:
    assert Node("box:30000").url == "http://box:30000"
    assert Node("https://box/node/").url == "https://box/node"


def test_no_redirect_takes_the_key_elsewhere(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class Elsewhere(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(302)
            self.send_header("location", "/other")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    monkeypatch.setenv("SGL_EXT_API_KEY", "secret")
    with HTTPServer(("127.0.0.1", 0), Elsewhere) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        code, _, err = run("status", "--url", f"http://127.0.0.1:{server.server_port}")
        server.shutdown()
        thread.join()
    assert code == 1
    assert "status 302" in err
    assert asked == ["/sgl_ext/state"]


def test_a_reader_that_leaves_is_no_traceback(node: FakeNode) -> None:
    node.answers["GET /sgl_ext/state"] = state_of(pins=[{"prefix": "x" * 200_000}])
    command = f"{sys.executable} -m sgl_ext status --json --url {node.url} | head -c 1"
    done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("{", "")


def test_a_verb_imports_neither_sglang_nor_an_event_loop(node: FakeNode) -> None:
    node.answers["GET /sgl_ext/state"] = state_of()
    program = (
        "import sys; from sgl_ext.cli.app import main\n"
        "try: main(['status', '--url', sys.argv[1]])\n"
        "finally: print({'sglang', 'torch', 'aiohttp', 'asyncio'} & set(sys.modules))"
    )
    command = [sys.executable, "-c", program, node.url]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "set()", done.stderr
