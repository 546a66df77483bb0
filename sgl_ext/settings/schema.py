"""Every setting, declared once: its type, range, default and meaning.

Flags, the TOML file's keys, `--help`, range checks, the JSON that the launcher hands to its
children and docs/reference/settings.md are made from these classes, so a new setting is one field.
A field's class decides which process reads it and which table of the TOML file it stands in.
Times are at most a year, as a range must end somewhere.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, Self

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from sgl_ext.limits.bounds import BUDGET_BODIES
from sgl_ext.reading.cache_marks import TtlLimits
from sgl_ext.reading.hints import LIMIT
from sgl_ext.reading.strip import BILLING_HEADER
from sgl_ext.wire.headers import TENANT_NAME

MIB = 1 << 20
MIN_TTL_S = 1.0
LEAST_STORE_BYTES = MIB
LEAST_TIER_BYTES = 64 * MIB
_YEAR_S = 31_536_000.0


class Reload(NamedTuple):
    """Whether a setting can change without a restart, and why it cannot: guide/operations.md."""

    applies: bool = False
    why: str = "it is read at the start"


RELOADS = Reload(applies=True)
WATCHED = Reload(why="its source is chosen at the start; a file that it names is read when changed")
OPENED = Reload(why="it is opened at the start")
HASHED = Reload(why="it decides under which hashes and in whose name prefixes are cached")
DIVIDED = Reload(why="memory is divided at the start")
ENGINES = Reload(why="engines are started with it")


def form(allowed: str, metavar: str = "", *, is_secret: bool = False) -> Meta:
    """Describes a value whose type and range do not say enough.

    is_secret: an error does not show the value, as it can be the secret itself.
    """
    return Meta(extra={"allowed": allowed, "metavar": metavar, "is_secret": is_secret})


Seconds = Annotated[float, Meta(ge=0, le=_YEAR_S)]
PositiveSeconds = Annotated[float, Meta(gt=0, le=_YEAR_S)]
TtlSeconds = Annotated[float, Meta(ge=MIN_TTL_S, le=_YEAR_S)]
UnmarkedTtl = Annotated[Seconds, form("0, or a number from 1 to pin-max-ttl-s")]
Share = Annotated[float, Meta(ge=0, le=1)]
Count = Annotated[int, Meta(ge=1)]
Amount = Annotated[int, Meta(ge=0)]
Port = Annotated[int, Meta(ge=1, le=65535)]
Processes = Annotated[int, Meta(ge=1, le=64)]
IndexBytes = Annotated[int, Meta(ge=MIB, le=1 << 36)]
Priority = Annotated[int, Meta(ge=-LIMIT, le=LIMIT)]
Weight = Annotated[float, Meta(gt=0, le=1e6)]
PositiveShare = Annotated[float, Meta(gt=0, le=1)]
LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]
StoreBytes = Annotated[int, Meta(ge=0), form(f"0, or an integer of at least {LEAST_STORE_BYTES}")]
LogBytes = Annotated[int, Meta(ge=MIB)]
TierBytes = Annotated[int, Meta(ge=0), form(f"0, or an integer of at least {LEAST_TIER_BYTES}")]
Text = Annotated[str, Meta(min_length=1), form("text that is not empty", "TEXT")]
File = Annotated[str, Meta(min_length=1), form("a path", "FILE")]
Store = Annotated[
    str,
    Meta(min_length=1),
    form(
        "a path, redis[s]://, valkey[s]:// or postgresql://, env:VARIABLE or file:PATH",
        "STORE",
        is_secret=True,
    ),
]
HeaderName = Annotated[
    str,
    Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9-]*\Z"),
    form("a header name of letters, digits and hyphens", "NAME"),
]
WorkerSource = Annotated[str, Meta(min_length=1), form("KIND:WHAT, as file:PATH", "SOURCE")]
CollectorUrl = Annotated[
    str,
    Meta(pattern=r"^https?://([A-Za-z0-9._-]+|\[[0-9A-Fa-f:]+\])(:[0-9]{1,5})?(/[!-~]*)?\Z"),
    form("http[s]://HOST:PORT", "URL"),
]
WorkerUrl = Annotated[str, form("http://HOST:PORT", "URL")]
SecretSource = Annotated[
    str,
    Meta(pattern=r"^(file|env):."),
    form(
        "file:PATH or env:VARIABLE, so that no key is on a command line", "SOURCE", is_secret=True
    ),
]
TenantName = Annotated[
    str, Meta(pattern=TENANT_NAME.pattern), form("a name in printable ASCII", "NAME")
]
Adapters = Annotated[
    str, Meta(pattern=r"^[!-~]*( [!-~]+)*\Z"), form("names, separated by a blank", "NAMES")
]
GroupName = Annotated[
    str,
    Meta(pattern=r"^[A-Za-z0-9._-]{0,64}\Z"),
    form("at most 64 letters, digits, '.', '_' and '-'", "GROUP"),
]
ModelName = Annotated[
    str,
    Meta(pattern=r"^[^\x00-\x20*?\[\]]{1,256}\Z"),
    form("a name without blanks and wildcards", "NAME"),
]
GpuList = Annotated[
    str,
    Meta(pattern=r"^([A-Za-z0-9._-]+(,[A-Za-z0-9._-]+)*)?\Z"),
    form("numbers or ids of GPUs, as 0,1 or 0-3", "GPUS"),
]
RayAddress = Annotated[str, Meta(min_length=1), form("auto, or HOST:PORT", "ADDRESS")]
FleetName = Annotated[
    str,
    Meta(pattern=r"^[A-Za-z0-9._-]{1,64}\Z"),
    form("at most 64 letters, digits, '.', '_' and '-'", "NAME"),
]


# SGLang copies each variable whose name begins with SGL_ and warns of it, in every process.
VARIABLE = "SGLEXT_SETTINGS"
"""The environment variable in which the launcher hands a child its settings, as JSON."""
_FORMER_VARIABLE = "SGL_EXT_SETTINGS"
ANY_ADAPTER = "*"
"""Given as a tenant's adapters: it may use every one."""
IN_MEMORY = ":memory:"
"""Given as `store`: responses and contexts are lost when the balancer ends."""
OFF = "off"
"""Given as `request_log`: there is none."""
HINTED = ("tenant", "agent", "harness", "model")
"""What default hints can be of, in the order in which they win."""
# Someone may have put a secret itself where its source belongs.
_SECRETS = re.compile(r'("(?:engine_secret|api_key)"\s*:\s*")(?!file:|env:)[^"]*')


