"""SGLang as it is, for benches: an engine without the plugin, started as ours are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from sgl_ext_cpu.node import CPU_CONFIG, Node, free_port, is_healthy, running_process

from sgl_ext.node.hardware import engine_command, engine_environment, find_hardware
from sgl_ext.settings.sources import launch_settings


@contextmanager
def stock_engine(
    model: Path,
    log_dir: Path,
    *flags: str,
    environment: Mapping[str, str] | None = None,
    config: Path = CPU_CONFIG,
) -> Iterator[Node]:
    """Starts it with the configuration and the flags that our engines get, and ends it.

    It has a session of its own, as each of our engines has: Linux shares the cores among sessions.
    `environment` adds to this process's variables.
    Raises RuntimeError with the end of its log if it does not come up.
    """
    settings = launch_settings(["--config", str(config), "--model-path", str(model), *flags])
    found, port = find_hardware(settings), free_port()
    command = engine_command(settings, found, port)
    command[command.index("-m") + 1] = "sglang.launch_server"
    own = engine_environment(settings, found, 0) | {"SGLANG_PLUGINS": "none"}
    url = f"http://127.0.0.1:{port}"
    with running_process(
        command,
        log_dir / "engine.log",
        partial(is_healthy, url),
        environment={**own, **(environment or {})},
        own_session=True,
    ) as process:
        yield Node(url, (url,), process, log_dir)
