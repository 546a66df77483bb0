"""The application that a tokenizer worker serves: `sgl_ext.engine.core.workers`."""

from typing import Any

from sgl_ext.engine import http_server, plugin, sglang_api
from sgl_ext.engine.core.workers import Workers


def begin_worker() -> Any:
    """Makes this process a worker: its hooks, and SGLang's application with what is ours."""
    workers = Workers.claim()  # before the imports, so that an engine that lost one ends at once
    sglang_api.load_plugins()  # `hooks.current_role` finds this function
    plugin.require_active()
    parent = sglang_api.get_main_process_id()
    _, server_args, _ = sglang_api.read_from_shared_memory(f"multi_tokenizer_args_{parent}")
    sglang_api.publish(server_args, role="tokenizer")
    http_server.extend_app(server_args, workers)
    return sglang_api.app


def __getattr__(name: str) -> Any:
    """`app` is made when a worker asks for it: other processes import this module, too."""
    if name != "app":
        raise AttributeError(name)
    return begin_worker()
