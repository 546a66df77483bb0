"""Other routers, each installed at one version when first needed, and run as a user would.

Each lives in a virtual environment of its own under `.models/peers/`, made
once a checkout. `nginx` is the system's, which `install_nginx` installs.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType

import requests
from sgl_ext_cpu.node import RunningServer, free_port, running_process
from sgl_ext_cpu.peers import install_package, run


@dataclass(frozen=True, slots=True)
class _Router:
    """A router from PyPI: its pinned version, its module, and the flags it is always given."""

    version: str
    module: str
    flags: tuple[str, ...]


_ROUTERS = {
    "sglang-router": _Router("0.3.2", "sglang_router.launch_router", ("--policy", "cache_aware")),
    "smg": _Router("1.13.0", "smg.launch_router", ("--policy", "cache_aware")),
    "vllm-router": _Router(
        "0.1.17", "vllm_router.launch_router", ("--policy", "sticky_least_loaded")
    ),
}


ROUTERS = tuple(_ROUTERS)


def install(name: str) -> Path:
    """The Python of the environment that holds this router: `sglang-router`, `smg`, `vllm-router`.

    Raises RuntimeError with the installer's output if that fails.
    """
    return install_package(name, _ROUTERS[name].version)


def install_nginx() -> None:
    """Installs the system's nginx where it is missing, without starting it.

    Raises RuntimeError if that fails, or if we may not.
    """
    if _nginx() is not None:
        return
    if os.geteuid() or shutil.which("apt-get") is None:
        raise RuntimeError("nginx is not on PATH, and only root can install it, with apt-get")
    run(["apt-get", "update", "-qq"])
    # Debian's package starts what it installs unless this says no.
    policy = Path("/usr/sbin/policy-rc.d")
    had_policy = policy.exists()
    if not had_policy:
        policy.write_text("#!/bin/sh\nexit 101\n")
        policy.chmod(0o755)
    try:
        run(["apt-get", "install", "-y", "-qq", "--no-install-recommends", "nginx-light"])
    finally:
        if not had_policy:
            policy.unlink()


def nginx_version() -> str | None:
    """The version of this machine's nginx; None if it has none."""
    binary = _nginx()
    if binary is None:
        return None
    said = subprocess.run([binary, "-v"], capture_output=True, text=True, check=False).stderr
    return said.strip().rpartition("/")[2].partition(" ")[0] or None


def router_versions() -> dict[str, str]:
    """The version of each router."""
    return {name: router.version for name, router in _ROUTERS.items()}


@contextmanager
def running_peer(
    name: str,
    worker_urls: Sequence[str],
    port: int | None = None,
    *,
    flags: Sequence[str] = (),
    cores: Collection[int] = (),
    env: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[RunningServer]:
    """A router (or `nginx`) in front of the workers, ready once every worker is.

    `flags` come after the pinned ones, so they win; `cores` pins the process. It ends with the
    context. A router gets `/health`, `/model_info`, `/server_info` and `/v1/models` from its
    workers: they must answer those, and 404 elsewhere. Raises RuntimeError with its log if it
    does not come up.
    """
    port = port or free_port()
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory(prefix=f"{name}-") as folder:
        if name == "nginx":
            command = _nginx_command(Path(folder), worker_urls, port)
        else:
            command = _router_command(name, worker_urls, port, flags)
        ready = partial(_ready, name, url, len(worker_urls))
        with running_process(
            command,
            Path(folder) / "log",
            ready,
            environment=env,
            cores=cores,
            end_signal=signal.SIGKILL,
        ) as process:
            yield RunningServer(url, process)


def _router_command(
    name: str, worker_urls: Sequence[str], port: int, flags: Sequence[str]
) -> list[str]:
    router = _ROUTERS[name]
    command = [str(install(name)), "-m", router.module]
    command += ["--host", "127.0.0.1", "--port", str(port), "--worker-urls", *worker_urls]
    # The default interval makes a router wait half a minute for workers that are there.
    command += ["--worker-startup-check-interval", "1", "--prometheus-port", str(free_port())]
    return [
        *command,
        "--log-level",
        "warning" if name == "vllm-router" else "warn",
        *router.flags,
        *flags,
    ]


def _nginx() -> str | None:
    return shutil.which("nginx", path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin")


_NGINX_CONF = """\
daemon off;
master_process off;
worker_processes 1;
pid {folder}/pid;
error_log stderr error;
events {{ worker_connections 4096; }}
http {{
    access_log off;
    tcp_nodelay on;
    client_max_body_size 64m;
    client_body_buffer_size 1m;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    keepalive_requests 1000000000;
    upstream workers {{ {servers} keepalive 512; keepalive_requests 1000000000; }}
    server {{
        listen 127.0.0.1:{port};
        location / {{
            proxy_pass http://workers;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_buffering off;
        }}
    }}
}}
"""


def _nginx_command(folder: Path, worker_urls: Sequence[str], port: int) -> list[str]:
    binary = _nginx()
    if binary is None:
        raise RuntimeError("nginx is not on PATH")
    servers = " ".join(f"server {url.removeprefix('http://')};" for url in worker_urls)
    conf = folder / "nginx.conf"
    conf.write_text(_NGINX_CONF.format(folder=folder, servers=servers, port=port))
    return [binary, "-p", str(folder), "-c", str(conf)]


def _ready(name: str, url: str, workers: int) -> bool:
    try:
        if name == "nginx":
            return requests.get(f"{url}/health", timeout=5).ok
        answer = requests.get(f"{url}/readiness", timeout=5)
        return answer.ok and answer.json()["healthy_workers"] == workers
    except requests.RequestException:
        return False
