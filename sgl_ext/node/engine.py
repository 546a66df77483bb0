"""An engine of this node, as a child process whose model and flags can change."""

from itertools import pairwise
from pathlib import Path

from sgl_ext.node import hardware
from sgl_ext.node.child import Child
from sgl_ext.node.ports import reachable
from sgl_ext.settings.schema import LaunchSettings

# The command's, which engines need not know; SGLang would warn of their names.
_COMMAND_VARIABLES = ("SGL_EXT_URL", "SGL_EXT_API_KEY")
_SERVED_NAME = "--served-model-name"


class Engine(Child):
    """One engine. It keeps its port, its devices and its log over all its starts.

    settings: the node's settings as its next start uses them.
    """

    def __init__(
        self,
        settings: LaunchSettings,
        found: hardware.Hardware,
        index: int,
        port: int,
        log: Path,
    ) -> None:
        self._found = found
        self._port = port
        environment = hardware.engine_environment(settings, found, index)
        url = f"http://{reachable(settings.engine_host, port)}"
        super().__init__(f"engine-{index}", (), environment, log, url, _COMMAND_VARIABLES)
        self.configure(settings)

    def configure(self, settings: LaunchSettings) -> None:
        """What the next start uses: the model path and SGLang's flags."""
        self.settings = settings
        self.change_command(hardware.engine_command(settings, self._found, self._port))


def served_model(settings: LaunchSettings) -> str:
    """The name under which an engine with these settings serves its model."""
    words = [word for arg in settings.engine_args for word in arg.split("=", 1)]
    given = [value for flag, value in pairwise(words) if flag == _SERVED_NAME]
    return given[-1] if given else settings.model_name
