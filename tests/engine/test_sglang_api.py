"""What the extension uses of SGLang is declared, and a start finds what is missing. Pure."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
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

    sglang_check.verify(["an_sglang:Server"], types_of(Declared))


def test_a_missing_attribute_is_named() -> None:
    @stands_for("an_sglang:Server")
    class Declared(Protocol):
        assigned: int
        planted: int
        of_another: int

        def serve(self) -> None: ...
        def stop(self) -> None: ...

    with pytest.raises(RuntimeError) as raised:
        sglang_check.verify([], types_of(Declared))
    names = ("planted", "of_another", "stop")
    assert str(raised.value) == "it has no " + ", ".join(f"an_sglang:Server.{n}" for n in names)


def test_a_missing_symbol_is_named() -> None:
    symbols = ["an_sglang:Server", "an_sglang:Gone", "no_sglang:Lost"]
    with pytest.raises(RuntimeError, match="it has no an_sglang:Gone, no_sglang:Lost"):
        sglang_check.verify(symbols, [])


def test_the_class_of_an_attribute_is_named_when_it_is_missing() -> None:
    @stands_for("an_sglang:Gone")
    class Declared(Protocol):
        constant: int

    assert sglang_check.missing([], types_of(Declared)) == ["an_sglang:Gone"]


def test_every_symbol_that_the_extension_reads_is_declared() -> None:
    sources = [file.read_text() for file in Path(sglang_api.__file__).parents[1].rglob("*.py")]
    nodes = [node for source in sources for node in ast.walk(ast.parse(source))]
    read = {
        *(one.attr for one in nodes if isinstance(one, ast.Attribute) and is_api(one.value)),
        *(
            alias.name
            for one in nodes
            if isinstance(one, ast.ImportFrom) and one.module == sglang_api.__name__
            for alias in one.names
        ),
    }
    paths = sglang_api.ANY_PROCESS + sglang_api.HTTP_PROCESS + sglang_api.SCHEDULER_PROCESS
    paths += sglang_api.DRAFTS + sglang_api.WORKERS
    tables = {"ANY_PROCESS", "HTTP_PROCESS", "SCHEDULER_PROCESS", "DRAFTS", "WORKERS"}
    assert read - tables == {path.partition(":")[2] for path in paths}


def is_api(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "sglang_api"


def test_an_undeclared_symbol_cannot_be_imported() -> None:
    with pytest.raises(AttributeError, match="declares no Engine"):
        _ = sglang_api.Engine


def test_a_local_variable_that_is_read_must_be_there() -> None:
    module: Any = sys.modules["an_sglang"]

    def generate() -> Any:
        states: dict[str, int] = {}

        def end() -> Any:
            return states

        return end

    module.generate = generate
    path = "an_sglang:generate"
    sglang_check.verify([], [], [(path, "states"), (path, "end")])
    with pytest.raises(RuntimeError, match="generate: ended, an_sglang:none: end"):
        sglang_check.verify([], [], [(path, "ended"), ("an_sglang:none", "end")])
