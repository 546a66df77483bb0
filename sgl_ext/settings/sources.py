"""Reads settings from where they are given: flags, a TOML file and, for a child, its launcher.

A flag wins over the file. A list's flag adds to the file's list, which `--no-...` empties.
argparse and msgspec take 64 ms to import; tyro takes 151, cyclopts 155 and pydantic-settings 350.
"""

import argparse
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from ipaddress import ip_address
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn, TypeVar
from urllib.parse import urlsplit

import msgspec
from msgspec import structs

from sgl_ext.arguments import Arguments, plain_error
from sgl_ext.key_file import KeysError, read_keys
from sgl_ext.reading.client import HARNESSES
from sgl_ext.recipes import settings_file
from sgl_ext.settings.certificates import certificate_of
from sgl_ext.settings.fields import TABLES, Field, changed, fields_of, with_unit
from sgl_ext.settings.schema import (
    HINTED,
    LEAST_STORE_BYTES,
    Alias,
    BalancerSettings,
    DefaultHint,
    EngineSettings,
    LaunchSettings,
    Model,
    PickerSettings,
    ServedModel,
    Settings,
    SettingsError,
    Tenant,
    name_of_path,
)
from sgl_ext.settings.secrets import EngineSecret, is_reachable, read_api_key, read_store

B = TypeVar("B", bound=BalancerSettings)
NO_TLS = "plain HTTP to engines; encrypt the network between them: docs/guide/fleet.md"
USE_RAY = (
    "SGLang's schedulers on Ray load no plugins (sglang#26723), so the extension would be missing "
    "there; for engines on Ray use ray-address: docs/guide/fleet.md"
)
GROUPS: Mapping[str, Sequence[str]] = {
    "The model and its engines": (
        *("model_path", "instances", "tp", "platform", "engine_host", "start_timeout_s"),
        *("restart_drain_s", "shared_tier_bytes", "disk_tier", "disk_tier_bytes"),
        *("compile_timeout_s", "untested_sglang"),
    ),
    "Address, keys and tenants": (
        *("host", "port", "insecure", "processes", "tls_cert", "tls_key", "api_key", "keys"),
        *("tenant_isolation", "max_priority", "engine_secret", "shared_prefixes"),
    ),
    "Queue and placement": (
        *("max_in_flight", "queue_limit", "queue_timeout_s", "agent_hold_s", "aging_s"),
        *("preemption_threshold", "preemption_grace_s", "learn_speeds", "index_limit_bytes"),
    ),
    "Clients": (
        *("max_body_bytes", "byte_budget", "max_connections", "first_byte_s", "resend_s"),
        *("drain_s", "drain_min_s", "warm_timeout_s"),
    ),
    "Pins and prefill ahead": (
        *("pin_budget", "host_pin_budget", "pin_owner_share", "pin_ttl_s", "pin_max_ttl_s"),
        *("pin_unmarked_ttl_s", "prefill_ahead", "prefill_ahead_slice_tokens"),
        *("prefill_ahead_evictable_share", "draft_from_context", "warmup_requests"),
    ),
    "Prompts": (
        *("strip_headers", "sort_tools", "move_volatile_lines", "keep_tools"),
        *("sort_schema_keys", "token_cache_bytes"),
    ),
    "Logs, traces and the store": (
        *("log_dir", "log_limit_bytes", "log_format", "log_level", "request_log"),
        *("request_log_limit_bytes", "request_log_age_s", "hash_sessions", "diagnose"),
        *("otlp_endpoint", "trace_share", "store", "store_limit_bytes", "response_ttl_s"),
    ),
    "Several machines": (
        *("workers_from", "ray_address", "ray_fleet", "ray_drain_s", "ray_keep_engines"),
    ),
}
"""The flags of a node in the order of `serve --help`."""
# Flags by which a setting is known beside its own.
_ALSO = {"tp": ("tp-size", "tensor-parallel-size"), "max_body_bytes": ("max-body",)}
_CONFIG_HELP = "TOML file, or the name of one that comes with sgl-ext: gpu, cpu. Flags win over it."
_TENANT_FORM = "NAME:" + ",".join(f"{key}={at.metavar}" for key, at in TABLES["tenants"].items())


