"""The arms of a bench: which engines it starts, with which model and settings, and what may be
expected of them.

By default these are engines on the CPU with a small local model. `--config` and `--model` select
others, such as engines on a GPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import requests
from sgl_ext_cpu.node import (
    CPU_CONFIG,
    Node,
    free_port,
    is_healthy,
    local_model,
    running_node,
    running_process,
)

from bench.lib.script import Size, parser_of
from sgl_ext.node.hardware import (
    CPU_PLATFORM,
    engine_command,
    engine_environment,
    find_hardware,
    named_platform,
)
from sgl_ext.settings.sources import launch_settings

T = TypeVar("T")


class Arm(NamedTuple):
    """What an arm of a comparison starts: our node, or SGLang without the plugin."""

    flags: tuple[str, ...] = ()
    is_ours: bool = False
    environment: Mapping[str, str] | None = None


OURS, STOCK = Arm(is_ours=True), Arm()


@dataclass(frozen=True)
class Engines:
    """are_exact: the same prompt has the same greedy answer in any batch.
    logs: where logs stay after the bench; None: where the bench has its other files.
    running: engines that run already, and outlive the bench, by the name of the arm: the fields of
        a `Node`. The flags of the bench are theirs already. An arm without an engine of its name
        has the one named `ours` or `stock`.
    """

    model: Path
    config: Path = CPU_CONFIG
    are_exact: bool = True
    logs: Path | None = None
    running: Mapping[str, Any] = field(default_factory=dict)

    def ours(
        self, log_dir: Path, *flags: str, environment: Mapping[str, str] | None = None
    ) -> AbstractContextManager[Node]:
        """Starts our engine and its balancer."""
        if self.running:
            return nullcontext(self.running_node(log_dir.name, "ours"))
        return running_node(
            self.model, self._kept(log_dir), *flags, environment=environment, config=self.config
        )

    def stock(
        self, log_dir: Path, *flags: str, environment: Mapping[str, str] | None = None
    ) -> AbstractContextManager[Node]:
        """Starts SGLang without the plugin."""
        if self.running:
            return nullcontext(self.running_node(log_dir.name, "stock"))
        return stock_engine(
            self.model, self._kept(log_dir), *flags, environment=environment, config=self.config
        )

    @contextmanager
    def serving(
        self, arms: Mapping[str, Arm], *flags: str, folder: Path | None = None
    ) -> Iterator[dict[str, Node]]:
        """The nodes of these arms, which start at the same time, with the common flags and their
        own. folder: of their logs, by the arm's name. Raises the error of one that does not start.
        """
        with ExitStack() as stack:
            if folder is None:
                made = tempfile.TemporaryDirectory(prefix="sgl-ext-bench-")
                folder = Path(stack.enter_context(made))
            starts = {
                name: partial(
                    self.ours if arm.is_ours else self.stock,
                    folder / name,
                    *(*flags, *arm.flags),
                    environment=arm.environment,
                )
                for name, arm in arms.items()
            }
            yield stack.enter_context(running_arms(starts))

    def running_node(self, *names: str) -> Node:
        """The running engine of the first of these arms that has one; LookupError if none has."""
        name = next((name for name in names if name in self.running), "")
        if not name:
            raise LookupError(f"--running: no engine of {' or '.join(names)} runs")
        fields, process = self.running[name], cast(subprocess.Popen[bytes], None)
        return Node(fields["url"], tuple(fields["engines"]), process, Path(fields["log_dir"]))

    def _kept(self, log_dir: Path) -> Path:
        return log_dir if self.logs is None else self.logs / log_dir.name

    def on_cpu(self, *flags: str) -> tuple[str, ...]:
        """These flags if the engines run on the CPU platform, else none."""
        settings = launch_settings(["--config", str(self.config), "--model-path", str(self.model)])
        return flags if named_platform(settings) == CPU_PLATFORM else ()


@contextmanager
def stock_engine(
    model: Path,
    log_dir: Path,
    *flags: str,
    environment: Mapping[str, str] | None = None,
    config: Path = CPU_CONFIG,
) -> Iterator[Node]:
    """Starts it with the configuration and the flags that our engines get, and ends it.

    It has a session of its own, as each of our engines has: Linux shares the cores among sessions.
    `environment` adds to this process's variables.
    Raises RuntimeError with the end of its log if it does not come up.
    """
    settings = launch_settings(["--config", str(config), "--model-path", str(model), *flags])
    found, port = find_hardware(settings), free_port()
    command = engine_command(settings, found, port)
    command[command.index("-m") + 1] = "sglang.launch_server"
    own = engine_environment(settings, found, 0) | {"SGLANG_PLUGINS": "none"}
    url = f"http://127.0.0.1:{port}"
    with running_process(
        command,
        log_dir / "engine.log",
        partial(is_healthy, url),
        environment={**own, **(environment or {})},
        own_session=True,
    ) as process:
        yield Node(url, (url,), process, log_dir)


@contextmanager
def running_arms(
    starts: Mapping[str, Callable[[], AbstractContextManager[Node]]],
) -> Iterator[dict[str, Node]]:
    """The started node of each arm, by its name. Raises the error of one that does not start."""
    with ExitStack() as stack, ThreadPoolExecutor() as pool:
        starting = {
            name: pool.submit(lambda start: stack.enter_context(start()), start)
            for name, start in starts.items()
        }
        yield {name: node.result() for name, node in starting.items()}


def rotated(arms: Sequence[T], number: int) -> list[T]:
    """The arms in the order of round `number`, in which each begins in its turn."""
    first = number % len(arms)
    return [*arms[first:], *arms[:first]]


def page_size(node: Node) -> int:
    """The tokens of a page of the node's first engine, as the engine resolved it."""
    info = requests.get(f"{node.engines[0]}/server_info", timeout=60)
    info.raise_for_status()
    return int(info.json()["internal_states"][0]["page_size"])


def pool_tokens(node: Node) -> int:
    """The tokens that the KV cache of the node's first engine holds."""
    load = requests.get(f"{node.engines[0]}/v1/loads", params={"include": "core"}, timeout=60)
    load.raise_for_status()
    return int(load.json()["loads"][0]["max_total_num_tokens"])


def engine_parser(description: str | None) -> argparse.ArgumentParser:
    """The options of a bench whose engines can be chosen."""
    parser = parser_of(description)
    # For `bench.gpu`, where many benches share ten minutes.
    parser.add_argument(
        "--brief", dest="size", action="store_const", const="brief", help=argparse.SUPPRESS
    )
    parser.add_argument("--model", type=Path, help="a model directory (default: a local one)")
    parser.add_argument(
        "--config", type=Path, default=CPU_CONFIG, help="a settings file (default: launch/cpu.toml)"
    )
    parser.add_argument(
        "--batch-variant",
        action="store_true",
        help="a greedy answer may depend on the batch: count answers that differ, allow them",
    )
    parser.add_argument("--logs", type=Path, help="a folder for the engines' logs")
    parser.add_argument("--running", type=Path, help=argparse.SUPPRESS)
    return parser


def chosen(options: argparse.Namespace, default_model: str) -> Engines:
    """The engines that these options select. default_model: a size of the local model."""
    model = options.model or local_model(default_model)
    running = {} if options.running is None else json.loads(options.running.read_text())
    return Engines(model, options.config, not options.batch_variant, options.logs, running)


def model_of(size: Size, full: str) -> str:
    """The local model for runs of this size: `full`, or the tiny one for the smallest."""
    return "tiny" if size == "smallest" else full
