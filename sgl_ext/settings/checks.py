"""Rules for settings that no single field's range can state: relations, files and secrets."""

from collections.abc import Iterator, Mapping
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from sgl_ext.key_file import KeysError, read_keys
from sgl_ext.settings.engine_secret import EngineSecret, is_reachable
from sgl_ext.settings.schema import (
    BalancerSettings,
    LaunchSettings,
    PickerSettings,
    SettingsError,
)
from sgl_ext.settings.secret_source import read_source
from sgl_ext.settings.store_address import read_store
from sgl_ext.settings.values import LEAST_STORE_BYTES

NO_TLS = "plain HTTP to engines; encrypt the network between them: remote.md"
USE_RAY = (
    "SGLang's schedulers on Ray load no plugins (sglang#26723), so the extension would be missing "
    "there; for engines on Ray use ray-address: ray.md"
)
_WORKER_FORM = "must be http://HOST:PORT"

_Problem = tuple[str, object, str]  # the setting, its value, what is wrong with it


def check_launch(settings: LaunchSettings, names: Mapping[str, str] = {}) -> None:
    """Raises SettingsError for the first rule that a node's settings break.

    names: how the error calls a setting, so that it can name the flag or the file.
    """
    check_balancer(settings.balancer, names)
    _raise_first(_launch_problems(settings), names)


def check_balancer(settings: BalancerSettings, names: Mapping[str, str] = {}) -> None:
    """Raises SettingsError for the first rule that a balancer's settings break."""
    _raise_first(_balancer_problems(settings), names)
    if settings.store is not None:
        read_store(settings.store)
    read_api_key(settings.api_key)
    EngineSecret(settings.engine_secret)


def check_picker(settings: PickerSettings, names: Mapping[str, str] = {}) -> None:
    """Raises SettingsError for the first rule that a picker's settings break."""
    check_balancer(settings, names)
    _raise_first(_picker_problems(settings), names)


def _raise_first(problems: Iterator[_Problem], names: Mapping[str, str]) -> None:
    for name, value, problem in problems:
        raise SettingsError(f"{names.get(name, name)}={value!r}: {problem}")


def _balancer_problems(settings: BalancerSettings) -> Iterator[_Problem]:
    limit = settings.store_limit_bytes
    if 0 < limit < LEAST_STORE_BYTES:
        yield "store_limit_bytes", limit, f"must be 0, or at least {LEAST_STORE_BYTES}"
    for url in settings.workers:
        if not is_worker_url(url):
            yield "workers", url, worker_url_problem(url)
    if settings.keys is not None:
        try:
            read_keys(Path(settings.keys))
        except KeysError as error:
            yield "keys", settings.keys, str(error)


def _picker_problems(settings: PickerSettings) -> Iterator[_Problem]:
    cert, key = settings.picker_tls_cert, settings.picker_tls_key
    if (cert is None) is not (key is None):
        yield "picker_tls_cert", cert, "needs picker-tls-key, and the other way round"
    for name, path in (("picker_tls_cert", cert), ("picker_tls_key", key)):
        if path is not None and not Path(path).is_file():
            yield name, path, "there is no such file"
    if settings.picker_port == settings.port:
        yield "picker_port", settings.picker_port, "is the port of HTTP, too"
    for url in settings.workers:
        if address_of(url) is None:
            yield (
                "workers",
                url,
                "a gateway reaches engines by address: give one in place of a name",
            )


def _launch_problems(settings: LaunchSettings) -> Iterator[_Problem]:
    engine = settings.engine
    longest = engine.pin_max_ttl_s
    if engine.pin_ttl_s > longest:
        yield "pin_ttl_s", engine.pin_ttl_s, f"must be at most pin_max_ttl_s, which is {longest:g}"
    unmarked = engine.pin_unmarked_ttl_s
    if unmarked and not 1 <= unmarked <= longest:
        yield "pin_unmarked_ttl_s", unmarked, "must be 0, or a number from 1 to pin_max_ttl_s"
    for hint in settings.balancer.hints:
        if hint.ttl_s and not 1 <= hint.ttl_s <= longest:
            name = f"hints.{hint.of}.{hint.name}.ttl_s"
            yield name, hint.ttl_s, f"must be 0, or a number from 1 to {longest:g}, pin_max_ttl_s"
    shared = engine.shared_prefixes
    if shared and not settings.balancer.isolates_tenants:
        reason = "tenants share everything; set keys, or tenant_isolation to on"
        yield "shared_prefixes", shared, reason
    for name, path in (("warmup_requests", engine.warmup_requests), ("shared_prefixes", shared)):
        if path and (problem := _request_file_problem(path)):
            yield name, path, problem
    flags = {flag.partition("=")[0] for flag in settings.engine_args}
    if "--use-ray" in flags:
        yield "[engine]", ["--use-ray"], USE_RAY
    if taken := {"--host", "--port", "--model-path"} & flags:
        yield "[engine]", sorted(taken), "the launcher sets these itself; see engine-host"
    if taken := {"--ssl-certfile", "--ssl-keyfile"} & flags:
        yield "[engine]", sorted(taken), f"a balancer speaks {NO_TLS}"
    host = settings.engine_host
    if settings.ray_address is not None:
        if host != "127.0.0.1":
            yield "engine_host", host, "on Ray, each engine listens on the address of its node"
        if settings.balancer.engine_secret is None:
            reason = "engines on Ray listen on their nodes' addresses, so they need engine_secret"
            yield "ray_address", settings.ray_address, reason
    elif is_reachable(host) and settings.balancer.engine_secret is None:
        reason = "other machines can reach it, so it needs engine_secret: remote.md"
        yield "engine_host", host, reason


def _request_file_problem(path: str) -> str:
    """Why a file does not have a JSON object in each line; "" if it does."""
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as error:
        return f"cannot be read: {error}"
    for number, line in enumerate(lines, start=1):
        try:
            msgspec.json.decode(line, type=dict)
        except msgspec.DecodeError:
            return f"line {number} is not a JSON object: {line[:40]!r}"
    return ""


def is_worker_url(url: str) -> bool:
    """Whether a URL names a worker: http, a host, perhaps a port, and nothing else."""
    try:
        parts = urlsplit(url.rstrip("/"))
        has_port = parts.port is None or parts.port > 0
    except ValueError:
        return False
    extra = parts.path or parts.query or parts.fragment or parts.username
    return has_port and parts.scheme == "http" and bool(parts.hostname) and not extra


def address_of(url: str) -> str | None:
    """The address in a worker's URL, IP:PORT, as gateways know it; None if it has a name."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    try:
        version = ip_address(host).version
    except ValueError:
        return None
    return f"[{host}]:{parts.port or 80}" if version == 6 else f"{host}:{parts.port or 80}"


def worker_url_problem(url: str) -> str:
    """What is wrong with a URL that names no worker."""
    is_tls = url.lower().startswith("https:")
    return f"must be http://HOST:PORT; a balancer speaks {NO_TLS}" if is_tls else _WORKER_FORM


def read_api_key(source: str | None) -> str | None:
    """The key in the file or variable that `source` names. Raises SettingsError."""
    return None if source is None else read_source("api_key", source)
