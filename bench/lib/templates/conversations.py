"""Conversations of agents, and what of them is in the prompts.

A scenario is a list of steps: `user`, `system` and `developer` say something. Others are answers of
the letters `T` (thinking), `X` (a text) and `C` (a call, whose result follows), as SGLang parses
them from what a model of the family would write. `none` answers with `tool_choice: "none"`.
Each text has a word of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from bench.lib.templates.clients import CLIENTS, Client, MessagesClient
from bench.lib.templates.forms import Calls, Form
from bench.lib.templates.front_end import Asked, FrontEnd
from sgl_ext.balancer.conversations.context_insertion import insert_context
from sgl_ext.balancer.conversations.contexts import Block
from sgl_ext.protocols.registry import of_path

SCENARIOS = {
    "tool loop": "system user TC TC TC TC TX user TX",
    "text beside calls": "system user TXC TXC TC TX user X",
    "parallel calls": "system user TCC TC TX user X",
    "first developer": "developer user TC TX user X",
    "later developer": "system user TC TX developer user TC TX user X",
    "later system": "system user TC TX system user TC TX user X",
    "system in a loop": "system user TC system TC TX user X",
    "context": "context system user TC TX user X",
    "context and developer": "context developer user TC TX user X",
    "no choice": "system user TC TX user none user X",
}
STREAMED = ("tool loop", "text beside calls", "parallel calls")
_TEXT = "of the file that the tests read, which has\n\n- two lines,\n- and a `word` in each."
_TOOLS: list[dict[str, Any]] = [
    {
        "name": name,
        "description": f"{name}s a file",
        "parameters": {
            "type": "object",
            "properties": {"path": {"type": "string"}, "line": {"type": "integer"}},
            "required": ["path"],
        },
    }
    for name in ("read", "edit")
]


@dataclass
class Seen:
    """What was seen of one conversation, or of several.

    lost, moved, repeated: texts of a request that its prompt lacks, has in another order, or has
        more than once.
    without_tools: conversations whose tools are not in each prompt.
    refused: the error of each conversation that ends with one.
    difference: the first answer in a loop that the next prompt does not have, and what it has.
    read, generated: tokens of answers in loops of tools, and how many of them are in the next
        prompt, with all that was before them. read_by_user, generated_by_user: the same before a
        user's turn.
    """

    lost: set[str] = field(default_factory=set)
    moved: set[str] = field(default_factory=set)
    repeated: set[str] = field(default_factory=set)
    without_tools: set[str] = field(default_factory=set)
    refused: dict[str, str] = field(default_factory=dict)
    difference: dict[str, str] | None = None
    read: int = 0
    generated: int = 0
    read_by_user: int = 0
    generated_by_user: int = 0

    @property
    def read_back_share(self) -> float | None:
        return round(self.read / self.generated, 3) if self.generated else None

    @property
    def user_read_back_share(self) -> float | None:
        if not self.generated_by_user:
            return None
        return round(self.read_by_user / self.generated_by_user, 3)


def converse(
    front_end: FrontEnd,
    form: Form,
    protocol: str,
    scenario: str,
    seen: Seen,
    *,
    streams: bool = False,
) -> None:
    """Has one conversation, and adds to `seen` what its prompts show."""
    is_messages = protocol == "messages"
    client = MessagesClient(form.thinks_in_loops) if is_messages else CLIENTS[protocol]()
    name = f"{scenario}, {protocol}{', streamed' if streams else ''}"
    conversation = _Conversation(front_end, form, client, name, seen, streams)
    conversation.run(SCENARIOS[scenario].split())


class _Conversation:
    def __init__(
        self,
        front_end: FrontEnd,
        form: Form,
        client: Client,
        name: str,
        seen: Seen,
        streams: bool,
    ) -> None:
        self._front_end, self._form, self._client = front_end, form, client
        self._name, self._seen, self._streams = name, seen, streams
        self._said: list[tuple[str, str]] = []
        self._numbers: Iterator[int] = count()
        self._blocks: tuple[Block, ...] = ()
        self._runtime: dict[str, str] = {}
        self._before: Asked | None = None
        self._is_loop = self._had_choice = False

    def run(self, steps: list[str]) -> None:
        for step in steps:
            if step == "context":
                self._add_context()
            elif step in ("system", "developer") and step not in self._client.roles:
                return
            elif step in ("system", "developer", "user"):
                if step == "user" and self._runtime and not self._said_as("runtime"):
                    self._said.append(("runtime", self._runtime["now"].split()[0]))
                self._client.say(step, self._words(step))
                self._is_loop &= step != "user"
            elif not self._answer(step):
                return

    def _said_as(self, what: str) -> bool:
        return any(kind == what for kind, _ in self._said)

    def _words(self, what: str) -> str:
        """A new text, whose first word is its own."""
        word = f"zq{next(self._numbers):02}{what[:1]}v"
        self._said.append((what, word))
        return f"{word} {_TEXT}"

    def _add_context(self) -> None:
        texts = [
            Block(id, "text", id, None, self._words(f"{id} context"))
            for id in ("stable", "project")
        ]
        self._blocks = (*texts, Block("now", "text", "runtime", None, None))
        self._runtime = {"now": f"zqruntimev {_TEXT}"}

    def _answer(self, step: str) -> bool:
        choice = "none" if step == "none" else None
        letters = "TX" if step == "none" else step
        thinking = f"First I think {_TEXT}" if "T" in letters else ""
        text = self._words("answer") if "X" in letters else ""
        calls: Calls = [
            (("read", "edit")[n], {"path": self._words("call").split()[0], "line": 3})
            for n in range(letters.count("C"))
        ]
        body = self._client.body(_TOOLS, choice)
        if self._blocks:
            body, _ = insert_context(of_path(self._client.path), body, self._blocks, self._runtime)
        generated = [word for what, word in self._said if what in ("answer", "call")]
        new = set(generated[len(generated) - bool(text) - len(calls) :])
        asked = self._front_end.ask(
            self._client.path,
            body,
            lambda prompt: self._form.write(prompt, thinking, text, calls),
            self._client.joined if self._streams else None,
        )
        if asked.status != 200:
            self._seen.refused[self._name] = asked.error
            return False
        self._compare_texts(asked.text, new)
        self._compare_tokens(asked, choice)
        if text and calls and not self._form.has_text_with_calls:
            self._said = [(what, word) for what, word in self._said if word != text.split()[0]]
        made = self._client.echo(asked.document)
        if len(made) != len(calls):
            self._seen.refused[self._name] = f"{len(made)} of {len(calls)} calls were parsed"
            return False
        for call in made:
            self._client.give(call, self._words("result"))
        self._before, self._is_loop = asked, bool(calls)
        return True

    def _compare_texts(self, prompt: str, new: set[str]) -> None:
        # A call may come after an earlier call's result, if a template has one call in an answer.
        last = {True: -1, False: -1}
        for what, word in self._said:
            if word in new:
                continue
            at, name, is_call = prompt.find(word), f"{what}: {self._name}", what == "call"
            if at < 0:
                self._seen.lost.add(name)
                continue
            if at < last[is_call]:
                self._seen.moved.add(name)
            if prompt.count(word) > 1:
                self._seen.repeated.add(name)
            last[is_call] = max(at, last[is_call])
        tools = _TOOLS[0]["description"]
        if self._before is not None and tools in self._before.text and tools not in prompt:
            self._seen.without_tools.add(self._name)

    def _compare_tokens(self, asked: Asked, choice: str | None) -> None:
        before = self._before
        if before is None or choice is not None or self._had_choice:
            self._had_choice = choice is not None
            return
        whole = before.prompt + before.answer
        same = next(
            (
                n
                for n, pair in enumerate(zip(whole, asked.prompt, strict=False))
                if len({*pair}) > 1
            ),
            min(len(whole), len(asked.prompt)),
        )
        read = max(same - len(before.prompt), 0)
        if self._is_loop:
            self._seen.read += read
            self._seen.generated += len(before.answer)
            if read < len(before.answer) and self._seen.difference is None:
                show = self._front_end.text_around
                self._seen.difference = {
                    "in": self._name,
                    "generated": show(whole, same),
                    "next_prompt": show(asked.prompt, same),
                }
        else:
            self._seen.read_by_user += read
            self._seen.generated_by_user += len(before.answer)
