"""What a `Residency` holds, for tests."""

from __future__ import annotations

from copy import deepcopy

from radix.residency import Residency
from radix.residency_changes import Stored


def everything(held: Residency) -> list[Stored]:
    """All segments, parents first. What `take` returns next stays as it is."""
    copy = deepcopy(held)
    copy.renew()
    return copy.take().stored
