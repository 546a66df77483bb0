"""Clients of the three protocols: each keeps a conversation as its kind does."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Protocol

Json = dict[str, Any]
Call = tuple[str, str]
"""The id and the name of a call."""


class Client(Protocol):
    """Says things, and echoes answers as they came. joined: the answer of a stream's events."""

    path: str
    roles: frozenset[str]

    def say(self, role: str, text: str) -> None: ...
    def body(self, tools: Sequence[Json], choice: str | None) -> Json: ...
    def joined(self, events: list[Json]) -> Json: ...
    def echo(self, answer: Json) -> list[Call]: ...
    def give(self, call: Call, result: str) -> None: ...


class ChatClient:
    """Of /v1/chat/completions; it sends `reasoning_content` back."""

    path = "/v1/chat/completions"
    roles = frozenset({"system", "developer"})

    def __init__(self) -> None:
        self.messages: list[Json] = []

    def say(self, role: str, text: str) -> None:
        self.messages.append({"role": role, "content": text})

    def body(self, tools: Sequence[Json], choice: str | None) -> Json:
        functions = [{"type": "function", "function": dict(tool)} for tool in tools]
        chosen = {} if choice is None else {"tool_choice": choice}
        return {"model": "bench", "messages": [*self.messages], "tools": functions, **chosen}

    def joined(self, events: list[Json]) -> Json:
        message: Json = {"role": "assistant"}
        calls: dict[int, Json] = {}
        for delta in (event["choices"][0]["delta"] for event in events if event["choices"]):
            for field in ("content", "reasoning_content"):
                if delta.get(field):
                    message[field] = message.get(field, "") + delta[field]
            for part in delta.get("tool_calls") or ():
                new = {"type": "function", "function": {"name": "", "arguments": ""}}
                call = calls.setdefault(part["index"], new)
                call["id"] = part.get("id") or call["id"]
                for field in ("name", "arguments"):
                    call["function"][field] += part["function"].get(field) or ""
        if calls:
            message["tool_calls"] = [*calls.values()]
        return {"choices": [{"message": message}]}

    def echo(self, answer: Json) -> list[Call]:
        message = {k: v for k, v in answer["choices"][0]["message"].items() if v is not None}
        self.messages.append(message)
        return [(call["id"], call["function"]["name"]) for call in message.get("tool_calls", [])]

    def give(self, call: Call, result: str) -> None:
        self.messages.append({"role": "tool", "tool_call_id": call[0], "content": result})


class MessagesClient:
    """Of /v1/messages. thinks: whether it turns thinking on."""

    path = "/v1/messages"
    roles = frozenset({"system"})

    def __init__(self, thinks: bool = True) -> None:
        self._thinking = {"thinking": {"type": "adaptive"}} if thinks else {}
        self.system: list[Json] = []
        self.messages: list[Json] = []

    def say(self, role: str, text: str) -> None:
        part = {"type": "text", "text": text}
        if role == "system" and not self.messages:
            self.system.append(part)
        else:
            self.messages.append({"role": role, "content": [part]})

    def body(self, tools: Sequence[Json], choice: str | None) -> Json:
        written = [
            {
                "name": tool["name"],
                "description": tool["description"],
                "input_schema": tool["parameters"],
            }
            for tool in tools
        ]
        return {
            "model": "bench",
            "max_tokens": 1000,
            **self._thinking,
            "system": self.system,
            "messages": [*self.messages],
            "tools": written,
            **({} if choice is None else {"tool_choice": {"type": choice}}),
        }

    def joined(self, events: list[Json]) -> Json:
        content: list[Json] = []
        arguments = ""
        for event in events:
            if event["type"] == "content_block_start":
                content.append(dict(event["content_block"]))
                arguments = ""
            elif event["type"] == "content_block_delta":
                delta = dict(event["delta"])
                arguments += delta.pop("partial_json", "")
                del delta["type"]
                for field, text in delta.items():
                    content[-1][field] = content[-1].get(field, "") + text
            elif event["type"] == "content_block_stop" and content[-1]["type"] == "tool_use":
                content[-1]["input"] = json.loads(arguments or "{}")
        return {"content": content}

    def echo(self, answer: Json) -> list[Call]:
        self.messages.append({"role": "assistant", "content": answer["content"]})
        blocks = [block for block in answer["content"] if block["type"] == "tool_use"]
        return [(block["id"], block["name"]) for block in blocks]

    def give(self, call: Call, result: str) -> None:
        block = {"type": "tool_result", "tool_use_id": call[0], "content": result}
        last = self.messages[-1]
        if last["role"] == "user" and last["content"][0]["type"] == "tool_result":
            last["content"].append(block)
        else:
            self.messages.append({"role": "user", "content": [block]})


class ResponsesClient:
    """Of /v1/responses; it sends the items of answers back."""

    path = "/v1/responses"
    roles = frozenset({"system", "developer"})

    def __init__(self) -> None:
        self.instructions: list[str] = []
        self.items: list[Json] = []

    def say(self, role: str, text: str) -> None:
        if role == "system" and not self.items:
            self.instructions.append(text)
            return
        content = [{"type": "input_text", "text": text}]
        self.items.append({"type": "message", "role": role, "content": content})

    def body(self, tools: Sequence[Json], choice: str | None) -> Json:
        return {
            "model": "bench",
            "store": False,
            "instructions": "\n\n".join(self.instructions) or None,
            "input": [*self.items],
            "tools": [{"type": "function", "strict": False, **tool} for tool in tools],
            **({} if choice is None else {"tool_choice": choice}),
        }

    def joined(self, events: list[Json]) -> Json:
        done: Json = next(e["response"] for e in events if e["type"] == "response.completed")
        return done

    def echo(self, answer: Json) -> list[Call]:
        kept = json.loads(json.dumps(answer["output"]))
        self.items += kept
        calls = [item for item in kept if item["type"] == "function_call"]
        return [(call["call_id"], call["name"]) for call in calls]

    def give(self, call: Call, result: str) -> None:
        item = {"type": "function_call_output", "call_id": call[0], "output": result}
        self.items.append(item)


CLIENTS = {"chat": ChatClient, "messages": MessagesClient, "responses": ResponsesClient}
