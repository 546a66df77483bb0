"""Configuration: frozen dataclasses, filled from a TOML file and flags. Flags win.

A bad value raises ConfigError naming its key and the value, before any process starts.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, get_type_hints
from urllib.parse import urlsplit

import orjson

from sgl_ext.key_file import KeysError, read_keys
from sgl_ext.requests.headers import BILLING_HEADER, HeaderStrip
from sgl_ext.requests.priority import LIMIT
from sgl_ext.tenants import TENANT_NAME, Tenant

_TENANT_FLAG = "give NAME:max_priority=N,weight=W,cache_group=GROUP,pin_share=S, or some of these"
_GROUP_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


PREFILL_AHEAD = ("off", "asked", "auto")
IN_MEMORY = ":memory:"
"""In place of a file for `store`: what is kept ends with the balancer."""
LEAST_STORE_BYTES = 1 << 20
TENANT_ISOLATION = ("auto", "on", "off")


class ConfigError(Exception):
    """A configuration that cannot be: the message names the key and the value."""


@dataclass(frozen=True, slots=True)
class BalancerConfig:
    """The balancer's settings; each is a flag of both the balancer and the launcher."""

    host: str = "127.0.0.1"
    port: int = 30000
    processes: int = 1
    api_key: str | None = None
    keys: str | None = None
    tenant_isolation: str = "auto"
    max_body_bytes: int = 64 * 1024 * 1024
    drain_s: float = 30.0
    strip_headers: tuple[str, ...] = (BILLING_HEADER,)
    sort_tools: bool = False
    max_in_flight: int = 1024
    queue_limit: int = 1024
    queue_timeout_s: float = 60.0
    max_priority: int = 100
    tenants: tuple[Tenant, ...] = ()
    aging_s: float = 10.0
    preemption_threshold: int = 10
    request_log: str | None = None
    diagnose: bool = False
    store: str | None = None
    store_limit_bytes: int = 1 << 30
    response_ttl_s: float = 86_400.0
    workers: tuple[str, ...] = ()

    def check(self) -> None:
        """Raises ConfigError at the first value out of its range."""
        _require(1 <= self.port <= 65535, "port", self.port, "a port is 1 to 65535")
        _require(1 <= self.processes <= 64, "processes", self.processes, "must be 1 to 64")
        _require(self.max_body_bytes > 0, "max_body_bytes", self.max_body_bytes, "must be positive")
        _require(self.drain_s >= 0, "drain_s", self.drain_s, "must not be negative")
        _require(self.max_in_flight > 0, "max_in_flight", self.max_in_flight, "must be positive")
        _require(self.queue_limit >= 0, "queue_limit", self.queue_limit, "must not be negative")
        _require(
            self.queue_timeout_s > 0, "queue_timeout_s", self.queue_timeout_s, "must be positive"
        )
        _require(
            abs(self.max_priority) <= LIMIT, "max_priority", self.max_priority, "is out of range"
        )
        for tenant in self.tenants:
            _check_tenant(tenant)
        _require(0 <= self.aging_s < math.inf, "aging_s", self.aging_s, "must be 0 or more")
        threshold = self.preemption_threshold
        _require(threshold >= 1, "preemption_threshold", threshold, "must be at least 1")
        try:
            HeaderStrip(self.strip_headers)
        except ValueError as error:
            raise ConfigError(f"strip_header: {error}") from error
        limit = self.store_limit_bytes
        is_room = limit == 0 or limit >= LEAST_STORE_BYTES
        _require(is_room, "store_limit_bytes", limit, f"must be 0, or {LEAST_STORE_BYTES} or more")
        ttl_s = self.response_ttl_s
        _require(1 <= ttl_s < math.inf, "response_ttl_s", ttl_s, "must be at least 1")
        _require(self.store != "", "store", self.store, f"must be a path, or {IN_MEMORY}")
        for url in self.workers:
            _require(is_worker_url(url), "worker", url, "a worker is http://HOST:PORT")
        self.read_api_key()
        isolation = self.tenant_isolation
        _require(
            isolation in TENANT_ISOLATION, "tenant_isolation", isolation, "must be auto, on or off"
        )
        if self.keys is not None:
            try:
                read_keys(Path(self.keys))
            except KeysError as error:
                raise ConfigError(f"keys={self.keys!r}: {error}") from None

    @property
    def isolates_tenants(self) -> bool:
        """Whether tenants of different cache groups share no cached prefix."""
        is_auto = self.tenant_isolation == "auto"
        return self.keys is not None if is_auto else self.tenant_isolation == "on"

    def read_api_key(self) -> str | None:
        """The key itself, from the file or variable that `api_key` names."""
        if self.api_key is None:
            return None
        source, _, name = self.api_key.partition(":")
        # The value is not shown: someone may have put the key itself here.
        _require(
            source in ("file", "env") and name != "",
            "api_key",
            "...",
            "give file:PATH or env:VARIABLE, so that no key stands on a command line",
        )
        try:
            key = Path(name).read_text() if source == "file" else os.environ[name]
        except (OSError, KeyError) as error:
            raise ConfigError(f"api_key={self.api_key!r}: cannot be read: {error}") from error
        _require(key.strip() != "", "api_key", self.api_key, "is empty")
        return key.strip()

    def to_argv(self) -> list[str]:
        """These settings as the balancer's own command line."""
        argv = ["--host", self.host, "--port", str(self.port), "--processes", str(self.processes)]
        argv += ["--max-body-bytes", str(self.max_body_bytes), "--drain-s", str(self.drain_s)]
        if self.api_key is not None:
            argv += ["--api-key", self.api_key]
        if self.keys is not None:
            argv += ["--keys", self.keys]
        argv += ["--tenant-isolation", self.tenant_isolation]
        argv += ["--max-in-flight", str(self.max_in_flight), "--queue-limit", str(self.queue_limit)]
        argv += ["--queue-timeout-s", str(self.queue_timeout_s)]
        argv += ["--max-priority", str(self.max_priority), "--aging-s", str(self.aging_s)]
        argv += ["--preemption-threshold", str(self.preemption_threshold)]
        for tenant in self.tenants:  # in one word, as a name may begin with a dash
            has = f"max_priority={tenant.max_priority},weight={tenant.weight}"
            has += f",cache_group={tenant.cache_group}" if tenant.cache_group else ""
            has += f",pin_share={tenant.pin_share}" if tenant.pin_share is not None else ""
            argv += [f"--tenant={tenant.name}:{has}"]
        if self.sort_tools:
            argv += ["--sort-tools"]
        if self.request_log is not None:
            argv += ["--request-log", self.request_log]
        if self.diagnose:
            argv += ["--diagnose"]
        if self.store is not None:
            argv += ["--store", self.store]
        argv += ["--store-limit-bytes", str(self.store_limit_bytes)]
        argv += ["--response-ttl-s", str(self.response_ttl_s)]
        argv += ["--no-strip-headers"]
        for name in self.strip_headers:
            argv += ["--strip-header", name]
        for url in self.workers:
            argv += ["--worker", url]
        return argv


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """What to start: N engines with SGLang's own flags, and one balancer in front."""

    model_path: str
    instances: int = 1
    tp: int = 1
    start_timeout_s: float = 1800.0
    log_dir: str = ".run"
    pin_budget: float = 1 / 3
    pin_owner_share: float = 1.0
    pin_ttl_s: float = 300.0
    pin_max_ttl_s: float = 3600.0
    pin_unmarked_ttl_s: float = 0.0
    prefill_ahead: str = "auto"
    prefill_ahead_slice: int = 2048
    warm: str | None = None
    share: str | None = None
    token_cache_bytes: int = 256 * 1024 * 1024
    engine_args: tuple[str, ...] = ()
    balancer: BalancerConfig = BalancerConfig()

    @property
    def model_name(self) -> str:
        """What clients call the model: a local directory's own name, or the name as given."""
        path = Path(self.model_path)
        return path.resolve().name if path.is_dir() else self.model_path

    def check(self) -> None:
        """Raises ConfigError at the first value out of its range."""
        _require(self.instances >= 1, "instances", self.instances, "at least one engine")
        _require(self.tp >= 1, "tp", self.tp, "at least one GPU an engine")
        _require(
            self.start_timeout_s > 0, "start_timeout_s", self.start_timeout_s, "must be positive"
        )
        _require(0 <= self.pin_budget <= 1, "pin_budget", self.pin_budget, "must be 0 to 1")
        share = self.pin_owner_share
        _require(0 < share <= 1, "pin_owner_share", share, "must be above 0, and at most 1")
        longest = self.pin_max_ttl_s
        _require(1 <= longest < math.inf, "pin_max_ttl_s", longest, "must be at least 1")
        usual = self.pin_ttl_s
        _require(1 <= usual <= longest, "pin_ttl_s", usual, "must be 1 to pin_max_ttl_s")
        unmarked = self.pin_unmarked_ttl_s
        _require(
            unmarked == 0 or 1 <= unmarked <= longest,
            "pin_unmarked_ttl_s",
            unmarked,
            "must be 0, or 1 to pin_max_ttl_s",
        )
        ahead = self.prefill_ahead
        _require(ahead in PREFILL_AHEAD, "prefill_ahead", ahead, "must be off, asked or auto")
        slice_tokens = self.prefill_ahead_slice
        _require(slice_tokens >= 1, "prefill_ahead_slice", slice_tokens, "must be at least 1")
        if self.warm is not None:
            _require_prompts("warm", self.warm)
        if self.share is not None:
            is_apart = self.balancer.isolates_tenants
            reason = "all is shared: give keys, or tenant_isolation on"
            _require(is_apart, "share", self.share, reason)
            _require_prompts("share", self.share)
        held = self.token_cache_bytes
        _require(held >= 0, "token_cache_bytes", held, "must not be negative")
        taken = [flag for flag in ("--host", "--port", "--model-path") if flag in self.engine_args]
        _require(not taken, "engine", taken, "the launcher sets these")
        self.balancer.check()


