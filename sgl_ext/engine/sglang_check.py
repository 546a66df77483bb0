"""Verifies at a start that SGLang has every symbol and attribute that the extension uses.

Hooks verify themselves (`sgl_ext.engine.hooks`). This is about what the extension calls and reads.
"""

import dis
import pkgutil
from collections.abc import Iterable, Iterator
from inspect import unwrap
from itertools import pairwise
from types import CodeType, FunctionType, ModuleType
from typing import Any


def verify(
    symbols: Iterable[str],
    types: Iterable[ModuleType],
    variables: Iterable[tuple[str, str]] = (),
) -> None:
    """Raises RuntimeError that names what SGLang lacks of these symbols, declared attributes, and
    local variables, each with the path of its function."""
    if lacking := missing(symbols, types) + missing_variables(variables):
        raise RuntimeError(f"it has no {', '.join(lacking)}")


def missing(symbols: Iterable[str], types: Iterable[ModuleType]) -> list[str]:
    """What SGLang lacks of these symbols, and of the attributes that these modules declare."""
    lacking = [path for path in symbols if _resolved(path) is None]
    for module in types:
        for path, names in declared(module):
            found = _resolved(path)
            if found is None:
                lacking.append(path)
            else:
                lacking += [f"{path}.{name}" for name in names if not _has(found, name)]
    return lacking


def missing_variables(variables: Iterable[tuple[str, str]]) -> list[str]:
    """Those of these variables that their functions lack."""
    return [f"{path}: {name}" for path, name in variables if name not in _variables_of(path)]


def _variables_of(path: str) -> tuple[str, ...]:
    found = _resolved(path)
    code = None if found is None else unwrap(found).__code__
    return () if code is None else code.co_varnames + code.co_cellvars


def declared(module: ModuleType) -> Iterator[tuple[str, list[str]]]:
    """For each type of a module the class that it stands for, and the attributes it declares."""
    for described in vars(module).values():
        path = getattr(described, "__sglang__", None)
        if path is not None and described.__module__ == module.__name__:
            methods = [name for name, one in vars(described).items() if _is_attribute(name, one)]
            yield path, [*vars(described).get("__annotations__", {}), *methods]


def _is_attribute(name: str, value: Any) -> bool:
    is_ours = name.startswith(("__", "_abc_", "_is_"))
    return isinstance(value, (FunctionType, property)) and not is_ours


def _resolved(path: str) -> Any:
    try:
        return pkgutil.resolve_name(path)
    except (ImportError, AttributeError):
        return None


def _has(owner: type, name: str) -> bool:
    """Whether instances of a class have an attribute: the class has it, declares it, or one of
    its methods sets it."""
    if hasattr(owner, name):
        return True
    for base in owner.__mro__:
        if name in vars(base).get("__annotations__", ()):
            return True
        methods = (unwrap(one) for one in vars(base).values() if isinstance(one, FunctionType))
        if any(_sets(method.__code__, name) for method in methods):
            return True
    return False


def _sets(code: CodeType, name: str) -> bool:
    """Whether a method's code assigns to `self.name`."""
    if name not in code.co_names:
        return False
    for before, step in pairwise(dis.get_instructions(code)):
        if step.opname == "STORE_ATTR" and step.argval == name:
            loaded = before.argval if isinstance(before.argval, tuple) else (before.argval,)
            if loaded[-1] == "self":
                return True
    return False
