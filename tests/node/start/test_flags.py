"""SGLang's flags, checked without SGLang."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import EntryPoint
from typing import Any

import pytest
from sgl_ext_cpu.node import ROOT

from sgl_ext.node.start import flags
from sgl_ext.node.start.flags import TABLE, check_flags
from sgl_ext.settings.schema import SettingsError


@pytest.fixture(autouse=True)
def _only_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang in the table's version, and no other plugin."""
    monkeypatch.setattr(flags, "_installed", lambda: json.loads(TABLE.read_text())["sglang"])
    monkeypatch.setattr(flags, "entry_points", lambda group: ())


@pytest.mark.long
def test_the_table_is_that_of_sglangs_parser() -> None:
    code = "import json; from launch.sglang_flags import table; print('\\n', json.dumps(table()))"
    printed = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert json.loads(printed.stdout.splitlines()[-1]) == json.loads(TABLE.read_text())


@pytest.mark.parametrize(
    "argv",
    [
        ["--enable-metrics", "--max-total-tokens", "7", "--mem-fraction-static=0.5"],
        ["--dtype", "float16", "--served-model-name=m", "--lora-paths", "a=b", "c=d"],
        ["--tool-call-parser", "qwen25", "--json-model-override-args", "{}"],
        [],
    ],
)
def test_flags_that_sglang_takes_pass(argv: list[str]) -> None:
    check_flags(argv)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--max-runing-requests", "3"], "unknown flag; did you mean --max-running-requests?"),
        (["--instnces=3"], "--instnces: unknown flag; did you mean --instances?"),
        (["--dtype", "floaty"], "--dtype='floaty': unknown; did you mean float?"),
        (
            ["--hicache-write-policy", "write_never"],
            "--hicache-write-policy='write_never': unknown; there are write_back, write_through, ",
        ),
        (["--schedule-policy", "zzz"], "--schedule-policy='zzz': unknown; there are dfs-weight, "),
        (["--max-running-requests", "many"], "--max-running-requests: invalid int value: 'many'"),
        (["--mem-fraction-static"], "--mem-fraction-static: expected one argument"),
        (["--enable-metrics", "stray"], "'stray': belongs to no flag"),
    ],
)
def test_a_flag_that_sglang_would_refuse_is_named_with_the_nearest(
    argv: list[str], message: str
) -> None:
    with pytest.raises(SettingsError) as refused:
        check_flags(argv, ["--instances"])
    assert message in str(refused.value)


def test_another_plugins_choices_pass_unless_they_look_misspelt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = EntryPoint("other", "other:activate", "sglang.srt.plugins")
    monkeypatch.setattr(flags, "entry_points", lambda group: (other,))
    check_flags(["--attention-backend", "zzz"])
    with pytest.raises(SettingsError, match="did you mean flashinfer"):
        check_flags(["--attention-backend", "flashinfr"])


@pytest.mark.parametrize("found", ["0.5.24", None])
def test_without_sglang_in_this_version_nothing_is_checked(
    monkeypatch: pytest.MonkeyPatch, found: Any
) -> None:
    monkeypatch.setattr(flags, "_installed", lambda: found)
    check_flags(["--new-flag"])