def launch_settings(argv: Sequence[str]) -> LaunchSettings:
    """The launcher's settings from its command line and the file that `--config` names.

    A flag that is not the launcher's goes to every engine unchanged, after the flags of the
    file's `[engine]` table, and SGLang's own parser judges it. SGLang's names for `tp` are the
    launcher's, too. Raises SettingsError.
    """
    return _launch_settings(argv, needs_model=True)[0]


def sourced_settings(argv: Sequence[str]) -> tuple[LaunchSettings, Mapping[str, str]]:
    """As `launch_settings`, with the place of each setting that is given: its flag, or file, table
    and key. A model need not be given."""
    return _launch_settings(argv, needs_model=False)


def _launch_settings(
    argv: Sequence[str], *, needs_model: bool
) -> tuple[LaunchSettings, Mapping[str, str]]:
    parser = _parser("sgl-ext serve", "Start SGLang engines with one balancer in front of them.")
    parser.epilog = (
        "SECONDS can have a unit, as 20s, 5min, 1h or 2d, and BYTES, as 64MB or 1GB. "
        "Any other flag goes to every engine: see python -m sglang.launch_server --help"
    )
    parser.add_argument("--config", metavar="FILE", help=_CONFIG_HELP)
    own = {**TABLES["launch"], **TABLES["balancer"]}
    for title, names in GROUPS.items():
        _add_flags(parser.add_argument_group(title), {name: own[name] for name in names})
    known, engine_args = parser.parse_known_args(argv)
    flags, given = vars(known), _Given()
    config = flags.pop("config", None)
    file_args = given.read_file(None if config is None else settings_file(config))
    given.read_flags(flags, {**TABLES["launch"], **TABLES["balancer"]})
    models = given.models
    _take_models(given, config or "")
    if not needs_model:
        given.values.setdefault("model_path", "")
    if "model_path" not in given.values:
        where = (
            "a file with [launch] model-path"
            if config is None
            else f"{config}: [launch] model-path, or a [[models]]"
        )
        near = get_close_matches("--model-path", [word.partition("=")[0] for word in argv], 1)
        meant = f"; {near[0]} is another flag" if near else ""
        raise SettingsError(f"model_path: missing; give --model-path PATH, or {where}{meant}")
    settings = LaunchSettings(
        **given.values_of(LaunchSettings),
        engine_args=(*file_args, *engine_args),
        engine=EngineSettings(**given.values_of(EngineSettings)),
        balancer=BalancerSettings(
            **given.values_of(BalancerSettings),
            served=served_of(models),
        ),
    )
    check_launch(settings, given.names)
    return settings, given.names


DEFAULT = "default"


def setting_rows(settings: LaunchSettings, names: Mapping[str, str]) -> list[dict[str, Any]]:
    """Each setting with its key, its value, and the flag, or the file and table, that gives it;
    without secrets. names: as of `sourced_settings`."""
    given = changed(settings)
    rows: list[dict[str, Any]] = []
    for name, field in {**TABLES["launch"], **TABLES["balancer"]}.items():
        value = given.pop(name) if name in given else field.shown_default
        source = _place(names.get(name, DEFAULT))
        rows.append({"key": name.replace("_", "-"), "value": value, "source": source})
    several = {
        "tenants": ("tenants", given.get("tenants")),
        "hints": ("hints", [f"{hint.of}.{hint.name}" for hint in settings.balancer.hints]),
        "aliases": ("aliases", [f"{a.name} = {a.model}" for a in settings.balancer.aliases]),
        "engine-args": ("engine", given.get("engine_args")),
    }
    for key, (table, value) in several.items():
        if value:
            rows.append({"key": key, "value": value, "source": f"[{table}]"})
    for model in settings.models:
        values = changed(model) | {"engine_args": changed(model).get("engine_args")}
        for name, value in values.items():
            if name != "name" and value is not None:
                key = f"{model.name}: {name.replace('_', '-')}"
                rows.append({"key": key, "value": value, "source": "[[models]]"})
    return rows


def _place(source: str) -> str:
    """The file and table of a source without its key, which the row has; a flag as it is."""
    place, end, _ = source.rpartition("]")
    return place + end if end else source


def balancer_settings(argv: Sequence[str]) -> BalancerSettings:
    """The balancer's settings: its flags, over its file and what a launcher gave it. Of a file for
    a whole node only the balancer's tables count. Raises SettingsError."""
    parser = _parser("python -m sgl_ext.balancer.serve", "Serve in front of engines.")
    settings, names = _read(argv, parser, BalancerSettings)
    check_balancer(settings, names)
    return settings


