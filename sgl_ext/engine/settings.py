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
    """The plugin's settings. `strip_headers` empty: nothing is stripped."""

    strip_headers: tuple[str, ...] = (BILLING_HEADER,)

    def to_environment(self) -> dict[str, str]:
        return {VARIABLE: orjson.dumps(asdict(self)).decode()}

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> EngineSettings:
        """The settings set, or the defaults. Raises ValueError naming the variable."""
        raw = environ.get(VARIABLE)
        if not raw:
            return cls()
        try:
            return cls(strip_headers=tuple(map(str, orjson.loads(raw)["strip_headers"])))
        except (orjson.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{VARIABLE}={raw!r} is not the plugin's settings: {error}") from error