class SettingsError(ValueError):
    """A setting that cannot be used. The message names it, its source and its value."""


class Unavailable(SettingsError):
    """A setting that asks for what the machine does not have now: a port, memory, a GPU, a disk.
    A later start can find it."""


class Settings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings that a process can get through its environment."""

    def to_environment(self) -> dict[str, str]:
        return {VARIABLE: msgspec.json.encode(self).decode()}

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Self:
        """The launcher's settings for this process, or the defaults. Raises SettingsError."""
        if _FORMER_VARIABLE in environ:
            raise SettingsError(f"{_FORMER_VARIABLE}: its name is {VARIABLE} now")
        raw = environ.get(VARIABLE)
        try:
            return msgspec.json.decode(raw, type=cls) if raw else cls()
        except msgspec.MsgspecError as error:
            shown = _SECRETS.sub(r"\1...", raw or "")
            raise SettingsError(f"{VARIABLE}={shown!r}: {error}") from None


class Tenant(Struct, frozen=True):
    """A tenant's limits. The tenant "" is every client that names none."""

    name: Annotated[TenantName, "The x-tenant-id of its requests, or the name of its keys."]
    max_priority: Annotated[Priority, "Highest priority that it can request."]
    weight: Annotated[Weight, "Share of turns among requests of the same priority."] = 1.0
    cache_group: Annotated[GroupName, "Tenants that share cached prefixes; its name if empty."] = ""
    pin_share: Annotated[Share | None, "Share of the pin budget, if not pin-owner-share."] = None
    adapters: Annotated[
        Adapters, f"LoRA adapters that its requests may name; {ANY_ADAPTER!r}: every one."
    ] = ""

    @property
    def group(self) -> str:
        """The group of tenants with which it shares cached prefixes."""
        return self.cache_group or self.name


