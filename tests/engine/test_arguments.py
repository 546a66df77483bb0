"""The extension reads SGLang's arguments as SGLang resolved them, and in one place. Pure."""

from __future__ import annotations

import argparse
import ast
import warnings
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from sgl_ext.engine.arguments import caches, in_effect, resolved

ROOT = Path(__file__).parents[2]
READER = ROOT / "sgl_ext/engine/arguments.py"
RECORD = "server_args"
"""What SGLang calls the record of raw arguments, as a parameter and as an attribute."""
BY_OTHER_WAYS = {
    "_raw_input",
    "config_leaf",
    "config_value",
    "get_server_args",
    "resolve_once",
    "resolved_dict",
    "resolving_view",
    *(f"get_{bag}" for bag in ("device", "disagg", "exec", "lora", "memory", "mm", "model")),
    *(f"get_{bag}" for bag in ("observability", "schedule", "serving", "spec")),
}
READS_BY_NAME = {"asdict", "attrgetter", "getattr", "vars"}


def raw_readings(code: str) -> Iterator[int]:
    """The lines that read a field of SGLang's arguments, past the one reader of them."""
    if not any(word in code for word in (RECORD, "ServerArgs", *BY_OTHER_WAYS)):
        return  # most modules, and parsing takes long
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Attribute):
            value = node.value
            is_field = isinstance(value, ast.Name) and value.id == RECORD and node.attr != "url"
            if is_field or node.attr == RECORD or node.attr in BY_OTHER_WAYS:
                yield node.lineno
        elif isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else node.func
            name = called.id if isinstance(called, ast.Name) else called
            given = [one.id for one in node.args if isinstance(one, ast.Name)]
            given += [one.value for one in node.args if isinstance(one, ast.Constant)]
            if name in READS_BY_NAME and RECORD in given:
                yield node.lineno
        elif isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
            # The record by another name would escape this test.
            name = node.arg if isinstance(node, ast.arg) else ast.unparse(node.target)
            if ast.unparse(node.annotation).strip("'\"") == "ServerArgs" and name != RECORD:
                yield node.lineno


@pytest.mark.parametrize(
    "line",
    [
        "manager.server_args.page_size",
        "page = server_args.page_size or 1",
        "getattr(server_args, 'page_size')",
        "args = getattr(manager, 'server_args')",
        "msgspec.structs.asdict(server_args)",
        "manager.config_value('page_size')",
        "sglang_api.get_schedule().page_size",
        "sglang_api.resolving_view(args).page_size",
        "def f(args: ServerArgs): return args.page_size",
    ],
)
def test_a_raw_reading_is_found(line: str) -> None:
    assert list(raw_readings(line))


def test_no_module_but_one_reads_sglang_s_arguments() -> None:
    modules = [path for path in (ROOT / "sgl_ext").rglob("*.py") if path != READER]
    assert len(modules) > 100
    found = {
        f"{path.relative_to(ROOT)}:{line}"
        for path in modules
        for line in raw_readings(path.read_text())
    }
    assert not found


@pytest.fixture
def sglang() -> Iterator[Any]:
    with warnings.catch_warnings(action="ignore"):  # SGLang's, while it is imported
        yield import_module("sglang.srt.server_args")


def args_of(sglang: Any, *flags: str) -> Any:
    """The record of these flags, for no model: SGLang resolves what does not depend on one."""
    parser = argparse.ArgumentParser()
    sglang.ServerArgs.add_cli_args(parser)
    return sglang.ServerArgs.from_cli_args(parser.parse_args(["--model-path", "dummy", *flags]))


def test_the_facts_are_what_sglang_resolved_and_not_what_was_written(sglang: Any) -> None:
    args = args_of(sglang, "--dp-size", "2", "--tp-size", "2", "--enable-dp-attention")
    found = resolved(args)
    assert (args.dp_size, args.attn_dp_size) == (2, 1)
    assert (found.dp_size, found.attn_dp_size, caches(found)) == (1, 2, 2)


def test_each_replica_has_a_cache(sglang: Any) -> None:
    assert caches(resolved(args_of(sglang))) == 1
    assert caches(resolved(args_of(sglang, "--dp-size", "3"))) == 3


def test_a_process_reads_what_is_in_effect_in_it(sglang: Any) -> None:
    context = import_module("sglang.srt.runtime_context").get_context()
    with context.override_server_args(page_size=16, attn_dp_size=2, tp_size=2):
        assert (in_effect().page_size, caches(in_effect())) == (16, 2)
        context.override("a later decision", page_size=64)
        assert in_effect().page_size == 64
