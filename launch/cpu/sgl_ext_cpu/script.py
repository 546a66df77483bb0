"""A script: prescribed answers of a random model, and the choice of the next one.

A file of JSON lines, each one answer:

    {"after": "Mend the greeting", "thinking": "Look first.", "text": "I will read it.",
     "tool_calls": [{"name": "Read", "arguments": {"file_path": "/tmp/a.py"}}]}

`after` is text in the prompt. The lines with the same `after` are successive answers: the first
one to the prompt that contains the text, the second one when the first is in the conversation, and
so on. If a prompt contains several `after` texts, the one whose first occurrence is latest counts.
After a script's last answer the model answers.

The rendered prompt alone decides which answer is next, so the choice is the same for every
protocol, every engine, and a request that is sent again. Prompts and answers have the format of
`chat.jinja`, which SGLang's parsers `qwen3` and `qwen25` read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from sgl_ext_cpu.tokenizer import END_OF_TURN, START_OF_TURN

_SILENT = "</think>\n\n"
"""The end of a prompt that turns thinking off."""
_NAME = re.compile(r'"name": ?("(?:[^"\\]|\\.)*")')


class ScriptError(ValueError):
    """A script that cannot be used. The message names file, line and field."""


@dataclass(frozen=True)
class Call:
    """A tool call. `arguments` is any JSON value, because a model can write any."""

    name: str
    arguments: Any


@dataclass(frozen=True)
class Grammar:
    """What SGLang's grammar of an answer says of its form.

    begins: the text before a call's arguments, by the tool's name, where it is not the usual one.
    begins_at_once: what follows the thinking has no white space before it.
    """

    begins: Mapping[str, str] = field(default_factory=dict)
    begins_at_once: bool = False

    def begin(self, name: str) -> str:
        return self.begins.get(name, _begin(name))


FREE = Grammar()


@dataclass(frozen=True)
class Answer:
    """One answer: thinking, then text, then tool calls."""

    thinking: str = ""
    text: str = ""
    tool_calls: tuple[Call, ...] = ()

    def written(self, prompt: str, grammar: Grammar = FREE) -> str:
        """The answer as the model would generate it after `prompt`, to the end of its turn.

        It has no thinking if the prompt turns that off. Otherwise it has at least an empty block:
        SGLang's parser takes everything before the end of that block as thinking.
        """
        is_silent = prompt.endswith(_SILENT)
        blank = "" if grammar.begins_at_once else "\n\n"
        thought = "" if is_silent else f"<think>\n{self.thinking}\n</think>{blank}"
        calls = [
            f"{grammar.begin(call.name)}{_json(call.arguments)}}}\n</tool_call>"
            for call in self.tool_calls
        ]
        said = [self.text] if self.text else []
        return thought + "\n".join([*said, *calls]) + END_OF_TURN


class Script:
    """Answers by the text that they follow."""

    def __init__(self, answers: Mapping[str, Sequence[Answer]]) -> None:
        self._answers = answers

    def next(self, prompt: str) -> Answer | None:
        """The answer to a rendered prompt; None if the script has none."""
        found = [(prompt.find(after), len(after), after) for after in self._answers]
        begin, _, after = max(found)
        if begin < 0:
            return None
        turns = prompt[begin:].split(START_OF_TURN)[1:]
        if not turns or not turns[-1].startswith("assistant") or END_OF_TURN in turns[-1]:
            return None
        # An answer can come back as several turns, one for each of its calls.
        roles = [role for role, _ in groupby(turn.partition("\n")[0] for turn in turns)]
        answers, given = self._answers[after], roles.count("assistant") - 1
        return answers[given] if given < len(answers) else None


def read_grammar(sampling: Mapping[str, Any]) -> Grammar:
    """The grammar in a request's sampling parameters."""
    begins: dict[str, str] = {}
    at_once = bool(sampling.get("json_schema"))

    def look(value: Any) -> None:
        nonlocal at_once
        if isinstance(value, list):
            for inner in value:
                look(inner)
        elif isinstance(value, dict):
            begin = value.get("begin")
            if isinstance(begin, str) and (found := _NAME.search(begin)):
                name = json.loads(found[1])
                if begins.get(name) != _begin(name):
                    begins[name] = begin
            at_once = at_once or value.get("at_least_one") is True
            look(list(value.values()))

    look(json.loads(sampling.get("structural_tag") or "{}"))
    return Grammar(begins, at_once)


def _begin(name: str) -> str:
    return f'<tool_call>\n{{"name": {_json(name)}, "arguments": '


def read_script(path: Path) -> Script:
    """Reads a script. Raises ScriptError naming the file, the line and the bad field."""
    answers: dict[str, list[Answer]] = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ScriptError(f"{path}: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            after, answer = _read_line(json.loads(line))
        except json.JSONDecodeError as error:
            raise ScriptError(f"{path}:{number}: column {error.colno}: {error.msg}") from error
        except ScriptError as error:
            raise ScriptError(f"{path}:{number}: {error}") from error
        answers.setdefault(after, []).append(answer)
    if not answers:
        raise ScriptError(f"{path}: it holds no answer")
    return Script(answers)


def _read_line(line: Any) -> tuple[str, Answer]:
    _check_fields("", line, {"after", "thinking", "text", "tool_calls"})
    after, thinking, text = (_text(line, name) for name in ("after", "thinking", "text"))
    if not after:
        raise ScriptError("after: must not be empty")
    calls = line.get("tool_calls", [])
    if not isinstance(calls, list):
        raise ScriptError("tool_calls: must be a list")
    if not (thinking or text or calls):
        raise ScriptError("text: an answer needs thinking, text or tool_calls")
    return after, Answer(thinking, text, tuple(_read_call(*call) for call in enumerate(calls)))


def _read_call(index: int, call: Any) -> Call:
    field = f"tool_calls[{index}]"
    _check_fields(field, call, {"name", "arguments"})
    name = call.get("name")
    if not isinstance(name, str) or not name:
        raise ScriptError(f"{field}.name: must be a string that is not empty")
    if "arguments" not in call:
        raise ScriptError(f"{field}.arguments: is missing")
    return Call(name, call["arguments"])


def _check_fields(field: str, value: Any, known: set[str]) -> None:
    if not isinstance(value, dict):
        raise ScriptError(f"{field}: must be an object" if field else "must be an object")
    for name in value.keys() - known:
        raise ScriptError(f"{field}.{name}: is unknown" if field else f"{name}: is unknown")


def _text(line: dict[str, Any], name: str) -> str:
    value = line.get(name, "")
    if not isinstance(value, str):
        raise ScriptError(f"{name}: must be a string")
    return value


def _json(value: Any) -> str:
    """JSON as templates write it, so that it is the same when it comes back."""
    return json.dumps(value, ensure_ascii=False)