def picker_settings(argv: Sequence[str]) -> PickerSettings:
    """The settings of a balancer that a gateway asks, as `balancer_settings`."""
    parser = _parser("python -m sgl_ext.epp", "Tell a gateway where each request goes.")
    settings, names = _read(argv, parser, PickerSettings)
    check_picker(settings, names)
    return settings


def _read(
    argv: Sequence[str], parser: argparse.ArgumentParser, cls: type[B]
) -> tuple[B, Mapping[str, str]]:
    """The settings, and what an error calls each of them."""
    parser.add_argument("--config", metavar="FILE", help="TOML file. Flags win over it.")
    fields = fields_of(cls)
    _add_flags(parser, fields)
    flags, given = vars(parser.parse_args(argv)), _Given()
    given.read_file(flags.pop("config", None))
    given.read_flags(flags, fields)
    base, values = cls.from_environment(), given.values_of(cls)
    if given.models:
        values["served"] = served_of(given.models)
    return structs.replace(base, **values), given.names


def served_of(models: Sequence[Model]) -> tuple[ServedModel, ...]:
    """What a balancer needs to know of a node's models."""
    return tuple(ServedModel(model.name, model.fallback or "") for model in models)


def names_file(argv: Sequence[str]) -> bool:
    """Whether a command line names a file with settings."""
    return any(word.partition("=")[0] == "--config" for word in argv)


def config_of(argv: Sequence[str]) -> str:
    """The file that a command line names; "" if it names none."""
    parser = _parser("", "")
    parser.add_argument("--config", default="")
    return str(parser.parse_known_args(argv)[0].config)


