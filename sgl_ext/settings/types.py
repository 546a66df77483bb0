"""Types of settings with their ranges, and the error for a value outside of them.

Times are at most a year, as a range must end somewhere.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from sgl_ext.requests.session import TENANT_NAME

MIN_TTL_S = 1.0
_YEAR_S = 31_536_000.0


class SettingsError(ValueError):
    """A setting that cannot be used. The message names it, its source and its value."""


def form(allowed: str, metavar: str = "", *, is_secret: bool = False) -> Meta:
    """Describes a value whose type and range do not say enough.

    is_secret: an error does not show the value, as it can be the secret itself.
    """
    return Meta(extra={"allowed": allowed, "metavar": metavar, "is_secret": is_secret})


Seconds = Annotated[float, Meta(ge=0, le=_YEAR_S)]
PositiveSeconds = Annotated[float, Meta(gt=0, le=_YEAR_S)]
TtlSeconds = Annotated[float, Meta(ge=MIN_TTL_S, le=_YEAR_S)]
Share = Annotated[float, Meta(ge=0, le=1)]
Count = Annotated[int, Meta(ge=1)]
Bytes = Annotated[int, Meta(ge=0)]
Text = Annotated[str, Meta(min_length=1), form("text that is not empty", "TEXT")]
File = Annotated[str, Meta(min_length=1), form("a path", "FILE")]
HeaderName = Annotated[
    str,
    Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9-]*\Z"),
    form("a header name of letters, digits and hyphens", "NAME"),
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
GroupName = Annotated[
    str,
    Meta(pattern=r"^[A-Za-z0-9._-]{0,64}\Z"),
    form("at most 64 letters, digits, '.', '_' and '-'", "GROUP"),
]