class DefaultHint(Struct, frozen=True):
    """Hints for the requests of a tenant, kind of agent, harness or model that give none
    themselves: docs/guide/operations.md.

    of: one of HINTED. name: of the tenant, kind of agent, harness or model.
    """

    of: str
    name: str
    priority: Annotated[Priority | None, "Priority, at most the tenant's ceiling."] = None
    osl: Annotated[Amount | None, "Expected length of the answer, in tokens."] = None
    prefill: Annotated[bool | None, "Whether to prefill the next turn ahead: guide/prefill.md."] = (
        None
    )
    ttl_s: Annotated[
        UnmarkedTtl | None,
        "Lease of prompts without a mark, and of marks without a TTL: guide/pins.md.",
    ] = None


class Alias(Struct, frozen=True):
    """Another name of a model or of an adapter: docs/guide/fleet.md.

    name: as requests have it; with `*`, `?` or `[...]` it is a pattern.
    """

    name: str
    model: Annotated[ModelName, "The model or LoRA adapter that answers."]


class ServedModel(Struct, frozen=True):
    """A model that a balancer knows, whether an engine serves it or not."""

    name: str
    fallback: str = ""


class Model(Struct, frozen=True, kw_only=True):
    """One of several models of a node: docs/guide/fleet.md."""

    name: Annotated[
        ModelName, ENGINES, "The name that requests have; that of the path if it is not given."
    ]
    path: Annotated[
        Text | None,
        ENGINES,
        "A directory or a name; without one, its engines are started elsewhere.",
    ] = None
    instances: Annotated[Count, ENGINES, "Number of its engines."] = 1
    tp: Annotated[Count, ENGINES, "GPUs of each engine, for tensor parallelism."] = 1
    gpus: Annotated[
        GpuList, ENGINES, "GPUs for its engines; without them, those that are left, in order."
    ] = ""
    fallback: Annotated[
        ModelName | None,
        "Model that answers while this one has no ready engine; without it, such requests wait or "
        "are refused.",
    ] = None
    engine_args: tuple[str, ...] = ()

    @property
    def own_instances(self) -> int:
        """How many engines the node starts for it."""
        return 0 if self.path is None else self.instances


class RequestSettings(Settings, frozen=True, kw_only=True):
    """What the balancer and the engines must agree on."""

    strip_headers: Annotated[
        tuple[HeaderName, ...], HASHED, "Header lines to remove: how/strip.md."
    ] = (BILLING_HEADER,)
    sort_tools: Annotated[
        bool, HASHED, "Sort each request's tools by name, for a stable prefix."
    ] = False
    move_volatile_lines: Annotated[
        bool, HASHED, "Move lines such as the date out of the system text: how/strip.md."
    ] = False
    max_priority: Annotated[Priority, RELOADS, "Highest priority that a client can request."] = 100
    aging_s: Annotated[Seconds, RELOADS, "Wait that raises a priority by one; 0: never."] = 10.0
    preemption_threshold: Annotated[
        Count, RELOADS, "Lead in priority that lets a request preempt."
    ] = 10
    engine_secret: Annotated[
        SecretSource | None,
        WATCHED,
        "Secret that proves to an engine that a request is from its balancer: guide/fleet.md.",
    ] = None
    tenants: tuple[Tenant, ...] = ()


