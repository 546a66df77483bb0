"""A real kube-apiserver with its etcd, for as long as a block runs.

KUBEBUILDER_ASSETS names the folder of both programs, as for other projects' tests.
"""

from __future__ import annotations

import json
import os
import ssl
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from sgl_ext_cpu.node import free_port, running_process

from tests.waiting import HANG_S

ADMIN, USER = "admin-token", "balancer-token"
BALANCER = "system:serviceaccount:serving:balancer"


def assets() -> Path | None:
    """The folder of the programs, None if there is none."""
    folder = Path(os.environ.get("KUBEBUILDER_ASSETS", "/usr/local/kubebuilder/bin"))
    return folder if all((folder / name).exists() for name in ("kube-apiserver", "etcd")) else None


class Cluster:
    """An API server without anything behind it: objects stay as they are written."""

    def __init__(self, url: str, certificate: Path, store: str) -> None:
        self.url = url
        self.certificate = certificate
        self._store = store

    def request(self, method: str, path: str, body: Any = None, token: str = ADMIN) -> Any:
        """Sends JSON and returns the answer's. Raises HTTPError."""
        request = urllib.request.Request(
            self.url + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"authorization": f"Bearer {token}", "content-type": "application/json"},
        )
        context = ssl.create_default_context(cafile=str(self.certificate))
        context.check_hostname = False
        with urllib.request.urlopen(request, timeout=HANG_S, context=context) as answer:
            return json.load(answer)

    def compact(self) -> None:
        """Lets etcd forget all changes up to now."""
        revision = self._etcd("range", {"key": "AA=="})["header"]["revision"]
        self._etcd("compaction", {"revision": revision, "physical": True})

    def _etcd(self, path: str, body: Any) -> Any:
        data = json.dumps(body).encode()
        with urllib.request.urlopen(f"{self._store}/v3/kv/{path}", data, timeout=HANG_S) as answer:
            return json.load(answer)

    def is_ready(self) -> bool:
        try:
            self.request("GET", "/api/v1/namespaces/default")
        except OSError:
            return False
        return True


@contextmanager
def running_cluster(folder: Path) -> Iterator[Cluster]:
    """Starts etcd and kube-apiserver with their data in `folder`."""
    programs = assets()
    assert programs is not None, "ask assets() first"
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.TraditionalOpenSSL,
        serialization.NoEncryption(),
    )
    (folder / "key").write_bytes(pem)
    (folder / "tokens").write_text(f'{ADMIN},admin,1,system:masters\n{USER},"{BALANCER}",2\n')
    store, port = free_port(), free_port()
    etcd = [str(programs / "etcd"), "--data-dir", str(folder / "etcd")]
    etcd += ["--unsafe-no-fsync", "--listen-peer-urls", "http://127.0.0.1:0"]
    for flag in ("--listen-client-urls", "--advertise-client-urls"):
        etcd += [flag, f"http://127.0.0.1:{store}"]
    server = [str(programs / "kube-apiserver"), "--etcd-servers", f"http://127.0.0.1:{store}"]
    server += ["--cert-dir", str(folder / "certificates"), "--secure-port", str(port)]
    server += ["--bind-address", "127.0.0.1", "--service-cluster-ip-range", "10.0.0.0/24"]
    server += ["--token-auth-file", str(folder / "tokens"), "--authorization-mode", "RBAC"]
    server += ["--service-account-issuer", "https://kubernetes.default.svc"]
    for flag in ("--service-account-key-file", "--service-account-signing-key-file"):
        server += [flag, str(folder / "key")]
    # Without its cache it forgets a version as soon as etcd does.
    server += ["--disable-admission-plugins", "ServiceAccount", "--watch-cache=false"]
    version = subprocess.run([server[0], "--version"], capture_output=True, text=True, check=True)
    if " v1.20." in version.stdout:
        server += ["--feature-gates", "EndpointSliceTerminatingCondition=true"]
    certificate = folder / "certificates" / "apiserver.crt"
    address = f"http://127.0.0.1:{store}"
    cluster = Cluster(f"https://127.0.0.1:{port}", certificate, address)
    with ExitStack() as stack:
        log = folder / "etcd.log"
        stack.enter_context(running_process(etcd, log, lambda: "ready to serve" in log.read_text()))
        stack.enter_context(running_process(server, folder / "server.log", cluster.is_ready))
        yield cluster
