"""The tier that all engines of a node share: what is refused with it, and the folder of its pages.

The folder is in shared memory, belongs to the launcher, and ends with it.
"""

import os
from collections.abc import Iterator
from pathlib import Path

from sgl_ext.node.start.flags import values_of
from sgl_ext.node.start.room import shown
from sgl_ext.settings.schema import LEAST_TIER_BYTES, LaunchSettings, SettingsError
from sgl_ext.settings.shared_tier import FOLDER_VARIABLE, OWN_FLAGS
from sgl_ext.temporary_folder import make_folder, remove_stale

SHARED_MEMORY = Path("/dev/shm")
_FOLDERS = "sgl-ext-tier-"
_HOST_FLAG = "--enable-hierarchical-cache"


def check_shared_tier(settings: LaunchSettings, parent: Path = SHARED_MEMORY) -> None:
    """Raises SettingsError if the engines cannot share a tier, or if shared memory has no room."""
    size = settings.shared_tier_bytes
    if not size:
        return
    remove_stale(_FOLDERS, parent)  # a launcher that was killed left it, and it takes memory
    for problem in _problems(settings, parent):
        raise SettingsError(f"shared_tier_bytes={size}: {problem}")


def _problems(settings: LaunchSettings, parent: Path) -> Iterator[str]:
    if settings.shared_tier_bytes < LEAST_TIER_BYTES:
        yield f"must be 0, or at least {LEAST_TIER_BYTES}"
    if settings.ray_address is not None:
        yield "engines on Ray are on other machines; it is for those of one"
    if settings.engine.shared_prefixes:
        yield "SGLang's hashes take none of the tokens that mark a group after shared_prefixes"
    flags = values_of(settings.engine_args)
    if _HOST_FLAG not in flags:
        yield f"engines read it into their host pools; add {_HOST_FLAG}"
    for flag in (*OWN_FLAGS, "--radix-cache-backend", "--hicache-host-memory-mode"):
        if flag in flags:
            yield f"it does not work with {flag}={flags[flag]}; leave one out"
    try:
        found = os.statvfs(parent)
    except OSError as error:
        yield f"{parent}: {error.strerror}"
        return
    free = found.f_bavail * found.f_frsize
    if settings.shared_tier_bytes > free:
        yield f"{parent} has {shown(free)} free; a container gets more by --shm-size"


def open_shared_tier(settings: LaunchSettings, parent: Path = SHARED_MEMORY) -> None:
    """Makes the folder, which the processes that start from now on find by the environment."""
    if settings.shared_tier_bytes:
        os.environ[FOLDER_VARIABLE] = str(make_folder(_FOLDERS, parent))
