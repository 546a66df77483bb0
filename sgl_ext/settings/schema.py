"""Every setting, declared once: its type, range, default and meaning.

Flags, the TOML file's keys, `--help`, range checks, the JSON that the launcher hands to its
children and docs/settings.md are all made from these classes, so a new setting is one field.
A field's class decides which process reads it and which table of the TOML file it stands in.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, Self

import msgspec
from msgspec import Meta, Struct

from sgl_ext.requests.cache_marks import TtlLimits
from sgl_ext.requests.headers import BILLING_HEADER
from sgl_ext.requests.priority import LIMIT
from sgl_ext.settings.types import (
    MIN_TTL_S,
    Bytes,
    Count,
    File,
    GroupName,
    HeaderName,
    PositiveSeconds,
    Seconds,
    SecretSource,
    SettingsError,
    Share,
    TenantName,
    Text,
    TtlSeconds,
    WorkerUrl,
    form,
)

VARIABLE = "SGL_EXT_SETTINGS"
"""The environment variable in which the launcher hands a child its settings, as JSON."""
IN_MEMORY = ":memory:"
"""Given as `store`: responses and contexts are lost when the balancer ends."""
_MIB = 1 << 20


class Settings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What all of them can do: go to a child process through its environment."""

    def to_environment(self) -> dict[str, str]:
        return {VARIABLE: msgspec.json.encode(self).decode()}

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Self:
        """The launcher's settings for this process, or the defaults. Raises SettingsError."""
        raw = environ.get(VARIABLE)
        try:
            return msgspec.json.decode(raw, type=cls) if raw else cls()
        except msgspec.MsgspecError as error:
            raise SettingsError(f"{VARIABLE}={raw!r}: {error}") from None


class Tenant(Struct, frozen=True):
    """A tenant's limits. The tenant "" is every client that names none."""

    name: Annotated[TenantName, "The x-tenant-id of its requests, or the name of its keys."]
    max_priority: Annotated[
        int,
        Meta(ge=-LIMIT, le=LIMIT),
        "Highest priority that it can request, in place of `max_priority`.",
    ]
    weight: Annotated[
        float, Meta(gt=0, le=1e6), "Its share of turns among requests of the same priority."
    ] = 1.0
    cache_group: Annotated[
        GroupName, "Isolated tenants of the same group share cached prefixes; its name if not set."
    ] = ""
    pin_share: Annotated[
        Share | None, "Share of the pin budget, in place of `pin_owner_share`."
    ] = None

    @property
    def group(self) -> str:
        """With whom it shares cached prefixes."""
        return self.cache_group or self.name


class RequestSettings(Settings, frozen=True, kw_only=True):
    """What the balancer and the engines must agree on."""

    strip_headers: Annotated[
        tuple[HeaderName, ...],
        "Headers to remove from the start of a system prompt. See strip.md.",
    ] = (BILLING_HEADER,)
    sort_tools: Annotated[
        bool, "Sort a request's tools by name, so that their order does not decide what is shared."
    ] = False
    max_priority: Annotated[
        int, Meta(ge=-LIMIT, le=LIMIT), "Highest priority that a client can request."
    ] = 100
    aging_s: Annotated[
        Seconds, "Waiting time that raises a request's priority by one; 0: waiting raises none."
    ] = 10.0
    preemption_threshold: Annotated[
        Count, "A request preempts those whose priority is lower by this much or more."
    ] = 10
    tenants: tuple[Tenant, ...] = ()


