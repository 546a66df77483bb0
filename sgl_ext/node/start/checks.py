"""All checks of the node's engines that need no engine."""

from sgl_ext.node.hardware import Hardware, check_capacity, find_hardware
from sgl_ext.node.start.addresses import check_addresses
from sgl_ext.node.start.flags import check_flags
from sgl_ext.node.start.model import check_model
from sgl_ext.node.start.room import check_disks, check_gpus, check_host_pools, check_memory
from sgl_ext.node.start.shared_tier import check_shared_tier
from sgl_ext.settings.schema import LaunchSettings
from sgl_ext.settings.sources import launch_flags


def check_start(settings: LaunchSettings) -> tuple[Hardware | None, list[str]]:
    """The devices for the engines, None if they run on other machines, and what the operator should
    know. Raises SettingsError for what would end the start; what takes seconds comes last."""
    check_flags(settings.engine_args, launch_flags())
    check_addresses(settings)
    check_shared_tier(settings)
    notes = [check_disks(settings)]
    found = None
    if settings.ray_address is None:
        notes.append(check_model(settings))
        found = find_hardware(settings)
        check_capacity(settings, found)
        check_memory(settings, found)
        check_gpus(settings, found)
        notes.append(check_host_pools(settings, found))
        notes.insert(0, found.reason)
    return found, [note for note in notes if note]


def check_restart(settings: LaunchSettings) -> None:
    """Raises SettingsError if an engine with these settings would not start in place of one."""
    check_flags(settings.engine_args, launch_flags())
    check_model(settings)
