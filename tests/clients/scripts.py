"""What the scripted model says in the tool loops: the lines of docs/cpu.md's script."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

OLD, NEW = "print('hello')\n", "print('good day')\n"


def asked(name: str) -> str:
    return f"Mend the greeting of {name}."


def mended(name: str) -> str:
    return f"The greeting of {name} is mended."


def for_claude_code(name: str, file: Path) -> list[dict[str, Any]]:
    """Reads a file and edits it with Claude Code's own tools."""
    edit = {"file_path": str(file), "old_string": "hello", "new_string": "good day"}
    return _lines(
        asked(name),
        {
            "thinking": "The file comes first.",
            "text": "I will read it.",
            "tool_calls": [{"name": "Read", "arguments": {"file_path": str(file)}}],
        },
        {"tool_calls": [{"name": "Edit", "arguments": edit}]},
        {"text": mended(name)},
    )


def for_codex(name: str, file: Path) -> list[dict[str, Any]]:
    """Reads a file and patches it with Codex's own tools.

    For a model that it does not know, Codex offers no `apply_patch`: its instructions have the
    model call that in a shell, where Codex takes it out again.
    """
    patch = f"*** Begin Patch\n*** Update File: {file.name}\n@@\n-{OLD}+{NEW}*** End Patch\n"
    return _lines(
        asked(name),
        {
            "thinking": "The file comes first.",
            "tool_calls": [{"name": "exec_command", "arguments": {"cmd": f"cat {file.name}"}}],
        },
        {
            "text": "Now I mend it.",
            "tool_calls": [
                {"name": "exec_command", "arguments": {"cmd": f"apply_patch <<'END'\n{patch}END\n"}}
            ],
        },
        {"text": mended(name)},
    )


SDK_PROMPT = "Which port does the balancer listen on? " + "Look everywhere you can. " * 60
SDK_THOUGHT = "The settings will say."
SDK_WORD = "I will look."
SDK_ANSWER = 'It listens on port 30000, says "naïve".'
READ = ("read_file", {"path": "settings.toml"})
SEARCH = ("search", {"text": 'naïve "port"\n', "within": {"lines": [1, 20], "case": None}})
PATCH = ("patch", {"input": "-port = 1\n+port = 30000\n"})
SDK_CALLS = ([READ], [SEARCH, PATCH])


def for_sdks() -> list[dict[str, Any]]:
    """A call, two at once, and an answer."""
    first, second = (
        [{"name": name, "arguments": arguments} for name, arguments in calls] for calls in SDK_CALLS
    )
    return _lines(
        SDK_PROMPT,
        {"thinking": SDK_THOUGHT, "text": SDK_WORD, "tool_calls": first},
        {"thinking": SDK_THOUGHT, "tool_calls": second},
        {"text": SDK_ANSWER},
    )


ODD_PROMPT = "Find out which colour the balancer has. " + "Take your time. " * 20
ODD_WORD = "I will look."
ODD_CALLS = [READ, ("paint", {"colour": 'naïve "blue"\n'}), ("search", {"text": "colour"})]


def for_odd_calls() -> list[dict[str, Any]]:
    """Words, and calls of tools; nobody declares the second one."""
    calls = [{"name": name, "arguments": arguments} for name, arguments in ODD_CALLS]
    said = {"thinking": SDK_THOUGHT, "text": ODD_WORD}
    return _lines(ODD_PROMPT, {**said, "tool_calls": calls}, said)


CHOICE_PROMPT = "Say the port of the balancer as JSON. " + "Be sure of it. " * 20
CHOICE_SCHEMA = {
    "type": "object",
    "properties": {"port": {"type": "integer"}},
    "required": ["port"],
    "additionalProperties": False,
}
CHOICE_ANSWER = {"port": 30000}


def for_schemas() -> list[dict[str, Any]]:
    """A call, and an answer of a schema."""
    name, arguments = READ
    call = {"name": name, "arguments": arguments}
    return _lines(
        CHOICE_PROMPT,
        {"thinking": SDK_THOUGHT, "tool_calls": [call]},
        {"thinking": SDK_THOUGHT, "text": json.dumps(CHOICE_ANSWER)},
    )


def _lines(after: str, *answers: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"after": after, **answer} for answer in answers]
