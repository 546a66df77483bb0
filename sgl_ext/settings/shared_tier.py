"""The tier that all engines of a machine share, as a launcher or an operator gives it to an engine.

SGLang loads the class that is named here, and hands it the rest.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta, Struct

from sgl_ext.settings.schema import SettingsError

FOLDER_VARIABLE = "SGLEXT_SHARED_TIER"
"""The environment variable with the folder that the launcher made."""
OWN_FLAGS = ("--hicache-storage-backend", "--hicache-storage-backend-extra-config")
"""The flags of SGLang that name the tier below host memory."""
_CLASS = "SharedPages"


class Tier(NamedTuple):
    """A folder for pages, and what the pages of all engines may take there."""

    folder: Path
    budget_bytes: int


class _Config(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The value of --hicache-storage-backend-extra-config.

    folder: where the pages are, if not where FOLDER_VARIABLE says. What follows it is as SGLang
    wants it.
    """

    budget_bytes: Annotated[int, Meta(ge=1)]
    folder: str | None = None
    backend_name: str = "sgl-ext"
    module_path: str = "sgl_ext.engine.tiers.shared_pages"
    class_name: str = _CLASS
    interface_v1: Literal[1] = 1
    file_storage_path: str | None = None
    hicache_storage_pass_prefix_keys: bool = True


def tier_flags(budget_bytes: int) -> list[str]:
    """The flags that give an engine the tier; none without a budget. A user's flags may follow.

    A request waits until what the tier has of its prompt is read, because that takes less time than
    to compute it; but for a limited time, so that no read that hangs can hold it.
    """
    if not budget_bytes:
        return []
    config = msgspec.json.encode(_Config(budget_bytes=budget_bytes)).decode()
    backend, extra = OWN_FLAGS
    return [backend, "dynamic", extra, config, "--hicache-storage-prefetch-policy", "timeout"]


def is_shared_tier(extra_config: str | None) -> bool:
    """Whether a value of --hicache-storage-backend-extra-config names the tier."""
    return f'"{_CLASS}"' in (extra_config or "")


def read_tier(config: object, environ: Mapping[str, str] = os.environ) -> Tier:
    """The tier that SGLang was given. Raises SettingsError."""
    _, extra = OWN_FLAGS
    try:
        read = msgspec.convert(config, _Config)
    except msgspec.ValidationError as error:
        raise SettingsError(f"{extra}: {error}") from None
    folder = read.folder or environ.get(FOLDER_VARIABLE)
    if not folder:
        raise SettingsError(f'{extra}: no "folder", and the launcher named none')
    return Tier(Path(folder), read.budget_bytes)
