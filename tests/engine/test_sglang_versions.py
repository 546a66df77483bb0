"""What an older SGLang lacks, as the extension sees it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from sgl_ext.engine import sglang_versions
from sgl_ext.engine.sglang_versions import Absent, put_stand_ins, unknown_field


class Parser:
    tools = ()


@pytest.fixture
def an_sglang() -> Iterator[Any]:
    """A module that stands for SGLang."""
    module: Any = ModuleType("an_sglang")
    module.Parser = Parser
    sys.modules["an_sglang"] = module
    yield module
    del sys.modules["an_sglang"]


def test_what_a_version_lacks_is_put_in_its_place(
    an_sglang: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lacking = {"an_sglang:Detector": Absent, "an_sglang:Parser.template": None}
    monkeypatch.setattr(sglang_versions, "STAND_INS", {"0.1": lacking})
    put_stand_ins("0.2")
    assert not hasattr(an_sglang, "Detector")
    put_stand_ins("0.1")
    assert an_sglang.Detector is Absent
    assert Parser().template is None  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
        ({"tools": [{"name": "a"}, {"name": "b", "strict": True}]}, "tools.1.strict"),
        ({"tools": [{"name": "a", "strict": False}], "output_config": {"effort": "low"}}, None),
        ({"tools": "no list", "output_config": []}, None),
        ([], None),
    ],
)
def test_a_field_that_an_older_version_would_ignore_is_found(
    monkeypatch: pytest.MonkeyPatch, body: Any, field: str | None
) -> None:
    monkeypatch.setattr(sglang_versions, "installed", lambda: "0.5.22")
    assert unknown_field("messages", body) == field
    assert unknown_field("chat", body) is None
    monkeypatch.setattr(sglang_versions, "installed", lambda: sglang_versions.TESTED[-1])
    assert unknown_field("messages", body) is None
