"""Which engines a bench starts: their model, their settings, and what may be expected of them.

By default these are engines on the CPU with a small local model. `--config` and `--model` select
others, such as engines on a GPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import requests
from sgl_ext_cpu.node import CPU_CONFIG, Node, local_model, running_node

from bench.lib.script import Size, parser_of
from bench.lib.stock_engine import stock_engine
from sgl_ext.node.hardware import CPU_PLATFORM, named_platform
from sgl_ext.settings.sources import launch_settings


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
