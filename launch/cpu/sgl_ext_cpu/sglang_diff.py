"""Lists what changed between two versions of SGLang in the symbols that the extension uses.

    python -m sgl_ext_cpu.sglang_diff OLD NEW

OLD and NEW are folders that contain the package `sglang`, installed or unpacked. Both are read and
not imported. One line for each change:

    missing     a symbol or an attribute that NEW does not have
    signature   a function with other parameters
    type        an attribute that is declared with another type
    source      a function with another body, which may still do the same

See docs/guide/operations.md.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from sgl_ext.engine import sglang_api, sglang_http_types, sglang_types
from sgl_ext.engine.hooks import rows
from sgl_ext.engine.sglang_check import declared

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_DEPTH = 8


class Source:
    """One version of SGLang as source files."""

    def __init__(self, root: Path) -> None:
        if not (root / "sglang").is_dir():
            raise SystemExit(f"{root} contains no package sglang")
        self._root = root
        self.module = cache(self._module)
        self.imports = cache(self._imports)

    def find(self, path: str) -> ast.AST | None:
        """The definition at a dotted path, imports and base classes followed; None if missing."""
        names = path.replace(":", ".").split(".")
        for length in range(len(names) - 1, 0, -1):
            name = ".".join(names[:length])
            if self.module(name) is not None:
                return self._member(name, names[length:])
        return None

    def _module(self, name: str) -> ast.Module | None:
        base = self._root.joinpath(*name.split("."))
        for file in (base.with_suffix(".py"), base / "__init__.py"):
            if file.is_file():
                return ast.parse(file.read_text(encoding="utf-8"))
        return None

    def _imports(self, module: str) -> dict[str, tuple[str, str]]:
        """The names that a module imports from others; `*` is one of them."""
        tree = self.module(module)
        return {
            alias.asname or alias.name: (node.module, alias.name)
            for node in (ast.walk(tree) if tree is not None else ())
            if isinstance(node, ast.ImportFrom) and node.module and not node.level
            for alias in node.names
        }

    def _member(self, module: str, names: list[str], depth: int = _DEPTH) -> ast.AST | None:
        tree = self.module(module)
        if tree is None or not depth:
            return None
        found = _named(tree, names[0])
        if found is None:
            imports = self.imports(module)
            source, name = imports.get(names[0]) or imports.get("*") or ("", "")
            rest = names if name == "*" else [name, *names[1:]]
            return self._member(source, rest, depth - 1)
        for name in names[1:]:
            found = self._attribute(module, found, name, depth)
        return found

    def _attribute(
        self, module: str, owner: ast.AST | None, name: str, depth: int
    ) -> ast.AST | None:
        """What defines an attribute of a class: its body, `self.name =` in a method, or a base."""
        if not isinstance(owner, ast.ClassDef):
            return None
        found = _named(owner, name) or _assigned(owner, name)
        for base in owner.bases if found is None else ():
            path = ast.unparse(base).split("[")[0].split(".")
            found = found or self._member(module, [*path, name], depth - 1)
        return found


def _named(scope: ast.Module | ast.ClassDef, name: str) -> ast.AST | None:
    """The statement of a scope that defines a name; statements in `if` and `try` count."""
    waiting: list[ast.AST] = list(scope.body)
    found: ast.AST | None = None
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, (ast.If, ast.Try, ast.With)):
            waiting += list(ast.iter_child_nodes(node))
        elif isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            found = node if node.name == name else found
        elif name in _targets(node):
            found = node
    return found


def _assigned(owner: ast.ClassDef, name: str) -> ast.AST | None:
    """The statement of a method that assigns `self.name`."""
    for node in ast.walk(owner):
        if f"self.{name}" in _targets(node):
            return node
    return None


def _targets(node: ast.AST) -> list[str]:
    if isinstance(node, (ast.AnnAssign, ast.AugAssign)):
        return [ast.unparse(node.target)]
    if isinstance(node, ast.Assign):
        return [ast.unparse(one) for top in node.targets for one in getattr(top, "elts", [top])]
    return []


def used() -> Iterator[str]:
    """Every symbol and attribute of SGLang that the extension hooks, calls or reads."""
    yield from (symbol for _, symbol, *_ in rows() if symbol.startswith("sglang."))
    yield from sglang_api.ANY_PROCESS + sglang_api.HTTP_PROCESS + sglang_api.SCHEDULER_PROCESS
    for module in (sglang_types, sglang_http_types):
        for path, names in declared(module):
            yield from (f"{path}.{name}" for name in names)


def changes(old: Source, new: Source, paths: Iterable[str]) -> Iterator[str]:
    """One line for each of these symbols that differs. A symbol that OLD's source does not define
    is left out: SGLang makes it at run time, and a start verifies it."""
    for path in sorted(set(paths)):
        before, after = old.find(path), new.find(path)
        if before is None:
            continue
        if after is None:
            yield f"missing    {path}"
        elif isinstance(before, _Function) and isinstance(after, _Function):
            was, now = ast.unparse(before.args), ast.unparse(after.args)
            if was != now:
                yield f"signature  {path}: ({was}) -> ({now})"
            elif _body(before) != _body(after):
                yield f"source     {path}"
        elif isinstance(before, ast.AnnAssign) and isinstance(after, ast.AnnAssign):
            was, now = ast.unparse(before.annotation), ast.unparse(after.annotation)
            if was != now:
                yield f"type       {path}: {was} -> {now}"


def _body(function: _Function) -> str:
    """A function's code without comments and docstring."""
    body = function.body
    if ast.get_docstring(function) is not None:
        body = body[1:]
    return "\n".join(map(ast.unparse, body))


def main(argv: list[str]) -> int:
    """Prints the changes; returns 1 if there are any."""
    if len(argv) != 2:
        raise SystemExit(__doc__)
    found = list(changes(Source(Path(argv[0])), Source(Path(argv[1])), used()))
    print("\n".join(found) or "nothing that the extension uses has changed")
    return bool(found)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
