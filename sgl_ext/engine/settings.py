"""What the launcher tells the plugin, carried to every engine process in one variable."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import orjson

from sgl_ext.requests.headers import BILLING_HEADER

VARIABLE = "SGL_EXT_ENGINE"


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The plugin's settings. `strip_headers` empty: nothing is stripped. `sort_tools`: a request's
    tools are put in the order of their names."""

    strip_headers: tuple[str, ...] = (BILLING_HEADER,)
    sort_tools: bool = False

    def to_environment(self) -> dict[str, str]:
        return {VARIABLE: orjson.dumps(asdict(self)).decode()}

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> EngineSettings:
        """The settings set, or the defaults. Raises ValueError naming the variable."""
        raw = environ.get(VARIABLE)
        if not raw:
            return cls()
        try:
            told = orjson.loads(raw)
            names = tuple(map(str, told["strip_headers"]))
            return cls(strip_headers=names, sort_tools=bool(told.get("sort_tools", False)))
        except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{VARIABLE}={raw!r} is not the plugin's settings: {error}") from error