def _require_prompts(key: str, path: str) -> None:
    """Raises ConfigError unless a file holds an object of JSON in each line."""
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"{key}={path!r}: cannot be read: {error}") from error
    for number, line in enumerate(lines, start=1):
        try:
            is_object = isinstance(orjson.loads(line), dict)
        except orjson.JSONDecodeError:
            is_object = False
        _require(is_object, f"{key}={path!r}: line {number}", line[:40], "is not a JSON object")


def is_worker_url(url: str) -> bool:
    """Whether a URL names a worker: http, a host, perhaps a port, and nothing else."""
    try:
        parts = urlsplit(url.rstrip("/"))
        named = parts.port is None or parts.port > 0
    except ValueError:
        return False
    return (
        named
        and parts.scheme == "http"
        and bool(parts.hostname)
        and not (parts.path or parts.query or parts.fragment or parts.username)
    )


def add_balancer_flags(parser: argparse.ArgumentParser) -> None:
    """The balancer's flags. Unset ones are None, so that a file's values show through."""
    parser.add_argument("--host", help="address to listen on (default 127.0.0.1)")
    parser.add_argument("--port", type=int, help="port to listen on (default 30000)")
    parser.add_argument("--processes", type=int, help="balancer processes on the port (1)")
    parser.add_argument("--api-key", help="file:PATH or env:VARIABLE; guards all but health")
    parser.add_argument("--keys", metavar="FILE", help="keys of tenants: python -m sgl_ext.keys")
    parser.add_argument(
        "--tenant-isolation", help="of cached prefixes: on, off, or auto, with --keys (auto)"
    )
    parser.add_argument("--max-body-bytes", type=int, help="largest request body (default 64 MiB)")
    parser.add_argument(
        "--sort-tools", action="store_true", default=None, help="put tools in the order of names"
    )
    parser.add_argument("--max-in-flight", type=int, help="requests a worker at once (1024)")
    parser.add_argument("--queue-limit", type=int, help="requests that may wait for room (1024)")
    parser.add_argument("--queue-timeout-s", type=float, help="how long one may wait (60)")
    parser.add_argument("--max-priority", type=int, help="of what clients may ask for (100)")
    parser.add_argument(
        "--tenant",
        action="append",
        metavar="NAME:max_priority=N,weight=W,cache_group=GROUP,pin_share=S",
        help="what one tenant may have instead (weight 1); repeat",
    )
    parser.add_argument("--aging-s", type=float, help="wait for one step of priority (10; 0: none)")
    parser.add_argument(
        "--preemption-threshold", type=int, help="steps above those whose memory is taken (10)"
    )
    parser.add_argument("--request-log", metavar="FILE", help="a line of JSON for each request")
    parser.add_argument(
        "--diagnose",
        action="store_true",
        default=None,
        help="find where prompts part (--request-log does, too)",
    )
    parser.add_argument(
        "--store", metavar="FILE", help="keeps responses and contexts (store.sqlite in the log dir)"
    )
    parser.add_argument("--store-limit-bytes", type=int, help="how large (1 GiB; 0: keeps nothing)")
    parser.add_argument("--response-ttl-s", type=float, help="from a response's last use (86400)")
    parser.add_argument("--drain-s", type=float, help="how long running requests may finish (30)")
    parser.add_argument(
        "--strip-header", action="append", metavar="NAME", help="also strip this leading header"
    )
    parser.add_argument("--no-strip-headers", action="store_true", default=None)