class BalancerSettings(RequestSettings, frozen=True, kw_only=True):
    host: Annotated[
        Text, OPENED, "Address to listen on; beyond loopback it needs api-key or keys."
    ] = "127.0.0.1"
    insecure: Annotated[
        bool,
        OPENED,
        "Listen beyond loopback without keys: who reaches the port may use and read the node.",
    ] = False
    port: Annotated[Port, OPENED, "Port to listen on. Engines use free ports above it."] = 30000
    processes: Annotated[Processes, OPENED, "Balancer processes that share the port."] = 1
    index_limit_bytes: Annotated[
        IndexBytes, DIVIDED, "Memory of the prefix index when it is full: reference/limits.md."
    ] = 256 * MIB
    api_key: Annotated[SecretSource | None, "Key for all requests but health checks."] = None
    keys: Annotated[File | None, WATCHED, "Keys and limits of tenants: guide/tenants.md."] = None
    tenant_isolation: Annotated[
        Literal["auto", "on", "off"],
        HASHED,
        "Whether tenants share no cached prefix; auto: if keys is set.",
    ] = "auto"
    tls_cert: Annotated[
        File | None, WATCHED, "Certificate chain, in PEM, with which the port speaks HTTPS alone."
    ] = None
    tls_key: Annotated[File | None, WATCHED, "Private key of that certificate, in PEM."] = None
    max_body_bytes: Annotated[Count, DIVIDED, "Largest request body."] = 64 * MIB
    byte_budget: Annotated[
        Amount,
        DIVIDED,
        "Bytes of bodies and answers in a process; 0: four of the largest body. "
        "reference/limits.md.",
    ] = 0
    max_connections: Annotated[Count, RELOADS, "Connections of clients to one process."] = 10_000
    max_in_flight: Annotated[Count, RELOADS, "Requests that one engine gets at the same time."] = (
        1024
    )
    queue_limit: Annotated[Amount, RELOADS, "Requests that can wait for capacity in an engine."] = (
        1024
    )
    learn_speeds: Annotated[
        bool,
        RELOADS,
        "Learn how much slower an engine is than others, and place by it: how/routing.md.",
    ] = True
    queue_timeout_s: Annotated[PositiveSeconds, RELOADS, "Longest wait for capacity."] = 480.0
    first_byte_s: Annotated[
        Seconds,
        RELOADS,
        "Longest silence of a stream whose answer is awaited; then it says that it waits; 0: it "
        "stays silent. guide/clients.md.",
    ] = 10.0
    resend_s: Annotated[
        Seconds,
        RELOADS,
        "Time for which a request goes on after its client has left, for a client that sends it "
        "again; 0: it ends at once. guide/clients.md.",
    ] = 5.0
    agent_hold_s: Annotated[
        Seconds,
        RELOADS,
        "Longest time that a request is held back while agents need more memory than there is; 0: "
        "never. guide/priority.md.",
    ] = 240.0
    compile_timeout_s: Annotated[
        Seconds,
        "Longest silence of an engine that compiles, or has just started, before it is checked for "
        "a hang: how/routing.md.",
    ] = 600.0
    drain_s: Annotated[
        Seconds, RELOADS, "Time for running requests to finish when the node stops."
    ] = 30.0
    drain_min_s: Annotated[
        Seconds,
        RELOADS,
        "Time for which a node that stops still listens, with /ready 503, so that a load balancer "
        "in front sees it; at most drain-s.",
    ] = 5.0
    warm_timeout_s: Annotated[
        Seconds, "Longest wait for what engines hold, before /ready answers 200: guide/fleet.md."
    ] = 30.0
    log_format: Annotated[LogFormat, OPENED, "Lines of the balancer's and the launcher's logs."] = (
        "text"
    )
    log_level: Annotated[
        LogLevel,
        OPENED,
        "Least important lines of the balancer's, the launcher's and the engines' logs.",
    ] = "info"
    request_log: Annotated[
        File | None,
        OPENED,
        "Log with a line of JSON for each request; off: none. The launcher's default is "
        "requests.jsonl in log-dir. See reference/events.md.",
    ] = None
    request_log_limit_bytes: Annotated[
        LogBytes, RELOADS, "Largest size of the request log and its predecessor, FILE.1, together."
    ] = 256 * MIB
    request_log_age_s: Annotated[
        PositiveSeconds, RELOADS, "Longest time that a line of the request log stays."
    ] = 604_800.0
    hash_sessions: Annotated[
        bool,
        OPENED,
        "Write hashes of the session ids that clients state into the log, the spans and the page.",
    ] = False
    otlp_endpoint: Annotated[
        CollectorUrl | None,
        OPENED,
        "Collector for OpenTelemetry spans, http://HOST:4318: guide/doctor.md.",
    ] = None
    trace_share: Annotated[
        Share, OPENED, "Share of requests whose spans are exported, if their client does not say."
    ] = 1.0
    diagnose: Annotated[
        bool, "Remember recent prompts, so that the doctor can tell what changes in them."
    ] = False
    store: Annotated[
        Store | None,
        OPENED,
        f"SQLite file for responses and contexts, {IN_MEMORY}, or the URL of a Redis or PostgreSQL "
        "that balancers share. The launcher's default is store.sqlite in log-dir, or in systemd's "
        "StateDirectory. See "
        "guide/fleet.md.",
    ] = None
    store_limit_bytes: Annotated[StoreBytes, "Largest size of the store; 0: no store."] = 1 << 30
    response_ttl_s: Annotated[
        TtlSeconds, RELOADS, "Time from a response's last use to its end."
    ] = 86_400.0
    workers_from: Annotated[
        tuple[WorkerSource, ...],
        WATCHED,
        "Where more engines are listed, such as file:PATH; repeat. See guide/fleet.md.",
    ] = ()
    hints: tuple[DefaultHint, ...] = ()
    aliases: tuple[Alias, ...] = ()
    # The models of the node, which the launcher names itself.
    served: tuple[ServedModel, ...] = ()
    workers: Annotated[tuple[WorkerUrl, ...], "An engine to send requests to; repeat."] = ()
    # The launcher's socket, which it names itself.
    launcher_socket: str | None = None
    # The file of the node's events, which the launcher names itself.
    event_log: str | None = None
    # The file with what was changed since the launcher's start, which it names itself.
    changed_settings: str | None = None

    @property
    def account_bytes(self) -> int:
        """The byte budget of a process."""
        return self.byte_budget or BUDGET_BODIES * self.max_body_bytes

    @property
    def isolates_tenants(self) -> bool:
        """Whether tenants of different cache groups share no cached prefix."""
        is_auto = self.tenant_isolation == "auto"
        return self.keys is not None if is_auto else self.tenant_isolation == "on"


