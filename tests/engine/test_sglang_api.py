"""What the extension uses of SGLang is declared, and a start finds what is missing. Pure."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any, Protocol

import pytest

from sgl_ext.engine import sglang_api, sglang_check
from sgl_ext.engine.sglang_types import stands_for


class Base:
    inherited: int

    def __init__(self) -> None:
        self.assigned = 1
        other: Any = ModuleType("other")
        other.of_another = 1


class Server(Base):
    constant = 1

    @property
    def computed(self) -> int:
        return 1

    def serve(self) -> None: ...


@pytest.fixture(autouse=True)
def _installed() -> Iterator[None]:
    """A module that stands for one of SGLang's."""
    module: Any = ModuleType("an_sglang")
    module.Server = Server
    sys.modules["an_sglang"] = module
    yield
    del sys.modules["an_sglang"]


def types_of(declares: type) -> list[ModuleType]:
    module: Any = ModuleType(declares.__module__)
    module.__name__ = declares.__module__
    module.declares = declares
    return [module]


def test_an_attribute_is_found_wherever_a_class_has_it() -> None:
    @stands_for("an_sglang:Server")
    class Declared(Protocol):
        constant: int
        inherited: int
        assigned: int

        @property
        def computed(self) -> int: ...
        def serve(self) -> None: ...

    sglang_check.verify({"Server": "an_sglang:Server"}, types_of(Declared))


def test_a_missing_attribute_is_named() -> None:
    @stands_for("an_sglang:Server")
    class Declared(Protocol):
        assigned: int
        planted: int
        of_another: int

        def serve(self) -> None: ...
        def stop(self) -> None: ...

    with pytest.raises(RuntimeError) as raised:
        sglang_check.verify({}, types_of(Declared))
    names = ("planted", "of_another", "stop")
    assert str(raised.value) == "it has no " + ", ".join(f"an_sglang:Server.{n}" for n in names)


def test_a_missing_symbol_is_named() -> None:
    symbols = {"Server": "an_sglang:Server", "Gone": "an_sglang:Gone", "Lost": "no_sglang:Lost"}
    with pytest.raises(RuntimeError, match="it has no an_sglang:Gone, no_sglang:Lost"):
        sglang_check.verify(symbols, [])


def test_the_class_of_an_attribute_is_named_when_it_is_missing() -> None:
    @stands_for("an_sglang:Gone")
    class Declared(Protocol):
        constant: int

    assert sglang_check.missing({}, types_of(Declared)) == ["an_sglang:Gone"]


def test_an_undeclared_symbol_cannot_be_imported() -> None:
    with pytest.raises(AttributeError, match="declares no Engine"):
        _ = sglang_api.Engine
