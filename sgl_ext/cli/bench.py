"""`sgl-ext bench`: a short load of SGLang's `bench_serving` against the running node."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from shlex import join
from subprocess import PIPE
from typing import Annotated

import typer

from sgl_ext.cli.node import HERE, Key, Node, NodeError, Url, UsageError, node_at
from sgl_ext.cli.show import warn

_GROUPS = 4
# It begins by printing its whole configuration, twice.
_NOISE = ("benchmark_args=", "Namespace(")


def bench(
    flags: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- FLAG", help="Flags of bench_serving, after --; they win."),
    ] = None,
    requests: Annotated[int, typer.Option(metavar="N", min=_GROUPS, help="Requests to send.")] = 16,
    tokenizer: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="The model's tokenizer. Default: the node's model path."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write its JSON result to this file.")
    ] = None,
    url: Url = HERE,
    key: Key = None,
) -> None:
    """Send a short load in groups with shared prefixes, and print latency and throughput.

    It needs the engine extra here, for SGLang's bench_serving and the tokenizer.
    """
    if find_spec("sglang") is None:
        raise UsageError("bench: SGLang is not installed here: pip install 'sgl-ext[engine]'")
    node = node_at(url, key)
    path = tokenizer or _model_path(node)
    if path.startswith(("/", ".")) and not Path(path).exists():
        problem = f"bench: the node's model is in {path}, which is not on this machine"
        raise UsageError(f"{problem}: give --tokenizer PATH")
    command = _command(node.url, path, node.model()["id"], requests)
    # Without a name it would write to this folder.
    command += ["--output-file", str(output or os.devnull)]
    command += flags or []
    warn(join(command))
    with subprocess.Popen(command, env=_environment(node.key), stdout=PIPE, text=True) as process:
        for line in process.stdout or ():
            if not line.startswith(_NOISE):
                print(line, end="")
    if process.returncode:
        raise NodeError(f"bench: bench_serving ended with exit code {process.returncode}")


def _environment(key: str | None) -> dict[str, str]:
    """Its environment, from which it takes the key. SGLang calls our own variables deprecated."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("SGL_EXT_")}
    return ours | {"PYTHONWARNINGS": "ignore"} | ({"OPENAI_API_KEY": key} if key else {})


def _command(url: str, path: str, name: str, requests: int) -> list[str]:
    shared = {
        "base-url": url,
        "backend": "sglang-oai-chat",
        "model": path,
        "served-model-name": name,
        "dataset-name": "generated-shared-prefix",
        "gsp-num-groups": _GROUPS,
        "gsp-prompts-per-group": requests // _GROUPS,
        "gsp-system-prompt-len": 512,
        "gsp-question-len": 32,
        "gsp-output-len": 8,
        "num-prompts": requests // _GROUPS * _GROUPS,
    }
    flags = [word for name, value in shared.items() for word in (f"--{name}", str(value))]
    return [
        sys.executable,
        "-m",
        "sglang.benchmark.serving",
        *flags,
        "--cache-report",
        "--disable-tqdm",
    ]


def _model_path(node: Node) -> str:
    try:
        return str(node.get("/model_info")["model_path"])
    except (TypeError, LookupError):
        raise NodeError(f"{node.url} does not name its model: give --tokenizer PATH") from None