class PickerSettings(BalancerSettings, frozen=True, kw_only=True):
    """Of a balancer that a gateway asks where each request goes, too."""

    picker_host: Annotated[Text, OPENED, "Address that a gateway asks at."] = "127.0.0.1"
    picker_port: Annotated[
        Port, OPENED, "Port that a gateway asks at, by gRPC: guide/fleet.md."
    ] = 9002
    picker_tls_cert: Annotated[
        File | None, OPENED, "Certificate chain of that port, in PEM; without it: no TLS."
    ] = None
    picker_tls_key: Annotated[File | None, OPENED, "Private key of that certificate, in PEM."] = (
        None
    )


class EngineSettings(RequestSettings, frozen=True, kw_only=True):
    untested_sglang: Annotated[
        bool, "Start with a version of SGLang that is not tested, if it fits: how/upstream.md."
    ] = False
    keep_tools: Annotated[
        bool,
        "Keep tools that may not be called, and thinking for summaries: guide/clients.md.",
    ] = True
    sort_schema_keys: Annotated[
        bool, "Sort the keys of tools' schemas, for a stable prefix: guide/clients.md."
    ] = False
    pin_budget: Annotated[
        Share, RELOADS, "Share of the KV cache that pins can hold: guide/pins.md."
    ] = 1 / 3
    host_pin_budget: Annotated[
        Share, RELOADS, "Share of HiCache's host memory that spilled pins can hold: guide/pins.md."
    ] = 0.5
    pin_owner_share: Annotated[
        PositiveShare,
        RELOADS,
        "Most of the pin budget for one tenant; each of several is sure of an equal part: "
        "guide/pins.md.",
    ] = 1.0
    pin_ttl_s: Annotated[TtlSeconds, RELOADS, "Lease of a pin whose request gives no TTL."] = 300.0
    pin_max_ttl_s: Annotated[TtlSeconds, RELOADS, "Longest lease of a pin."] = 3600.0
    pin_unmarked_ttl_s: Annotated[
        UnmarkedTtl, RELOADS, "Lease for prompts without a mark; 0: no pin."
    ] = 0.0
    preemption_grace_s: Annotated[
        Seconds, RELOADS, "Time for which a preempted request is safe."
    ] = 2.0
    prefill_ahead: Annotated[
        Literal["off", "hinted", "auto"],
        RELOADS,
        "Next turns to prefill before they are sent; hinted: those that a request asks for; auto: "
        "also those of conversations that grow. See guide/prefill.md.",
    ] = "auto"
    prefill_ahead_slice_tokens: Annotated[Count, RELOADS, "Longest slice of a prefill ahead."] = (
        2048
    )
    prefill_ahead_evictable_share: Annotated[
        Share,
        RELOADS,
        "Share of the KV cache that unread prefills may take from other prefixes: "
        "guide/prefill.md.",
    ] = 0.05
    draft_from_context: Annotated[
        Literal["off", "request", "session", "group"],
        "Whose tokens answers are drafted from: the request's own, also those of its session, or "
        "of its cache group: guide/operations.md.",
    ] = "off"
    warmup_requests: Annotated[File | None, "Requests to prefill at start: guide/prefill.md."] = (
        None
    )
    shared_prefixes: Annotated[File | None, "Prompts that tenants share: guide/tenants.md."] = None
    token_cache_bytes: Annotated[
        Amount, DIVIDED, "Memory for cached token ids and converted messages; 0: none."
    ] = 256 * MIB

    @property
    def ttl_limits(self) -> TtlLimits:
        unmarked_s, max_s = self.pin_unmarked_ttl_s, self.pin_max_ttl_s
        return TtlLimits(MIN_TTL_S, max_s, default_s=self.pin_ttl_s, unmarked_s=unmarked_s)


