"""What the scripted model says in the tool loops: the lines of launch/cpu/README.md's script."""

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
    return _mending(name, ("Read", {"file_path": str(file)}), ("Edit", edit))


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


def for_open_code(name: str, file: Path) -> list[dict[str, Any]]:
    """Reads a file and edits it with OpenCode's own tools."""
    edit = {"filePath": str(file), "oldString": "hello", "newString": "good day"}
    return _mending(name, ("read", {"filePath": str(file)}), ("edit", edit))


def for_qwen_code(name: str, file: Path) -> list[dict[str, Any]]:
    """Reads a file and edits it with Qwen Code's own tools."""
    edit = {"file_path": str(file), "old_string": "hello", "new_string": "good day"}
    return _mending(name, ("read_file", {"file_path": str(file)}), ("edit", edit))


def for_aider(name: str, file: Path) -> list[dict[str, Any]]:
    """Changes a file with a block of text, since aider offers no tools."""
    block = f"{file.name}\n```\n<<<<<<< SEARCH\n{OLD}=======\n{NEW}>>>>>>> REPLACE\n```\n"
    return _lines(asked(name), {"thinking": "The file is here.", "text": f"I mend it.\n\n{block}"})


def _mending(name: str, *calls: tuple[str, dict[str, Any]]) -> list[dict[str, Any]]:
    read, edit = ([{"name": tool, "arguments": arguments}] for tool, arguments in calls)
    return _lines(
        asked(name),
        {"thinking": "The file comes first.", "text": "I will read it.", "tool_calls": read},
        {"tool_calls": edit},
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


LATE_PROMPT = "Paint the balancer when you can. " + "There is no hurry. " * 40
LATE_CALL = ("paint", {"colour": "blue"})


def for_late_tools() -> list[dict[str, Any]]:
    """A word, and a call of a tool that has come meanwhile."""
    name, arguments = LATE_CALL
    called = {"tool_calls": [{"name": name, "arguments": arguments}]}
    return _lines(LATE_PROMPT, {"text": ODD_WORD}, called)


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


CLIENT_PROMPTS = (
    "Before the review, find out which port the gateway listens on.",
    "For the notes of the deployment, find out which port the gateway listens on.",
)
CLIENT_CALLS = [
    ["read_file", {"path": "settings.toml"}],
    ["search", {"text": 'naïve "port"\n'}],
    ["patch", {"input": "-port = 1\n+port = 30000\n"}],
]
CLIENT_ANSWER = 'It listens on port 30000, says "naïve".'
CLIENT_THOUGHT = "The settings will say."
CLIENT_SYSTEM = " ".join(
    f"Rule {number}: read a file before you change it, and say in a few words what you did."
    for number in range(1, 101)
)


def for_libraries() -> list[dict[str, Any]]:
    """For both prompts: a call, two at once, and an answer."""
    first, *both = [{"name": name, "arguments": arguments} for name, arguments in CLIENT_CALLS]
    return _lines(
        "find out which port the gateway listens on.",
        {"thinking": CLIENT_THOUGHT, "text": "I will look.", "tool_calls": [first]},
        {"thinking": CLIENT_THOUGHT, "tool_calls": both},
        {"text": CLIENT_ANSWER},
    )


def for_structures() -> list[dict[str, Any]]:
    """The port as an object: by a tool, and by a schema."""
    port = {"port": 30000}
    call = {"name": "Port", "arguments": port}
    return [
        *_lines("tell the port by a tool.", {"tool_calls": [call]}),
        *_lines("tell the port by a schema.", {"text": json.dumps(port)}),
    ]


GREETING, SUM = "Say hello to the gateway.", "What is two and two?"


def for_short_sessions() -> list[dict[str, Any]]:
    """A session of one answer, and one of two."""
    return [
        *_lines(GREETING, {"text": "Hello."}),
        *_lines(SUM, {"text": "Four."}, {"text": "Because."}),
    ]


CUT, LIMIT = "Write the long file.", 40
LONG_FILE = {"path": "long.txt", "body": " ".join(f"line{n}" for n in range(60))}
STOPPED, STOP = "Write the file with a stop.", "STOPHERE"
BETWEEN = "Look up both, and say so."
NUMBERS = "Look up the odd numbers."
ODD_NUMBERS = '{"key": NaN, "of": [-Infinity, 1e999, 12345678901234567890123, 1.50]}'
BROKEN = "Look it up, and forget the end."
BROKEN_ARGUMENTS = '{"key": "x", '
PATCH = "Patch the long file."
THOUGHT = "Think about it for long."
LINES = "Say the long list as JSON of its schema."
LONG_LINES = {"lines": [f"line{n}" for n in range(30)]}
LONG_LINES_SCHEMA = {
    "type": "object",
    "properties": {"lines": {"type": "array", "items": {"type": "string"}}},
    "required": ["lines"],
    "additionalProperties": False,
}


def _written(*arguments: str) -> list[str]:
    return [
        f'<tool_call>\n{{"name": "look_up", "arguments": {each}}}\n</tool_call>'
        for each in arguments
    ]


def for_written_calls() -> list[dict[str, Any]]:
    """Answers with words around calls, arguments that are no JSON, and some to be cut off."""
    one, two = _written('{"key": "x"}', '{"key": "y"}')
    stopped = {"path": "s.txt", "body": f"one two {STOP} three"}
    return [
        *_lines(CUT, {"tool_calls": [{"name": "write_file", "arguments": LONG_FILE}]}),
        *_lines(STOPPED, {"tool_calls": [{"name": "write_file", "arguments": stopped}]}),
        *_lines(BETWEEN, {"text": f"One.\n{one}\n\nBetween. \u00fc\n{two}\nAfter."}),
        *_lines(NUMBERS, {"text": _written(ODD_NUMBERS)[0]}),
        *_lines(BROKEN, {"text": _written(BROKEN_ARGUMENTS)[0].replace("}\n", "\n")}),
        *_lines(PATCH, {"tool_calls": [{"name": "patch", "arguments": {"input": "x " * 60}}]}),
        *_lines(LINES, {"text": json.dumps(LONG_LINES)}),
        *_lines(THOUGHT, {"thinking": "one two three " * 9, "text": "Done."}),
    ]


READ_ON = "Read the long report of"
SUMMARY = "The report was read in part: each line has a value and a colour."


def has_read(client: str) -> str:
    return f"{client} has read the report."


def for_compaction(files: list[Path]) -> list[dict[str, Any]]:
    """Each client reads files until its conversation is too long, sums up, and goes on.

    The second words of each client are those with which it asks for a summary, and the third ones
    begin the conversation that goes on from there.
    """
    texts = list(map(str, files))
    calls: dict[str, tuple[list[tuple[str, dict[str, Any]]], str, str, str]] = {
        "Claude Code": (
            [("Read", {"file_path": each}) for each in texts],
            "Please provide your summary based on the conversation so far",
            f"<analysis>It is long.</analysis>\n\n<summary>\n{SUMMARY}\n</summary>",
            "This session is being continued from a previous conversation",
        ),
        # Codex passes on 10 KB of what a command prints.
        "Codex": (
            [("exec_command", {"cmd": f"cat {each}"}) for each in texts * 4],
            "CONTEXT CHECKPOINT COMPACTION",
            SUMMARY,
            "Another language model started to solve this problem",
        ),
        "OpenCode": (
            [("read", {"filePath": each}) for each in texts],
            "Do not mention the summary process or that context was compacted.",
            SUMMARY,
            "What did we do so far?",
        ),
        "Qwen Code": (
            [("read_file", {"file_path": each}) for each in texts],
            "produce the <state_snapshot> XML",
            f"<analysis>It is long.</analysis>\n<state_snapshot>\n{SUMMARY}\n</state_snapshot>",
            "Resume the prior task using the summary above.",
        ),
    }
    lines = []
    for client, (reads, sums_up, summary, goes_on) in calls.items():
        called = [{"tool_calls": [{"name": n, "arguments": a}]} for n, a in reads]
        lines += _lines(f"{READ_ON} {client}.", *called, {"text": "It did not end."})
        lines += _lines(sums_up, {"text": summary})
        # Some keep a part of the conversation behind the summary.
        lines += _lines(goes_on, *[{"text": has_read(client)}] * 4)
    return lines