def balancer_config(
    base: BalancerConfig, flags: Mapping[str, Any], tenants: Mapping[str, Any] = {}
) -> BalancerConfig:
    """`base` with the given flags laid over it; `--strip-header` adds to the names of `base`,
    and `--tenant` to the tables of `tenants`, each value by itself."""
    values = {key: value for key, value in flags.items() if value is not None}
    names = () if values.pop("no_strip_headers", False) else base.strip_headers
    names += tuple(values.pop("strip_header", ()))
    tables = {name: _tenant_table(name, table) for name, table in tenants.items()}
    for text in values.pop("tenant", ()):
        name, table = _tenant_from_flag(text)
        tables[name] = tables.get(name, {}) | table
    known = {field.name for field in fields(BalancerConfig)}
    given = {key: value for key, value in values.items() if key in known}
    config = replace(base, strip_headers=tuple(dict.fromkeys(names)), **given)
    usual = {"max_priority": config.max_priority}
    named = tuple(Tenant(name, **(usual | table)) for name, table in tables.items())
    return replace(config, tenants=(*base.tenants, *named))


def _tenant_from_flag(text: str) -> tuple[str, dict[str, Any]]:
    """The name and the table that NAME:max_priority=N,weight=W is."""
    name, colon, rest = text.rpartition(":")
    pairs = [pair.partition("=") for pair in rest.split(",")]
    told = colon and all(equals for _, equals, _ in pairs)
    _require(bool(told), "tenant", text, _TENANT_FLAG)
    values = {key: value if key == "cache_group" else _number(value) for key, _, value in pairs}
    return name, _tenant_table(name, values)


