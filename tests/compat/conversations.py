"""Conversations of words that occur once, as each protocol writes them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from tests.compat.front_end import CHAT, MESSAGES, RESPONSES

Json = dict[str, Any]
_LOOK = {"type": "object", "properties": {"key": {"type": "string"}}}


@dataclass
class Written:
    """A body, with its texts in order, the keys of its calls, and what was thought."""

    body: Json
    texts: list[str] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)


class Writer:
    """Writes turns for one protocol: "system", "developer", "user", each with "+" for two texts;
    "answer", with "t" for thinking, "s" for a text, and a "c" for each call."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._numbers = count()
        self._items: list[Any] = []
        self._written = Written({"model": "m"})

    def write(self, turns: list[str]) -> Written:
        tool = {"name": "look", "description": "Looks."}
        body = self._written.body
        if self._path == MESSAGES:
            body |= {"max_tokens": 9, "tools": [{**tool, "input_schema": _LOOK}]}
        elif self._path == CHAT:
            function = {**tool, "parameters": _LOOK}
            body["tools"] = [{"type": "function", "function": function}]
        else:
            body["tools"] = [{"type": "function", **tool, "parameters": _LOOK}]
        for number, turn in enumerate(turns):
            kind, _, made = turn.partition(":")
            if kind == "answer":
                self._answer(made)
            else:
                self._said(kind.rstrip("+"), 1 + kind.endswith("+"), is_first=not number)
        body["input" if self._path == RESPONSES else "messages"] = self._items
        return self._written

    def _word(self, into: list[str]) -> str:
        number = next(self._numbers)
        word = f"w{'abcdefghij'[number // 10]}{'abcdefghij'[number % 10]}qx"
        into.append(word)
        return word

    def _said(self, role: str, texts: int, *, is_first: bool) -> None:
        words = [self._word(self._written.texts) for _ in range(texts)]
        if is_first and role == "system" and self._path == RESPONSES:
            self._written.body["instructions"] = "\n\n".join(words)
            return
        kind = "input_text" if self._path == RESPONSES else "text"
        parts = [{"type": kind, "text": word} for word in words]
        content = parts if texts > 1 else words[0]
        if is_first and role == "system" and self._path == MESSAGES:
            self._written.body["system"] = content
            return
        if role == "developer" and self._path == MESSAGES:  # which has no such role
            role = "system"
        self._items.append({"role": role, "content": content})

    def _answer(self, made: str) -> None:
        """An answer, and the results of its calls."""
        thought = self._word(self._written.thoughts) if "t" in made else ""
        said = self._word(self._written.texts) if "s" in made else ""
        calls = [
            (f"call_{next(self._numbers)}", self._word(self._written.keys))
            for _ in range(made.count("c"))
        ]
        results = [(id, self._word(self._written.texts)) for id, _ in calls]
        writers = {MESSAGES: _blocks, CHAT: _message, RESPONSES: _items}
        self._items += writers[self._path](thought, said, calls, results)


Calls = list[tuple[str, str]]


def _blocks(thought: str, said: str, calls: Calls, results: Calls) -> Iterator[Json]:
    blocks: list[Json] = []
    if thought:
        blocks.append({"type": "thinking", "thinking": thought, "signature": ""})
    if said:
        blocks.append({"type": "text", "text": said})
    for id, key in calls:
        blocks.append({"type": "tool_use", "id": id, "name": "look", "input": {"key": key}})
    yield {"role": "assistant", "content": blocks}
    if results:
        given = [{"type": "tool_result", "tool_use_id": id, "content": r} for id, r in results]
        yield {"role": "user", "content": given}


def _message(thought: str, said: str, calls: Calls, results: Calls) -> Iterator[Json]:
    message: Json = {"role": "assistant", "content": said}
    if thought:
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = [
            {
                "id": id,
                "type": "function",
                "function": {"name": "look", "arguments": f'{{"key": "{key}"}}'},
            }
            for id, key in calls
        ]
    yield message
    for id, result in results:
        yield {"role": "tool", "tool_call_id": id, "content": result}


def _items(thought: str, said: str, calls: Calls, results: Calls) -> Iterator[Json]:
    if thought:
        summary = [{"type": "summary_text", "text": thought}]
        yield {"type": "reasoning", "id": f"rs_{thought}", "summary": summary}
    if said:
        parts = [{"type": "output_text", "text": said, "annotations": []}]
        item = {"type": "message", "role": "assistant", "content": parts, "status": "completed"}
        yield {**item, "id": f"msg_{said}", "phase": "commentary" if calls else "final_answer"}
    for id, key in calls:
        arguments = f'{{"key": "{key}"}}'
        yield {"type": "function_call", "call_id": id, "name": "look", "arguments": arguments}
    for id, result in results:
        yield {"type": "function_call_output", "call_id": id, "output": result}
