"""`sgl-ext usage`: by tenant, key and day, for people and for tables."""

from __future__ import annotations

import csv
import io

from tests.cli.conftest import Run
from tests.cli.fake_node import FakeNode

USES = [
    {
        "period": "2026-11-28",
        "tenant": "alice",
        "key": "laptop",
        "model": "large",
        "requests": 12,
        "tokens": 34567,
    },
    {
        "period": "2026-11-28",
        "tenant": '=cmd("x"),1',
        "key": "",
        "model": "small",
        "requests": 1,
        "tokens": 2,
    },
]


def test_a_table_and_csv(node: FakeNode, run: Run) -> None:
    node.answers["GET /sgl_ext/usage"] = {"month": "2026-11", "usage": USES}
    code, out, _ = run("usage", "--month", "2026-11", "--tenant", "alice")
    assert (code, node.asked) == (0, [("GET /sgl_ext/usage?month=2026-11", None)])
    assert out.splitlines()[1].split() == ["2026-11-28", "alice", "laptop", "large", "12", "34,567"]
    out = run("usage", "--model", "small")[1]
    assert len(out.splitlines()) == 2
    assert "small" in out
    rows = [*csv.reader(io.StringIO(run("usage", "--csv")[1]))]
    assert rows == [
        ["day", "tenant", "key", "model", "requests", "tokens"],
        ["2026-11-28", "alice", "laptop", "large", "12", "34567"],
        ["2026-11-28", '\'=cmd("x"),1', "", "small", "1", "2"],
    ]


def test_a_month_without_use(node: FakeNode, run: Run) -> None:
    node.answers["GET /sgl_ext/usage"] = {"month": "2026-11", "usage": []}
    assert run("usage")[1] == "Nothing was used in 2026-11.\n"
