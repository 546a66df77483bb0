"""The launcher's own log."""

import logging
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from sgl_ext.logs import write_logs
from sgl_ext.node.log_dir import new_log, open_log
from sgl_ext.settings.fields import changed
from sgl_ext.settings.schema import LaunchSettings
from sgl_ext.version import versions

log = logging.getLogger(__name__)


def launcher_log(settings: LaunchSettings) -> Path:
    """Its path."""
    return Path(settings.log_dir) / "launcher.log"


def begin_log(settings: LaunchSettings, console: Console) -> Callable[[str], None]:
    """Begins the log. Gives a function that prints a line and logs it, too."""
    balancer = settings.balancer
    descriptor = open_log(new_log(launcher_log(settings)))
    write_logs("launcher", balancer.log_format, balancer.log_level, descriptor)
    log.info("starting", extra=versions()._asdict())
    log.info("settings other than the defaults", extra=changed(settings))

    def say(text: str) -> None:
        console.print(text, highlight=False, soft_wrap=True, markup=False)
        log.info("%s", text)

    return say