class _Given:
    """The values that were given, and what an error calls each of them."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.names: dict[str, str] = {}
        self._tenants: dict[str, dict[str, Any]] = {}
        self._hints: list[DefaultHint] = []
        self.models: list[Model] = []

    def values_of(self, cls: type[Settings]) -> dict[str, Any]:
        """The values of a class's fields, as keyword arguments."""
        values = dict(self.values)
        if self._tenants:
            usual = {
                "max_priority": values.get(
                    "max_priority", TABLES["balancer"]["max_priority"].default
                )
            }
            tenants = self._tenants.items()
            values["tenants"] = tuple(Tenant(name, **(usual | table)) for name, table in tenants)
        if self._hints:
            values["hints"] = tuple(self._hints)
        return {name: value for name, value in values.items() if name in cls.__struct_fields__}

    def read_file(self, path: str | None) -> list[str]:
        """Reads a TOML file; returns the flags for SGLang that it holds."""
        try:
            document = {} if path is None else tomllib.loads(Path(path).read_text())
        except (OSError, ValueError) as error:  # it cannot be read, or is not TOML
            raise SettingsError(f"config={path!r}: {error}") from error
        for name, table in document.items():
            if name not in TABLES:
                raise SettingsError(f"{path}: [{name}]: unknown table{_nearest(name, TABLES)}")
            if name == "models":
                self._add_models(table, f"{path}: ")
                continue
            _require_table(table, f"{path}: {name}")
            if name == "tenants":
                for tenant, limits in table.items():
                    _require_table(limits, f"{path}: tenants.{tenant}")
                    self._add_tenant(tenant, limits, f"{path}: ")
            elif name == "hints":
                self._add_hints(table, f"{path}: ")
            elif name == "aliases":
                self._add_aliases(table, f"{path}: ")
            elif name != "engine":
                self.values |= self._converted(table, TABLES[name], f"{path}: [{name}] ")
        engine = dict(document.get("engine", {}))
        for key in [key for key in engine if key.replace("_", "-") in ("tp", *_ALSO["tp"])]:
            called = f"{path}: [engine] {key}"
            if "tp" in self.values:
                raise SettingsError(f"{called}: {self.names['tp']} is the same; keep one of them")
            self.values["tp"] = TABLES["launch"]["tp"].convert(engine.pop(key), called)
            self.names["tp"] = called
        return _as_flags(engine)

    def read_flags(self, flags: dict[str, Any], fields: Mapping[str, Field]) -> None:
        """Lays flags over what was read before."""
        for text in flags.pop("tenant", ()):
            name, colon, rest = text.rpartition(":")
            pairs = [pair.partition("=") for pair in rest.split(",")]
            if not colon or not all(equals for _, equals, _ in pairs):
                raise SettingsError(f"--tenant={text!r}: must be {_TENANT_FORM}")
            limits = {key: value for key, _, value in pairs}
            self._add_tenant(name, limits, "--tenant ", is_text=True)
        for name, field in fields.items():
            if flags.get("no_" + name):
                self.values[name] = ()
            if name in flags:
                value = field.convert(flags[name], field.flag, is_text=True)
                if field.is_list:
                    value = tuple(dict.fromkeys((*self.values.get(name, field.default), *value)))
                self.values[name], self.names[name] = value, field.flag

    def _add_tenant(
        self, name: str, limits: Mapping[str, Any], where: str, *, is_text: bool = False
    ) -> None:
        fields_of(Tenant)["name"].convert(name, f"{where}tenants")
        where += f"[tenants.{name}] "
        table = self._converted(limits, TABLES["tenants"], where, is_text=is_text)
        self._tenants[name] = self._tenants.get(name, {}) | table

    def _add_hints(self, document: Mapping[str, Any], where: str) -> None:
        for of, tables in document.items():
            if of not in HINTED:
                known = ", ".join(f"hints.{one}" for one in HINTED)
                raise SettingsError(f"{where}[hints.{of}]: unknown table; there are {known}")
            _require_table(tables, f"{where}hints.{of}")
            for name, table in tables.items():
                called = f"{where}[hints.{of}.{name}] "
                _require_table(table, f"{where}hints.{of}.{name}")
                if of == "harness" and name not in HARNESSES:
                    known = ", ".join(HARNESSES)
                    raise SettingsError(f"{called.strip()}: unknown harness; there are {known}")
                values = self._converted(table, TABLES["hints"], called)
                self.names[f"hints.{of}.{name}.ttl_s"] = f"{called}ttl-s"
                self._hints.append(DefaultHint(of, name, **values))

    def _add_models(self, tables: object, where: str) -> None:
        if not isinstance(tables, list):
            raise SettingsError(f"{where}[models]: must be a list of tables, [[models]]")
        for number, table in enumerate(tables, 1):
            called = f"{where}[[models]] number {number} "
            _require_table(table, called.strip())
            engine, gpus = table.pop("engine", {}), table.get("gpus")
            if isinstance(gpus, int) and not isinstance(gpus, bool):
                gpus = [gpus]
            if isinstance(gpus, list):
                table["gpus"] = ",".join(map(str, gpus))
            _require_table(engine, f"{called}engine")
            values = self._converted(table, TABLES["models"], called, keeps_names=False)
            if "name" not in values and "path" in values:
                name = name_of_path(values["path"])
                values["name"] = TABLES["models"]["name"].convert(name, f"{called}name")
            if "name" not in values:
                raise SettingsError(f"{called}name: missing; give a name, or a path")
            model = Model(**values, engine_args=tuple(_as_flags(engine)))
            if any(model.name == one.name for one in self.models):
                raise SettingsError(f"{called}name={model.name!r}: another model has this name")
            self.models.append(model)

    def _add_aliases(self, table: Mapping[str, Any], where: str) -> None:
        rows = []
        for name, model in table.items():
            called = f"{where}[aliases] {name}"
            self.names[f"aliases.{name}"] = called
            rows.append(Alias(name, fields_of(Alias)["model"].convert(model, called)))
        self.values["aliases"] = tuple(rows)

    def _converted(
        self,
        table: Mapping[str, Any],
        fields: Mapping[str, Field],
        where: str,
        *,
        keeps_names: bool = True,
        **how: bool,
    ) -> dict[str, Any]:
        converted = {}
        for key, value in table.items():
            name = key.replace("-", "_")
            if name not in fields:
                others = (f"; it belongs to [{at}]" for at, keys in TABLES.items() if name in keys)
                hint = next(others, _nearest(name, fields))
                raise SettingsError(f"{where}{key}: unknown key{hint}")
            # A tenant's limit has the name of one of the node's.
            if fields is not TABLES["tenants"] and keeps_names:
                self.names[name] = where + key
            converted[name] = fields[name].convert(value, where + key, **how)
        return converted


