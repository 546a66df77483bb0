"""What changed between two versions of SGLang, read from small source trees. Pure."""

from __future__ import annotations

from pathlib import Path

import pytest
from sgl_ext_cpu.sglang_diff import Source, changes, used

OLD = """
from sglang.helpers import help_out

class Base:
    def __init__(self):
        self.inherited, self.other = 1, 2

class Cache(Base):
    size: int = 0

    def evict(self, tokens):
        return tokens

def serve(args):
    "Serves."
    return args
"""
HELPERS = "def help_out(): return 1\n"
PATHS = (
    "sglang.cache.serve",
    "sglang.cache:help_out",
    "sglang.cache:Cache.evict",
    "sglang.cache:Cache.size",
    "sglang.cache:Cache.inherited",
    "sglang.cache:Cache.never_there",
)


def tree(folder: Path, cache: str = OLD, helpers: str = HELPERS) -> Source:
    package = folder / "sglang"
    package.mkdir(parents=True)
    (package / "cache.py").write_text(cache)
    (package / "helpers.py").write_text(helpers)
    return Source(folder)


def test_equal_trees_have_no_changes_and_comments_are_none(tmp_path: Path) -> None:
    old = tree(tmp_path / "old")
    new = tree(tmp_path / "new", OLD.replace('"Serves."', '"Serves all."  # always'))
    assert list(changes(old, new, PATHS)) == []


@pytest.mark.parametrize(
    ("was", "now", "line"),
    [
        ("def serve(", "def run(", "missing    sglang.cache.serve"),
        ("self.inherited,", "self.renamed,", "missing    sglang.cache:Cache.inherited"),
        (
            "evict(self, tokens)",
            "evict(self, tokens, n=0)",
            "signature  sglang.cache:Cache.evict: (self, tokens) -> (self, tokens, n=0)",
        ),
        ("size: int", "size: float", "type       sglang.cache:Cache.size: int -> float"),
        ("return args", "return None", "source     sglang.cache.serve"),
    ],
)
def test_a_change_is_named(tmp_path: Path, was: str, now: str, line: str) -> None:
    old, new = tree(tmp_path / "old"), tree(tmp_path / "new", OLD.replace(was, now))
    assert list(changes(old, new, PATHS)) == [line]


def test_a_symbol_that_a_module_imports_is_compared_where_it_is_defined(tmp_path: Path) -> None:
    old = tree(tmp_path / "old")
    new = tree(tmp_path / "new", helpers=HELPERS.replace("1", "2"))
    assert list(changes(old, new, PATHS)) == ["source     sglang.cache:help_out"]


def test_a_folder_without_sglang_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="contains no package sglang"):
        Source(tmp_path)


def test_hooks_symbols_and_attributes_are_compared() -> None:
    paths = set(used())
    assert "sglang.srt.managers.schedule_policy.PrefillAdder.add_one_req" in paths
    assert "sglang.srt.mem_cache.radix_cache:RadixKey" in paths
    assert "sglang.srt.managers.schedule_batch:Req.kv_hints" in paths
