"""All checks of the node's engines that need no engine."""

from collections.abc import Iterator

from sgl_ext.node.hardware import Hardware, check_capacity
from sgl_ext.node.start.flags import check_flags
from sgl_ext.node.start.model import check_model
from sgl_ext.node.start.room import check_disks, check_gpus, check_memory
from sgl_ext.settings.schema import LaunchSettings
from sgl_ext.settings.sources import launch_flags


def check_start(settings: LaunchSettings, found: Hardware | None) -> list[str]:
    """What a start should know that ends nothing. Raises SettingsError for what would end it.

    found: None if the engines run on other machines, about which nothing is known here.
    """
    check_flags(settings.engine_args, launch_flags())
    notes = [check_disks(settings)]
    if found is not None:
        check_capacity(settings, found)
        notes += _notes_of_engines(settings, found)
    return [note for note in notes if note]


def check_restart(settings: LaunchSettings) -> None:
    """Raises SettingsError if an engine with these settings would not start in place of one."""
    check_flags(settings.engine_args, launch_flags())
    check_model(settings)


def _notes_of_engines(settings: LaunchSettings, found: Hardware) -> Iterator[str]:
    yield check_model(settings)
    check_memory(settings, found)
    check_gpus(settings, found)
