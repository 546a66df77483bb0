"""Writes what a scheduler resolved and made, just before it serves, to the file SGLEXT_FACTS.

Python imports a module of this name at its start if the module's folder is in PYTHONPATH. The file
is a JSON object; a value that this SGLang does not have is null.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

_MODULE, _FUNCTION = "sglang.srt.managers.scheduler", "dispatch_event_loop"
_RUNNER = "tp_worker.model_runner"
_CLASSES = {
    "cache class": "tree_cache",
    "cache's tree core": "tree_cache.tree_core",
    "attention backend": f"{_RUNNER}.attn_backend",
    "attention backend of decoding": f"{_RUNNER}.decode_attn_backend",
    "KV pool": f"{_RUNNER}.token_to_kv_pool",
    "KV allocator": f"{_RUNNER}.token_to_kv_pool_allocator",
    "CUDA graphs of decoding": f"{_RUNNER}.decode_cuda_graph_runner",
    "CUDA graphs of prefill": f"{_RUNNER}.prefill_cuda_graph_runner",
    "model": f"{_RUNNER}.model",
}
_VALUES = {
    "page size": "page_size",
    "tokens in the KV cache": "max_total_num_tokens",
    "most running requests": "max_running_requests",
    "chunk of a prefill": "chunked_prefill_size",
    "overlap scheduling": "enable_overlap",
    "data type": f"{_RUNNER}.dtype",
    "data type of the KV cache": f"{_RUNNER}.kv_cache_dtype",
    "batch sizes of CUDA graphs": f"{_RUNNER}.decode_cuda_graph_capture_bs",
}


class Probe(MetaPathFinder):
    """Finds the scheduler's module as Python does, and wraps the function that serves."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _MODULE:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_wrap(module: ModuleType) -> None:
            execute(module)
            serve = getattr(module, _FUNCTION)

            def note_and_serve(scheduler: Any) -> Any:
                Path(os.environ["SGLEXT_FACTS"]).write_text(json.dumps(facts(scheduler)))
                return serve(scheduler)

            setattr(module, _FUNCTION, note_and_serve)

        spec.loader.exec_module = execute_and_wrap  # type: ignore[method-assign]
        return spec


def facts(scheduler: Any) -> dict[str, Any]:
    classes = {name: _class(_of(scheduler, path)) for name, path in _CLASSES.items()}
    return {**classes, **{name: _plain(_of(scheduler, path)) for name, path in _VALUES.items()}}


def _of(value: Any, path: str) -> Any:
    for name in path.split("."):
        value = getattr(value, name, None)
    return value


def _class(value: Any) -> str | None:
    return None if value is None else f"{type(value).__module__}.{type(value).__qualname__}"


def _plain(value: Any) -> Any:
    return value if isinstance(value, (bool, int, float, list, type(None))) else str(value)


if os.environ.get("SGLEXT_FACTS"):
    sys.meta_path.insert(0, Probe())