def _tenant_table(name: str, table: Any) -> dict[str, Any]:
    """A table of one tenant, as keyword arguments of Tenant."""
    _require(isinstance(table, dict), f"tenants.{name}", table, "must be a table")
    values = _checked(Tenant, table, f"tenants.{name}.")
    if "weight" in values:
        _check_weight(name, values["weight"])
        values["weight"] = float(values["weight"])
    if "pin_share" in values:
        values["pin_share"] = float(values["pin_share"])
    return values


def _check_tenant(tenant: Tenant) -> None:
    name, ceiling = tenant.name, tenant.max_priority
    is_name = TENANT_NAME.fullmatch(name) is not None
    _require(is_name, "tenants", name, "a name is printable ASCII, as a header's value is")
    _require(abs(ceiling) <= LIMIT, f"tenants.{name}.max_priority", ceiling, "is out of range")
    _check_weight(name, tenant.weight)
    group = tenant.cache_group
    is_group = not group or _GROUP_NAME.fullmatch(group) is not None
    _require(is_group, f"tenants.{name}.cache_group", group, "is letters, digits, '.', '_', '-'")
    share = tenant.pin_share
    _require(share is None or 0 <= share <= 1, f"tenants.{name}.pin_share", share, "must be 0 to 1")


def _check_weight(name: str, weight: float) -> None:
    _require(weight > 0, f"tenants.{name}.weight", weight, "must be positive")
    _require(weight <= sys.float_info.max, f"tenants.{name}.weight", weight, "must be finite")


def _number(text: str) -> object:
    """The number that a text is, or the text if it is none."""
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


