"""Verifies at a start that SGLang has every symbol and attribute that the extension uses.

`missing` is about what the extension calls and reads, `unlike` about what it hooks, and
`is_rewritten` about functions whose code it relies on.
"""

import dis
import hashlib
import json
import os
import pkgutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cache
from inspect import getsource, signature, unwrap
from itertools import pairwise
from pathlib import Path
from textwrap import dedent
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

from sgl_ext.engine.sglang_versions import TESTED

_OFF = "SGLEXT_HOOKS_OFF"
_TESTED = Path(__file__).with_name("tested.json")


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


def unlike(path: str, tested: str | None) -> str | None:
    """How a function differs from the one that was tested; None if it does not.

    tested: its `signature_of` then; None if any will do.
    """
    found = _resolved(path)
    if found is None:
        return "is missing"
    if tested is None or (given := signature_of(found)) == tested:
        return None
    return f"takes {given}, not {tested}"


class Tested(NamedTuple):
    """What was tested with one version of SGLang. For a version that was not, of all of them.

    signatures: of each hooked function. sources: the fingerprints of each function that the
        extension relies on, one for each version.
    """

    signatures: Mapping[str, str]
    sources: Mapping[str, Collection[str]]


def tested_with(version: str) -> Tested:
    """What a start with this version of SGLang is compared with."""
    found: dict[str, dict[str, dict[str, str]]] = json.loads(_TESTED.read_text())
    signatures = dict(found[TESTED[-1]]["signatures"])
    if version in found:
        signatures |= found[version]["signatures"]
    sources: dict[str, set[str]] = {}
    for name in (version,) if version in found else TESTED:
        for path, fingerprint in found[name]["sources"].items():
            sources.setdefault(path, set()).add(fingerprint)
    return Tested(signatures, sources)


def is_rewritten(path: str, tested: Collection[str] | None) -> bool:
    """Whether a function's source is none of those that were tested. tested: None: any will do."""
    return tested is not None and fingerprint_of(_resolved(path)) not in tested


def fingerprint_of(function: Callable[..., Any] | None) -> str:
    """Of a function's source without blank lines and lines of comments; "" if it has none."""
    try:
        source = dedent(getsource(unwrap(function)))  # type: ignore[arg-type]
    except (OSError, TypeError):
        return ""
    lines = (line.rstrip() for line in source.splitlines())
    code = "\n".join(line for line in lines if line and not line.lstrip().startswith("#"))
    return hashlib.sha256(code.encode()).hexdigest()[:16]


def signatures_of(paths: Iterable[str]) -> dict[str, str]:
    """Those of the installed SGLang."""
    return {path: signature_of(_resolved(path)) for path in paths}


def signature_of(function: Callable[..., Any]) -> str:
    """A function's parameters without their types; one with a default ends with "="."""
    found = signature(function)
    bare = [
        one.replace(annotation=one.empty, default=one.empty if one.default is one.empty else _Any())
        for one in found.parameters.values()
    ]
    return str(found.replace(parameters=bare, return_annotation=found.empty))


class _Any:
    """Any default."""

    def __repr__(self) -> str:
        return ""


def note_off(groups: Mapping[str, str]) -> None:
    """Notes, for this process and its children, the groups of hooks that are off, and why."""
    os.environ[_OFF] = json.dumps(groups)


def groups_off() -> dict[str, str]:
    """Those groups."""
    found: dict[str, str] = json.loads(os.environ.get(_OFF, "{}"))
    return found


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
        codes = (method.__code__ for method in methods)
        if any(name in code.co_names and name in _set_by(code) for code in codes):
            return True
    return False


@cache
def _set_by(code: CodeType) -> frozenset[str]:
    """The names that a method's code assigns to of `self`."""
    found = set()
    for before, step in pairwise(dis.get_instructions(code)):
        if step.opname == "STORE_ATTR":
            loaded = before.argval if isinstance(before.argval, tuple) else (before.argval,)
            if loaded[-1] == "self":
                found.add(step.argval)
    return frozenset(found)
