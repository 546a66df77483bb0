"""Writes when the functions of a table begin and end, in every process of a node.

Python imports a module of this name at its start if the module's folder is in PYTHONPATH. So the
same code times an engine without our plugin, our engines and the balancer, and needs no change in
them. SGLEXT_STAGES names a JSON file:
{"folder": ..., "symbols": {"package.module:Class.name": stage}}.
A function is wrapped as soon as its module has been imported. Each process writes its own file
into the folder: a line is `stage begin_ns end_ns`, by the monotonic clock that all processes
share, or `!symbol` for a function that does not exist.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

_SHORTEST_NS = 5_000


class Timer(MetaPathFinder):
    """Finds modules as Python does, and wraps the functions that the table names in them."""

    def __init__(self, folder: Path, symbols: dict[str, str]) -> None:
        self._folder = folder
        self._of_process = (0, -1)
        self._by_module: dict[str, dict[str, str]] = {}
        for symbol, stage in symbols.items():
            module, _, path = symbol.partition(":")
            self._by_module.setdefault(module, {})[path] = stage

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self._by_module:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_wrap(module: ModuleType) -> None:
            execute(module)
            for path, stage in self._by_module[name].items():
                self._wrap(module, path, stage)

        spec.loader.exec_module = execute_and_wrap  # type: ignore[method-assign]
        return spec

    def _wrap(self, module: ModuleType, path: str, stage: str) -> None:
        *outer, name = path.split(".")
        owner: Any = module
        for part in outer:
            owner = getattr(owner, part, None)
        original = getattr(owner, name, None)
        if original is None:
            self._write(f"!{module.__name__}:{path}\n")
        elif isinstance(inspect.getattr_static(owner, name), (staticmethod, classmethod)):
            setattr(owner, name, staticmethod(self._timed(original, stage)))
        else:
            setattr(owner, name, self._timed(original, stage))

    def _timed(self, original: Callable[..., Any], stage: str) -> Callable[..., Any]:
        if inspect.iscoroutinefunction(original):

            @functools.wraps(original)
            async def timed_coroutine(*args: Any, **given: Any) -> Any:
                begin = time.monotonic_ns()
                try:
                    return await original(*args, **given)
                finally:
                    self._note(stage, begin)

            return timed_coroutine

        @functools.wraps(original)
        def timed(*args: Any, **given: Any) -> Any:
            begin = time.monotonic_ns()
            try:
                return original(*args, **given)
            finally:
                self._note(stage, begin)

        return timed

    def _note(self, stage: str, begin: int) -> None:
        end = time.monotonic_ns()
        if end - begin >= _SHORTEST_NS:
            self._write(f"{stage} {begin} {end}\n")

    def _write(self, line: str) -> None:
        process, file = self._of_process
        if process != os.getpid():  # the first line, or the first after a fork
            process = os.getpid()
            path = self._folder / str(process)
            file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            self._of_process = (process, file)
        os.write(file, line.encode())


if table := os.environ.get("SGLEXT_STAGES"):
    _table = json.loads(Path(table).read_bytes())
    sys.meta_path.insert(0, Timer(Path(_table["folder"]), _table["symbols"]))