def launch_config(argv: Sequence[str]) -> LaunchConfig:
    """The launcher's configuration from its command line, and the file `--config` names.

    A flag that is not the launcher's goes to every engine as it stands, behind
    the file's `[engine]` table, and SGLang's own parser judges it.
    """
    parser = argparse.ArgumentParser(
        prog="python -m sgl_ext.launch",
        allow_abbrev=False,
        description="Start N SGLang engines with the extension and one balancer in front.",
        epilog="Any other flag goes to every engine: see python -m sglang.launch_server --help.",
    )
    parser.add_argument("--config", metavar="FILE", help="TOML; flags win over it")
    parser.add_argument("--model-path", help="the model directory or name")
    parser.add_argument("--instances", type=int, help="how many engines (default 1)")
    parser.add_argument("--tp", "--tp-size", type=int, help="GPUs an engine (default 1)")
    parser.add_argument("--start-timeout-s", type=float, help="limit for loading (default 1800)")
    parser.add_argument("--log-dir", help="where each process writes its log (default .run)")
    parser.add_argument("--pin-budget", type=float, help="share of the cache for pins (1/3)")
    parser.add_argument("--pin-owner-share", type=float, help="of which one tenant may have (1)")
    parser.add_argument("--pin-ttl-s", type=float, help="for marks that name no ttl (300)")
    parser.add_argument("--pin-max-ttl-s", type=float, help="longest ttl that is granted (3600)")
    parser.add_argument(
        "--pin-unmarked-ttl-s", type=float, help="pin requests without marks, too (0: do not)"
    )
    parser.add_argument(
        "--prefill-ahead", help="whose next turns: off, asked (by hint), or auto, growing ones too"
    )
    parser.add_argument(
        "--prefill-ahead-slice", type=int, help="tokens prefilled ahead at once (2048)"
    )
    parser.add_argument(
        "--warm",
        metavar="FILE",
        help="request bodies, one a line, that each new engine prefills",
    )
    parser.add_argument(
        "--share",
        metavar="FILE",
        help="request bodies, one a line, whose prompts tenants that are kept apart share",
    )
    parser.add_argument(
        "--token-cache-bytes",
        type=int,
        help="for what is known of text that comes again (256 MiB; 0: nothing)",
    )
    add_balancer_flags(parser)
    known, engine_args = parser.parse_known_args(argv)
    flags = vars(known)
    table = _read_toml(flags.pop("config"))
    file_args = _as_flags(_table(table, "engine"))
    filled = _filled(BalancerConfig, _table(table, "balancer"))
    balancer = balancer_config(filled, flags, _table(table, "tenants"))
    own = {field.name for field in fields(LaunchConfig)}
    values = _checked(LaunchConfig, _table(table, "launch"))
    values |= {key: value for key, value in flags.items() if key in own and value is not None}
    if table:
        raise ConfigError(f"{next(iter(table))}: not a table of the configuration file")
    if "model_path" not in values:
        raise ConfigError("model_path: missing; give --model-path or [launch] model_path")
    config = LaunchConfig(
        **{**values, "engine_args": (*file_args, *engine_args), "balancer": balancer}
    )
    config.check()
    return config


def _read_toml(path: str | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        return tomllib.loads(Path(path).read_text())
    except (OSError, ValueError) as error:  # no text, or text that is no TOML
        raise ConfigError(f"config={path!r}: {error}") from error


def _table(document: dict[str, Any], name: str) -> dict[str, Any]:
    table = document.pop(name, {})
    _require(isinstance(table, dict), name, table, "must be a table")
    return dict(table)


def _as_flags(table: Mapping[str, Any]) -> list[str]:
    """SGLang flags from TOML: true is a bare flag, false leaves it out, a list repeats values."""
    argv: list[str] = []
    for key, value in table.items():
        flag = "--" + key.replace("_", "-")
        if value is False:
            continue
        argv.append(flag)
        if value is not True:
            argv += [str(item) for item in value] if isinstance(value, list) else [str(value)]
    return argv


def _filled(cls: type[BalancerConfig], table: Mapping[str, Any]) -> BalancerConfig:
    values = _checked(cls, table)
    if "strip_headers" in values:
        values["strip_headers"] = tuple(values["strip_headers"])
    return cls(**values)


_FROM_FILE = {
    int: (int,),
    float: (int, float),
    bool: (bool,),
    str: (str,),
    str | None: (str,),
    float | None: (int, float),
    tuple[str, ...]: (list,),
}
_NOT_FROM_FILE = ("engine_args", "balancer", "workers", "tenants", "name")


def _checked(cls: type, table: Mapping[str, Any], at: str = "") -> dict[str, Any]:
    """`table` as keyword arguments of `cls`, each key known and each value of its type.

    at: what stands before its keys where an error names one.
    """
    hints = get_type_hints(cls)
    values = {key.replace("-", "_"): value for key, value in table.items()}
    for key, value in values.items():
        known = key in hints and key not in _NOT_FROM_FILE
        _require(known, at + key, value, "not a key of this table")
        wanted = _FROM_FILE[hints[key]]
        right = isinstance(value, wanted) and (isinstance(value, bool) is (hints[key] is bool))
        if isinstance(value, list):
            right = right and all(isinstance(item, str) for item in value)
        _require(right, at + key, value, f"must be {' or '.join(kind.__name__ for kind in wanted)}")
    return values


def _require(condition: bool, key: str, value: object, reason: str) -> None:
    if not condition:
        raise ConfigError(f"{key}={value!r}: {reason}")
