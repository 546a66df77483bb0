"""Which kinds of a thing `make test` covers; `make test-slow` has the others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow_but_for(kept: Iterable[str], kinds: Iterable[str]) -> list[Any]:
    """Parameters of all kinds, by name; those that are not kept run in `make test-slow` only."""
    kept = {*kept}
    return [each if each in kept else pytest.param(each, marks=pytest.mark.slow) for each in kinds]