class LaunchSettings(Settings, frozen=True, kw_only=True):
    model_path: Annotated[Text, ENGINES, "The model: a directory or a name."]
    instances: Annotated[Count, ENGINES, "Number of engines."] = 1
    tp: Annotated[Count, ENGINES, "GPUs of each engine, for tensor parallelism."] = 1
    platform: Annotated[
        Literal["gpu", "cpu"],
        ENGINES,
        "What engines run on. Without a GPU nothing starts, unless this is cpu: "
        "start/developer.md.",
    ] = "gpu"
    engine_host: Annotated[
        Text, ENGINES, "Address that engines listen on; beyond loopback it needs engine-secret."
    ] = "127.0.0.1"
    ray_address: Annotated[
        RayAddress | None, ENGINES, "Ray cluster whose nodes run the engines: guide/fleet.md."
    ] = None
    ray_fleet: Annotated[FleetName, ENGINES, "Name of the engines of one launcher on Ray."] = (
        "sgl-ext"
    )
    ray_drain_s: Annotated[
        PositiveSeconds, "Longest wait for the requests of one engine on Ray that leaves."
    ] = 600.0
    ray_keep_engines: Annotated[
        bool, "Leave engines on Ray running when the launcher stops, for the next one to adopt."
    ] = False
    restart_drain_s: Annotated[
        PositiveSeconds,
        "Longest wait for the requests of one engine before a restart stops it: "
        "guide/operations.md.",
    ] = 600.0
    shared_tier_bytes: Annotated[
        TierBytes, ENGINES, "Memory in which all engines share prefixes; 0: none. guide/pins.md"
    ] = 0
    disk_tier: Annotated[
        File | None,
        ENGINES,
        "Folder on a disk in which all engines share prefixes. It outlives the node: guide/pins.md",
    ] = None
    disk_tier_bytes: Annotated[
        TierBytes, ENGINES, "What the prefixes in disk-tier may take there."
    ] = 0
    start_timeout_s: Annotated[PositiveSeconds, "Time for all engines to become ready."] = 1800.0
    log_dir: Annotated[Text, "Directory for the log of each process."] = ".run"
    log_limit_bytes: Annotated[
        LogBytes, "Largest size of one process's log with its three predecessors."
    ] = 256 * MIB
    models: tuple[Model, ...] = ()
    # The name of the model in place of that of its path.
    served_name: str = ""
    engine_args: tuple[str, ...] = ()
    engine: EngineSettings = EngineSettings()
    balancer: BalancerSettings = BalancerSettings()

    @property
    def model_name(self) -> str:
        """The name clients use for the model: a local directory's own name, or the given name."""
        return self.served_name or name_of_path(self.model_path)

    @property
    def tier_bytes(self) -> int:
        """What the tier that engines share may take, in memory or on a disk; 0: none."""
        return self.shared_tier_bytes or self.disk_tier_bytes

    @property
    def of_models(self) -> "tuple[LaunchSettings, ...]":
        """The settings of the engines of each model: as if there were no other model."""
        if not self.models:
            return (self,)
        return tuple(
            replace(
                self,
                models=(),
                model_path=model.path,
                served_name=model.name,
                instances=model.instances,
                tp=model.tp,
                engine_args=(*self.engine_args, *model.engine_args),
            )
            for model in self.models
            if model.path is not None
        )


def name_of_path(model_path: str) -> str:
    """The name of a model that has no other: a local directory's own, or the given one."""
    path = Path(model_path)
    return path.resolve().name if path.is_dir() else model_path
