"""What tests of the engine's HTTP process share: the extension that its hooks reach."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from sgl_ext.engine.http.extension import HttpExtension, install, installed
from sgl_ext.settings.schema import EngineSettings


@pytest.fixture
def extend() -> Iterator[Callable[..., HttpExtension]]:
    """Installs an extension with these settings, for as long as the test runs."""
    before = installed()

    def extend(**settings: Any) -> HttpExtension:
        install(HttpExtension(EngineSettings(**settings)))
        return installed()

    yield extend
    install(before)


@pytest.fixture
def extension(extend: Callable[..., HttpExtension]) -> HttpExtension:
    """An installed extension with the default settings."""
    return extend()