def _take_models(given: _Given, config: str) -> None:
    """Makes settings of a node of what [[models]] says. Raises SettingsError for a setting that
    each model has for itself."""
    if not given.models:
        return
    for name in ("model_path", "instances", "tp"):
        if name in given.values:
            called, value = given.names.get(name, name), given.values[name]
            where = f"{config}: [[models]] has it for each model"
            raise SettingsError(f"{called}={value!r}: {where}; leave one of them out")
    started = [model for model in given.models if model.path is not None]
    if not started:
        raise SettingsError(f"{config}: [[models]] path: missing; one model at least needs engines")
    given.values["models"] = tuple(given.models)
    given.values["model_path"] = started[0].path
    given.values["instances"] = sum(model.own_instances for model in given.models)
    for number, model in enumerate(given.models, 1):
        for key in ("fallback", "gpus", "path"):
            given.names[f"models.{model.name}.{key}"] = (
                f"{config}: [[models]] number {number} {key}"
            )


class _Parser(Arguments):
    """A parser whose errors are those of settings."""

    def error(self, message: str) -> NoReturn:
        raise SettingsError(plain_error(message))


def _parser(prog: str, description: str) -> argparse.ArgumentParser:
    """A parser whose result holds the flags that were given, and no others."""
    return _Parser(
        prog=prog,
        usage="%(prog)s [FLAG ...]",
        description=description,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )


def _add_flags(parser: argparse._ActionsContainer, fields: Mapping[str, Field]) -> None:
    for name, field in fields.items():
        shown = with_unit(field.default, field.metavar) or field.shown_default
        default = f" (default: {shown})" if shown else ""
        text = (field.help + default).replace("%", "%%")
        if isinstance(field.default, bool):
            parser.add_argument(field.flag, action=argparse.BooleanOptionalAction, help=text)
            continue
        action = "append" if field.is_list else "store"
        flags = [field.flag, *(f"--{one}" for one in _ALSO.get(name, ()))]
        parser.add_argument(*flags, action=action, dest=name, metavar=field.metavar, help=text)
        if field.is_list and field.default:
            no_flag = f"--no-{name.replace('_', '-')}"
            parser.add_argument(no_flag, action="store_true", help="Empty that list first.")
    if "max_priority" in fields:
        text = "Limits of one tenant; can be repeated. See docs/guide/tenants.md."
        parser.add_argument("--tenant", action="append", metavar=_TENANT_FORM, help=text)


def _nearest(name: str, known: Iterable[str]) -> str:
    near = get_close_matches(name, known, 1)
    return f"; did you mean {near[0]}?" if near else ""


def _require_table(table: object, name: str) -> None:
    if not isinstance(table, dict):
        raise SettingsError(f"{name}={table!r}: must be a table")


def _as_flags(table: Mapping[str, Any]) -> list[str]:
    """SGLang flags from TOML: true is a bare flag, false leaves it out, a list repeats values."""
    argv: list[str] = []
    for key, value in table.items():
        if value is not False:
            values = value if isinstance(value, list) else [] if value is True else [value]
            argv += ["--" + key.replace("_", "-"), *map(str, values)]
    return argv


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
    with _called(names):
        if settings.store is not None:
            read_store(settings.store)
        read_api_key(settings.api_key)
        certificate_of(settings)
        EngineSecret(settings.engine_secret)


@contextmanager
def _called(names: Mapping[str, str]) -> Iterator[None]:
    """Has an error that begins with a setting's name call it by its flag, or by file and key."""
    try:
        yield
    except SettingsError as error:
        name, found, rest = re.split(r"(=|: )", str(error), maxsplit=1)
        raise SettingsError(names.get(name, name) + found + rest) from None


def check_picker(settings: PickerSettings, names: Mapping[str, str] = {}) -> None:
    """Raises SettingsError for the first rule that a picker's settings break."""
    check_balancer(settings, names)
    _raise_first(_picker_problems(settings), names)


def _raise_first(problems: Iterator[_Problem], names: Mapping[str, str]) -> None:
    for name, value, problem in problems:
        raise SettingsError(f"{names.get(name, name)}={value!r}: {problem}")


