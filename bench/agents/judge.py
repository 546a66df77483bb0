"""What became of a request: its outcome, and what an answer says.

    whole     the answer ended as its protocol says
    told      bytes came, and then an error in the protocol's own words
    torn      bytes came, and then neither an end nor an error
    refused   an overload in the protocol's words, with the time after which to try again
    forgotten the response that the request continues is not stored
    lost      no byte of an answer came, or an error that is none of these
    left      the client disconnected on purpose

Bytes of an error that is the whole answer are no bytes of an answer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from bench.agents.client import Reply

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
Outcome = Literal["whole", "told", "torn", "refused", "forgotten", "lost", "left"]
_OVERLOADED = (429, 503, 529)
_FORGOTTEN = (b"previous_response_not_found", b"previous_response_id", b"store")


@dataclass(frozen=True)
class Answer:
    """What an answer says. end: why it ended, in the protocol's words."""

    text: str
    thinking: str
    end: str
    tokens: int
    items: tuple[dict[str, Any], ...] = ()
    """The items of a response, to send again as history."""

    @property
    def content(self) -> tuple[str, str, str, int]:
        """What must be equal to another engine's answer."""
        return self.text, self.thinking, self.end, self.tokens


def outcome_of(reply: Reply, path: str, *, streams: bool, continues: bool) -> Outcome:
    """What became of a request. continues: it named an earlier response."""
    if reply.has_left:
        return "left"
    if reply.status != 200:
        return _without_answer(reply, continues=continues)
    if not streams:
        return "whole" if reply.is_complete and _object(reply.body) is not None else "torn"
    events = list(events_of(reply.body))
    if any(_is_error(path, event) for event in events):
        return "told"
    return "whole" if reply.is_complete and _has_ended(path, reply.body, events) else "torn"


def _without_answer(reply: Reply, *, continues: bool) -> Outcome:
    if not reply.is_complete:
        return "lost"
    if continues and reply.status in (400, 503) and any(w in reply.body for w in _FORGOTTEN):
        return "forgotten"
    is_refused = reply.status in _OVERLOADED and "retry-after" in reply.headers
    return "refused" if is_refused else "lost"


def events_of(body: bytes) -> Iterator[dict[str, Any]]:
    """The JSON of each event of a stream; an event that was cut is left out."""
    for line in body.split(b"\n"):
        if line.startswith(b"data: {") and (event := _object(line[6:])) is not None:
            yield event


def _object(data: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(data)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _is_error(path: str, event: dict[str, Any]) -> bool:
    if path == CHAT:
        return "error" in event
    return event.get("type") in ("error", "response.failed")


def _has_ended(path: str, body: bytes, events: list[dict[str, Any]]) -> bool:
    if path == CHAT:
        return body.rstrip().endswith(b"data: [DONE]")
    last = events[-1].get("type") if events else None
    return last in ("message_stop", "response.completed", "response.incomplete")


def read_answer(path: str, body: bytes, *, streams: bool) -> Answer:
    """What a whole answer says. Raises ValueError or LookupError if it is none."""
    events = list(events_of(body)) if streams else [json.loads(body)]
    if path == CHAT:
        return _chat(events)
    if path == MESSAGES:
        return _messages(events)
    return _response(events[-1]["response"] if streams else events[0])


def _chat(events: list[dict[str, Any]]) -> Answer:
    text, thinking, end, tokens = "", "", "", 0
    for event in events:
        for choice in event.get("choices") or ():
            part = choice.get("delta") or choice.get("message") or {}
            text += part.get("content") or ""
            thinking += part.get("reasoning_content") or ""
            end = choice.get("finish_reason") or end
        tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
    return Answer(text, thinking, end, tokens)


def _messages(events: list[dict[str, Any]]) -> Answer:
    text, thinking, end, tokens = "", "", "", 0
    for event in events:
        blocks = event.get("content") or [event.get("content_block") or event.get("delta") or {}]
        for block in blocks:
            text += block.get("text") or ""
            thinking += block.get("thinking") or ""
        stop = event.get("delta") or event
        end = stop.get("stop_reason") or end
        tokens = (event.get("usage") or {}).get("output_tokens", tokens)
    return Answer(text, thinking, end, tokens)


def _response(response: dict[str, Any]) -> Answer:
    text, thinking = "", ""
    for item in response["output"]:
        for part in item.get("content") or ():
            if item["type"] == "reasoning":
                thinking += part.get("text") or ""
            else:
                text += part.get("text") or ""
    sent = tuple({k: v for k, v in item.items() if v is not None} for item in response["output"])
    tokens = (response.get("usage") or {}).get("output_tokens", 0)
    return Answer(text, thinking, response["status"], tokens, sent)