class BalancerSettings(RequestSettings, frozen=True, kw_only=True):
    host: Annotated[Text, "Address to listen on. Set a key before you use 0.0.0.0."] = "127.0.0.1"
    port: Annotated[
        int, Meta(ge=1, le=65535), "Port to listen on. Engines use free ports above it."
    ] = 30000
    processes: Annotated[
        int, Meta(ge=1, le=64), "Balancer processes. One serves thousands of requests a second."
    ] = 1
    api_key: Annotated[
        SecretSource | None, "Key that clients must send, except for health checks."
    ] = None
    keys: Annotated[
        File | None, "Keys and limits of tenants, made by python -m sgl_ext.keys. See tenants.md."
    ] = None
    tenant_isolation: Annotated[
        Literal["auto", "on", "off"],
        "Whether tenants are kept from sharing cached prefixes; auto: if keys is set.",
    ] = "auto"
    max_body_bytes: Annotated[int, Meta(ge=1), "Largest request body."] = 64 * _MIB
    max_in_flight: Annotated[Count, "Requests that one engine is sent at the same time."] = 1024
    queue_limit: Annotated[
        int, Meta(ge=0), "Requests that can wait while no engine has capacity."
    ] = 1024
    queue_timeout_s: Annotated[PositiveSeconds, "Longest wait in that queue."] = 60.0
    drain_s: Annotated[Seconds, "Time for running requests to finish when the node stops."] = 30.0
    request_log: Annotated[File | None, "Log with a line of JSON for each request."] = None
    diagnose: Annotated[
        bool, "Find where prompts diverge; request_log does, too. See doctor.md."
    ] = False
    store: Annotated[
        File | None,
        f"SQLite file for stored responses and contexts, or {IN_MEMORY}. The launcher uses "
        "store.sqlite in log_dir unless this is set. See responses.md.",
    ] = None
    store_limit_bytes: Annotated[
        Bytes, form(f"0, or an integer of at least {_MIB}"), "Largest store; 0: no store."
    ] = 1 << 30
    response_ttl_s: Annotated[TtlSeconds, "How long a response is stored after its last use."] = (
        86_400.0
    )
    workers: Annotated[
        tuple[WorkerUrl, ...], "Engines to send requests to; the launcher sets its own."
    ] = ()

    @property
    def isolates_tenants(self) -> bool:
        """Whether tenants of different cache groups share no cached prefix."""
        is_auto = self.tenant_isolation == "auto"
        return self.keys is not None if is_auto else self.tenant_isolation == "on"


class EngineSettings(RequestSettings, frozen=True, kw_only=True):
    pin_budget: Annotated[Share, "Share of the KV cache that pins can hold. See pins.md."] = 1 / 3
    pin_owner_share: Annotated[
        float, Meta(gt=0, le=1), "Share of the pin budget that one tenant can use."
    ] = 1.0
    pin_ttl_s: Annotated[TtlSeconds, "Lease of a pin whose request gives no TTL."] = 300.0
    pin_max_ttl_s: Annotated[TtlSeconds, "Longest lease of a pin."] = 3600.0
    pin_unmarked_ttl_s: Annotated[
        Seconds,
        form("0, or a number from 1 to pin_max_ttl_s"),
        "Lease for prompts of requests without a cache mark; 0: they are not pinned.",
    ] = 0.0
    preemption_grace_s: Annotated[
        Seconds, "How long a preempted request is safe once it runs again."
    ] = 2.0
    prefill_ahead: Annotated[
        Literal["off", "hinted", "auto"],
        "Next turns to prefill before they are sent; hinted: of requests that ask for it; auto: "
        "of conversations that grow, too. See prefill.md.",
    ] = "auto"
    prefill_ahead_slice_tokens: Annotated[
        Count, "Most tokens to prefill ahead in one step of the engine."
    ] = 2048
    warmup_requests: Annotated[
        File | None, "Request bodies, one a line, that each engine prefills when it starts."
    ] = None
    shared_prefixes: Annotated[
        File | None,
        "Request bodies, one a line, whose prompts isolated tenants share. See tenants.md.",
    ] = None
    token_cache_bytes: Annotated[
        Bytes, "Memory for the tokens of text seen before; 0: tokenize every prompt whole."
    ] = 256 * _MIB

    @property
    def ttl_limits(self) -> TtlLimits:
        return TtlLimits(
            min_s=MIN_TTL_S,
            max_s=self.pin_max_ttl_s,
            default_s=self.pin_ttl_s,
            unmarked_s=self.pin_unmarked_ttl_s,
        )


class LaunchSettings(Settings, frozen=True, kw_only=True):
    model_path: Annotated[Text, "The model: a directory or a name."]
    instances: Annotated[Count, "Number of engines."] = 1
    tp: Annotated[Count, "GPUs of each engine, for tensor parallelism."] = 1
    start_timeout_s: Annotated[PositiveSeconds, "Time for all engines to become ready."] = 1800.0
    log_dir: Annotated[Text, "Directory for the log of each process."] = ".run"
    engine_args: tuple[str, ...] = ()
    engine: EngineSettings = EngineSettings()
    balancer: BalancerSettings = BalancerSettings()

    @property
    def model_name(self) -> str:
        """The name clients use for the model: a local directory's own name, or the given name."""
        path = Path(self.model_path)
        return path.resolve().name if path.is_dir() else self.model_path
