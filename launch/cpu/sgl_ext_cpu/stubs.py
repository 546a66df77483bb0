"""Stand-ins for torchvision, which SGLang imports and a text model never calls.

A few of SGLang's multimodal configs import names from torchvision. No CPU build of it is published
for the CPU build of torch, so the platform puts these modules in its place. Every name can be
imported, and a call raises an error that says what is missing.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

MODULES = (
    "torchvision",
    "torchvision.io",
    "torchvision.transforms",
    "torchvision.transforms.functional",
    "torchvision.transforms.v2",
    "torchvision.transforms.v2.functional",
)


class TorchvisionMissing(RuntimeError):
    """Code called torchvision, which is not installed."""


class _Name:
    """A name taken from a stub module: it can be stored and passed on, but not called."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __getattr__(self, attribute: str) -> _Name:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return _Name(f"{self._path}.{attribute}")

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TorchvisionMissing(
            f"{self._path} was called, but torchvision is not installed: "
            "the CPU platform serves text models only"
        )


class _Stub(ModuleType):
    """A stub module: any public name imported from it is a `_Name`."""

    def __getattr__(self, attribute: str) -> _Name:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return _Name(f"{self.__name__}.{attribute}")


def install() -> bool:
    """Put the stubs into `sys.modules` unless torchvision can be imported.

    Returns whether the stubs are in place. Can be called again.
    """
    present = sys.modules.get("torchvision")
    if present is not None:
        return isinstance(present, _Stub)
    if importlib.util.find_spec("torchvision") is not None:
        return False
    _settle_probe()
    for name in MODULES:
        stub = _Stub(name)
        stub.__spec__ = ModuleSpec(name, loader=None, is_package=True)
        stub.__path__ = []
        sys.modules[name] = stub
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, stub)
    return True


def _settle_probe() -> None:
    """Make transformers look for torchvision now, and cache that it is absent.

    Once the stubs are in place, transformers would find them, and import image processors that
    call torchvision.
    """
    from transformers.utils import import_utils

    if import_utils.is_torchvision_available():
        raise RuntimeError("transformers sees a torchvision that Python cannot find")
