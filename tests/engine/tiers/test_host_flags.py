"""Flags of the host cache that cannot work stop a start, by name and with their value."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sgl_ext.engine.topology import problems

PLAIN = {
    "disaggregation_mode": "null",
    "enable_hierarchical_cache": True,
    "hicache_io_backend": "kernel",
    "hicache_mem_layout": "page_first",
    "hicache_ratio": 2.0,
    "hicache_size": 0,
    "hicache_storage_backend": None,
}


def found(**changed: Any) -> list[str]:
    args: Any = SimpleNamespace(**(PLAIN | changed))
    return list(problems(args))


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"hicache_ratio": 0.0}, "--hicache-ratio=0: must be above 0"),
        ({"hicache_ratio": -1.5}, "--hicache-ratio=-1.5: must be above 0"),
        ({"hicache_ratio": float("nan")}, "--hicache-ratio=nan: must be above 0"),
        ({"hicache_ratio": float("inf")}, "--hicache-ratio=inf: must be above 0"),
        ({"hicache_size": -1}, "--hicache-size=-1: must be a number of GB, or 0"),
        (
            {"hicache_io_backend": "direct", "hicache_mem_layout": "page_head"},
            "--hicache-mem-layout=page_head: --hicache-io-backend direct does not copy this "
            "layout; it copies layer_first, page_first_direct",
        ),
        (
            {"enable_hierarchical_cache": False, "hicache_storage_backend": "file"},
            "--hicache-storage-backend=file: has no effect without --enable-hierarchical-cache",
        ),
    ],
    ids=str,
)
def test_what_cannot_work_is_named_with_its_value(changed: dict[str, Any], named: str) -> None:
    (problem,) = found(**changed)
    assert problem.startswith(named)


def test_all_problems_are_named() -> None:
    assert len(found(hicache_size=-1, hicache_ratio=0.0, hicache_mem_layout="page_unified")) == 3


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"hicache_ratio": None},  # a decode engine settles it later
        {"hicache_size": 4, "hicache_ratio": 0.0},  # a size counts in its place
        {"hicache_storage_backend": "file"},
        {"enable_hierarchical_cache": False, "hicache_ratio": 0.0},
        {
            "enable_hierarchical_cache": False,
            "disaggregation_mode": "decode",
            "hicache_storage_backend": "file",
        },
    ],
    ids=str,
)
def test_what_works_is_not_refused(changed: dict[str, Any]) -> None:
    assert not found(**changed)