def _balancer_problems(settings: BalancerSettings) -> Iterator[_Problem]:
    if (settings.tls_cert is None) is not (settings.tls_key is None):
        yield "tls_cert", settings.tls_cert, "needs tls-key, and the other way round"
    limit = settings.store_limit_bytes
    if 0 < limit < LEAST_STORE_BYTES:
        yield "store_limit_bytes", limit, f"must be 0, or at least {LEAST_STORE_BYTES}"
    for url in settings.workers:
        if problem := worker_url_problem(url):
            yield "workers", url, problem
    has_keys = settings.api_key is not None or settings.keys is not None
    if is_reachable(settings.host) and not has_keys and not settings.insecure:
        reason = "other machines can reach it, so it needs --api-key or --keys"
        yield "host", settings.host, f"{reason}. To let everyone use and read it: --insecure"
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
    yield from _model_problems(settings)
    flags = {f.partition("=")[0] for one in settings.of_models for f in one.engine_args}
    if settings.models and "--served-model-name" in flags:
        yield "[engine]", ["--served-model-name"], "[[models]] names each model"
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
        reason = "other machines can reach it, so it needs engine_secret: docs/guide/fleet.md"
        yield "engine_host", host, reason


def _model_problems(settings: LaunchSettings) -> Iterator[_Problem]:
    """What is wrong with models, adapters and aliases, by the name of the model or the alias."""
    models = {model.name: model for model in settings.models}
    taken: dict[str, str] = {}
    for name, model in models.items():
        if model.fallback is not None and (model.fallback not in models or model.fallback == name):
            others = ", ".join(one for one in models if one != name) or "no other model"
            yield f"models.{name}.fallback", model.fallback, f"must be one of {others}"
        for gpu in gpu_names(model.gpus):
            if gpu in taken:
                yield f"models.{name}.gpus", model.gpus, f"{taken[gpu]} has GPU {gpu}, too"
            taken[gpu] = name
        if model.path is None and (model.gpus or model.engine_args):
            yield (
                f"models.{name}.path",
                None,
                "missing: gpus and engine are of engines of this node",
            )
    if settings.models and settings.ray_address is not None:
        yield "ray_address", settings.ray_address, "engines on Ray have one model: no [[models]]"
    known = {*(models or {one.model_name for one in settings.of_models})}
    for one in settings.of_models:
        known |= {*adapters_in(one.engine_args)} | {served_by_flag(one.engine_args)} - {""}
    for alias in settings.balancer.aliases:
        # Engines from elsewhere may serve it.
        if alias.model not in known and not settings.balancer.workers_from:
            there = ", ".join(sorted(known))
            yield f"aliases.{alias.name}", alias.model, f"no such model; there are {there}"
        if alias.name in models:
            yield f"aliases.{alias.name}", alias.model, "a model has this name"


def gpu_names(text: str) -> list[str]:
    """The GPUs in a list such as `0,2-3`; ids that are no numbers stay as they are."""
    found: list[str] = []
    for part in filter(None, text.split(",")):
        first, dash, last = part.partition("-")
        if dash and first.isdecimal() and last.isdecimal():
            found += map(str, range(int(first), int(last) + 1))
        else:
            found.append(part)
    return found


def adapters_in(engine_args: Sequence[str]) -> list[str]:
    """The names of the LoRA adapters that SGLang's flags load, as far as they state them."""
    words, found = iter(engine_args), list[str]()
    reads = False
    for word in words:
        flag, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
        reads = flag == "--lora-paths" if flag else reads
        if reads and (not flag or equals) and "=" in value:
            found.append(value.partition("=")[0])
    return found


def served_by_flag(engine_args: Sequence[str]) -> str:
    """The name that SGLang's own flag gives a model; "" without it."""
    words = [word for arg in engine_args for word in arg.split("=", 1)]
    given = [value for flag, value in pairwise(words) if flag == "--served-model-name"]
    return given[-1] if given else ""


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


def worker_url_problem(url: str) -> str:
    """Why a URL names no worker: http, a host, perhaps a port, and nothing else; "" if it does."""
    if url.lower().startswith("https:"):
        return f"{_WORKER_FORM}; a balancer speaks {NO_TLS}"
    try:
        parts = urlsplit(url.rstrip("/"))
        has_port = parts.port is None or parts.port > 0
    except ValueError:
        return _WORKER_FORM
    extra = parts.path or parts.query or parts.fragment or parts.username
    is_valid = has_port and parts.scheme == "http" and bool(parts.hostname) and not extra
    return "" if is_valid else _WORKER_FORM


def address_of(url: str) -> str | None:
    """The address in a worker's URL, IP:PORT, as gateways know it; None if it has a name."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    try:
        version = ip_address(host).version
    except ValueError:
        return None
    return f"[{host}]:{parts.port or 80}" if version == 6 else f"{host}:{parts.port or 80}"
