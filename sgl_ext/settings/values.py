"""The types of settings' values: their ranges, their forms in words, and whether they reload."""

from typing import Annotated, Literal, NamedTuple

from msgspec import Meta

from sgl_ext.requests.priority import LIMIT
from sgl_ext.requests.session import TENANT_NAME

MIB = 1 << 20
MIN_TTL_S = 1.0
LEAST_STORE_BYTES = MIB
LEAST_TIER_BYTES = 64 * MIB
_YEAR_S = 31_536_000.0


class Reload(NamedTuple):
    """Whether a setting can change without a restart, and why it cannot: reload.md."""

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
RayAddress = Annotated[str, Meta(min_length=1), form("auto, or HOST:PORT", "ADDRESS")]
FleetName = Annotated[
    str,
    Meta(pattern=r"^[A-Za-z0-9._-]{1,64}\Z"),
    form("at most 64 letters, digits, '.', '_' and '-'", "NAME"),
]
