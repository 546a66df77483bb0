"""The tiers of memory that keep a prefix's KV."""

from enum import StrEnum


class Tier(StrEnum):
    """From the fastest to the slowest. Events and the API use these names."""

    DEVICE = "device"
    """The engine's device: a request reads it at once."""
    HOST = "host"
    """Memory of the engine's machine that this engine alone uses: a request loads it first."""
    SHARED = "shared"
    """Memory of a machine that all of its engines use."""
