"""The settings in effect, as a log shows them: those that differ from their defaults, no secret."""

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from sgl_ext.settings.fields import fields_of

MASK = "..."
# Where a secret is, or a path; what else a secret's setting holds may be the secret.
_NO_SECRET = re.compile(r"(file|env):|[^:@]*$|:memory:$")
_SECRET_FLAG = re.compile(r"--.*(key|password|token|secret)$")


def changed(settings: msgspec.Struct) -> dict[str, Any]:
    """The settings that differ from their defaults, by name, those of parts among them.

    Of tenants only the names are shown.
    """
    shown: dict[str, Any] = {}
    fields = fields_of(type(settings))
    for field in msgspec.structs.fields(type(settings)):
        value = getattr(settings, field.name)
        if isinstance(value, msgspec.Struct):
            shown |= changed(value)
        elif value == field.default:
            continue
        elif field.name == "tenants":
            shown["tenants"] = [tenant.name for tenant in value]
        elif field.name == "engine_args":
            shown["engine_args"] = " ".join(_masked_flags(value))
        elif field.name in fields and fields[field.name].is_secret:
            shown[field.name] = value if _NO_SECRET.match(value) else MASK
        else:
            shown[field.name] = list(value) if isinstance(value, tuple) else value
    return shown


def _masked_flags(argv: Sequence[str]) -> list[str]:
    """A command line of SGLang's without the values of flags that are secrets."""
    shown: list[str] = []
    hides = False
    for word in argv:
        flag, equals, _ = word.partition("=")
        is_secret = bool(_SECRET_FLAG.match(flag))
        shown.append(MASK if hides else flag + equals + MASK if is_secret and equals else word)
        hides = is_secret and not equals
    return shown
