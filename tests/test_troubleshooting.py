"""What the troubleshooting page quotes and calls exists: messages, metrics, flags, verbs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sgl_ext.cli.app import app
from sgl_ext.settings.fields import TABLES
from tests.exported import declared

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/guide/troubleshooting.md").read_text()
CODE = [*re.findall(r"`([^`\n]+)`", PAGE), *re.findall(r"^    (.+)$", PAGE, re.MULTILINE)]
# Of SGLang, and of other programs that the page calls.
OTHERS = {
    "--max-total-tokens",
    "--max-totl-tokens",
    "--context-length",
    "--mem-fraction-static",
    "--gpus",
    "--shm-size",
    "--compile-bytecode",
}
# Of `sgl-ext size` and of the command, whose options are not settings.
VERB_OPTIONS = {
    "--config",
    "--model",
    "--help",
    "--gpu",
    "--tp",
    "--sessions",
    "--url",
    "--address",
    "--key",
    "--version",
}


@pytest.mark.parametrize(
    "message",
    [
        "no GPU found: ",
        "GPUs cannot be used: ",
        ": it hides all GPUs",
        "No engine is ready.",
        "Two engines ended while they ran this request",
        "its scheduler stands still",
        "Invalid or missing API key.",
        "needs an operator's key",
        "is not this machine",
        "lists no workers",
        " requests wait already.",
        "Previous response with id ",
        "prompt is too long: ",
        " is not installed: ",
        "The store of responses and contexts is unavailable.",
        "works again",
        "in use by another node (process ",
        "restarts in",
    ],
)
def test_a_quoted_message_is_one_of_ours(message: str) -> None:
    sources = "".join(path.read_text() for path in (ROOT / "sgl_ext").rglob("*.py"))
    sources = re.sub(r'"\s*\n\s*f?"', "", sources)
    assert message in sources


def test_the_metrics_exist() -> None:
    named = {name for text in CODE for name in re.findall(r"\bsgl_ext_[a-z_]+\b(?!\*)", text)}
    named = {name for name in named if not name.endswith("_")}
    assert len(named) > 9
    assert named <= {name.removesuffix("_bucket") for name in declared()}


def test_the_flags_and_verbs_exist() -> None:
    settings = {f"--{key.replace('_', '-')}" for table in TABLES.values() for key in table}
    named = {flag for text in CODE for flag in re.findall(r"(?<!\S)--[a-z][a-z-]+", text)}
    assert named <= settings | OTHERS | VERB_OPTIONS
    verbs = {info.callback.__name__ for info in app.registered_commands if info.callback}
    verbs |= {str(group.name) for group in app.registered_groups}
    called = {verb for text in CODE for verb in re.findall(r"\bsgl-ext ([a-z]+)\b", text)}
    assert called - {"is"} <= verbs
