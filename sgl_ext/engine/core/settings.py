"""This engine's settings."""

from __future__ import annotations

from functools import cache

from sgl_ext.settings.schema import EngineSettings


@cache
def settings() -> EngineSettings:
    """The settings from the launcher, read once, or the defaults."""
    return EngineSettings.from_environment()
