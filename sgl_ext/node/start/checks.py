"""All checks of the node's engines that need no engine."""

from sgl_ext.node.hardware import Hardware, check_capacity
from sgl_ext.node.start.addresses import check_addresses
from sgl_ext.node.start.flags import check_flags
from sgl_ext.node.start.model import check_model
from sgl_ext.node.start.room import check_disks, check_gpus, check_memory
from sgl_ext.settings.schema import LaunchSettings
from sgl_ext.settings.sources import launch_flags


def check_settings(settings: LaunchSettings) -> list[str]:
    """What a start should know that ends nothing, without a look at the machine's devices. Raises
    SettingsError for what would end it."""
    check_flags(settings.engine_args, launch_flags())
    check_addresses(settings)
    notes = [check_disks(settings)]
    if settings.ray_address is None:  # else engines run on machines of which nothing is known
        notes.append(check_model(settings))
    return [note for note in notes if note]


def check_hardware(settings: LaunchSettings, found: Hardware) -> None:
    """Raises SettingsError if there are too few devices for the engines, or too little memory."""
    check_capacity(settings, found)
    check_memory(settings, found)
    check_gpus(settings, found)


def check_restart(settings: LaunchSettings) -> None:
    """Raises SettingsError if an engine with these settings would not start in place of one."""
    check_flags(settings.engine_args, launch_flags())
    check_model(settings)
