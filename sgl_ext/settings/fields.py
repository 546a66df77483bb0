"""The fields of a settings class, as flags, files and documentation show them."""

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple, get_type_hints

import msgspec
from msgspec import inspect

from sgl_ext.settings.schema import (
    BalancerSettings,
    DefaultHint,
    EngineSettings,
    LaunchSettings,
    Model,
    PickerSettings,
    Reload,
    SettingsError,
    Tenant,
)

_METAVARS = (
    *(("_s", "SECONDS"), ("_bytes", "BYTES"), ("_tokens", "TOKENS")),
    ("byte_budget", "BYTES"),
)
_KIB = 1 << 10
# Of the settings whose values may have a unit, by their metavar. Sizes count as GPUs are sold.
UNITS: Mapping[str, Mapping[str, float]] = {
    "SECONDS": {"ms": 0.001, "s": 1, "min": 60, "m": 60, "h": 3_600, "d": 86_400},
    "BYTES": {
        "B": 1,
        **{unit: _KIB**n for n, k in enumerate("KMGT", 1) for unit in (k, f"{k}B", f"{k}iB")},
    },
}
_SHOWN_UNITS = {"SECONDS": "20s, 5min, 1h or 2d", "BYTES": "64MB or 1GB"}
_WITH_UNIT = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([A-Za-z]+)")


def without_unit(value: object, metavar: str) -> object:
    """The number for a text such as `20s` or `64MB`; any other value as it is.

    metavar: of the setting, which decides what units there are.
    """
    units = UNITS.get(metavar)
    if units is None or not isinstance(value, str):
        return value
    found = _WITH_UNIT.fullmatch(value.strip())
    factor = found and {unit.lower(): factor for unit, factor in units.items()}.get(
        found[2].lower()
    )
    if found is None or factor is None:
        return value
    number = float(found[1]) * factor
    # A part of a byte does not count, and a number of seconds stays what was written.
    return int(number) if metavar == "BYTES" else round(number, 6)


def with_unit(value: object, metavar: str) -> str:
    """A number as people write it, such as `20s` or `64MB`; "" if it has no unit or is 0.

    metavar: as of `without_unit`, which reads it.
    """
    if metavar not in UNITS or not isinstance(value, int | float) or not value:
        return ""
    names = ("d", "h", "min", "s", "ms") if metavar == "SECONDS" else ("TB", "GB", "MB", "KB", "B")
    for name in names:
        number = value / UNITS[metavar][name]
        if number >= 1 and number == int(number):
            return f"{number:g}{name}"
    return ""


class Field(NamedTuple):
    """One setting. `allowed` is its type and range in words, `default` the value itself."""

    name: str
    annotation: Any
    default: Any
    help: str
    allowed: str
    metavar: str
    is_secret: bool
    reload: Reload

    @property
    def is_list(self) -> bool:
        return isinstance(self.default, tuple)

    @property
    def flag(self) -> str:
        """Its flag; a list's flag gives one of its values."""
        name = self.name.removesuffix("s") if self.is_list else self.name
        return "--" + name.replace("_", "-")

    @property
    def shown_default(self) -> str:
        """The default as one would write it; "" if there is none."""
        if self.default in (None, (), msgspec.NODEFAULT):
            return ""
        if isinstance(self.default, float):
            return f"{self.default:.4g}" if self.default < 1 else f"{self.default:g}"
        return ", ".join(self.default) if self.is_list else str(self.default).lower()

    def convert(self, value: object, called: str, *, is_text: bool = False) -> Any:
        """The value in the field's type. Raises SettingsError, in which the field is `called`.

        is_text: the value is from a command line, where numbers are text.
        """
        try:
            number = without_unit(value, self.metavar)
            return msgspec.convert(number, self.annotation, strict=not is_text)
        except msgspec.ValidationError:
            shown = "" if self.is_secret else f"={value!r}"
            units = _SHOWN_UNITS.get(self.metavar)
            form = f", or with a unit, as {units}" if units and isinstance(value, str) else ""
            raise SettingsError(f"{called}{shown}: must be {self.allowed}{form}") from None


@cache
def fields_of(cls: type[msgspec.Struct]) -> Mapping[str, Field]:
    """The fields of a class that have a help text, by name."""
    hints = get_type_hints(cls, include_extras=True)
    found = {}
    for field in msgspec.structs.fields(cls):
        notes = getattr(hints[field.name], "__metadata__", ())
        if text := next((note for note in notes if isinstance(note, str)), ""):
            reload = next((note for note in notes if isinstance(note, Reload)), Reload())
            found[field.name] = _field(field.name, hints[field.name], field.default, text, reload)
    return found


def _field(name: str, annotation: Any, default: Any, text: str, reload: Reload) -> Field:
    kind, prefix = inspect.type_info(annotation), ""
    extra: dict[str, Any] = {}
    while isinstance(kind, inspect.Metadata | inspect.UnionType | inspect.VarTupleType):
        if isinstance(kind, inspect.Metadata):
            extra, kind = (kind.extra or {}) | extra, kind.type
        elif isinstance(kind, inspect.UnionType):
            kind = next(one for one in kind.types if not isinstance(one, inspect.NoneType))
        else:
            kind, prefix = kind.item_type, "a list, each "
    metavar = extra.get("metavar") or next((m for end, m in _METAVARS if name.endswith(end)), "N")
    if isinstance(kind, inspect.LiteralType):
        metavar = "|".join(map(str, kind.values))
    allowed = prefix + (extra.get("allowed") or _allowed(kind))
    is_secret = extra.get("is_secret", False)
    return Field(name, annotation, default, text, allowed, metavar, is_secret, reload)


def _allowed(kind: inspect.Type) -> str:
    match kind:
        case inspect.LiteralType(values=(*others, last)):
            return f"{', '.join(map(str, others))} or {last}"
        case inspect.BoolType():
            return "true or false"
        case inspect.IntType(ge=low, le=high):
            return "an integer" + _range(low, None, high)
        case inspect.FloatType(ge=low, gt=above, le=high):
            return "a number" + _range(low, above, high)
    raise TypeError(f"a setting cannot be of type {kind}")


def _range(low: float | None, above: float | None, high: float | None) -> str:
    if above is not None:
        return f" above {above:.12g} and at most {high:.12g}"
    return f" of at least {low:.12g}" if high is None else f" from {low:.12g} to {high:.12g}"


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


_BALANCER, _ENGINE = fields_of(BalancerSettings), fields_of(EngineSettings)
TABLES: Mapping[str, Mapping[str, Field]] = {
    "launch": {
        **fields_of(LaunchSettings),
        **{name: field for name, field in _ENGINE.items() if name not in _BALANCER},
    },
    "balancer": {name: field for name, field in _BALANCER.items() if name != "workers"},
    "picker": {n: field for n, field in fields_of(PickerSettings).items() if n not in _BALANCER},
    "tenants": {name: field for name, field in fields_of(Tenant).items() if name != "name"},
    "hints": {n: field for n, field in fields_of(DefaultHint).items() if n not in ("of", "name")},
    "models": fields_of(Model),
    "aliases": {},
    "engine": {},
}
"""The tables of the TOML file and their keys. `[engine]` has SGLang's flags as keys, `[aliases]`
names."""


def launch_flags() -> list[str]:
    """The launcher's own flags."""
    fields = {**TABLES["launch"], **TABLES["balancer"]}
    return ["--config", "--tenant", *(field.flag for field in fields.values())]
