"""Checks before SGLang is imported, which takes many seconds."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

from sgl_ext.settings.schema import EngineSettings

SUPPORTED_SGLANG = "0.5.23"
PLUGIN = "sgl_ext"
_OFF = ("", "0", "false", "no", "off", "n", "f")

CACHE_BACKEND = "sgl_ext"
"""The name under which `--radix-cache-backend` selects our cache."""


def check_environment(environ: Mapping[str, str] = os.environ) -> None:
    """Raises RuntimeError or ValueError that names what the plugin cannot work with."""
    try:
        installed = version("sglang")
    except PackageNotFoundError:
        raise RuntimeError("SGLang is not installed: pip install 'sgl-ext[engine]'") from None
    if installed != SUPPORTED_SGLANG:
        raise RuntimeError(
            f"it is made for SGLang {SUPPORTED_SGLANG} alone, and this is {installed}"
        )
    if environ.get("SGLANG_RUST_SERVER", "").lower() not in _OFF:
        raise RuntimeError("SGLANG_RUST_SERVER is set, and its front end has no hooks: unset it")
    allowed = environ.get("SGLANG_PLUGINS", "")
    if allowed.strip() and PLUGIN not in (name.strip() for name in allowed.split(",")):
        raise RuntimeError(f"SGLANG_PLUGINS={allowed!r} leaves out {PLUGIN!r}")
    EngineSettings.from_environment(environ)
