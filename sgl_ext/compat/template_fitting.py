"""Rewrites messages so that the chat template renders every word of them.

    messages, as SGLang gives them to the template --> fitted --> messages that it renders whole

A role that is lost or refused becomes one that is rendered in the same place; if no role for
instructions is, their text becomes a reminder in the user's turn or the tool's result beside it.
Messages that need no change are the same objects, and none is modified.

Instructions stay in their place where the prompts of a model have them there; elsewhere they become
reminders beside it.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sgl_ext.compat.template_model import Frame, Lists, Place, TemplateModel, with_short_ids
from sgl_ext.reading.protocol import INSTRUCTION_ROLES
from sgl_ext.reading.rewriting import reminder

Json = dict[str, Any]
_GAP = "\n\n"


class Places(NamedTuple):
    """Where the first message of a role and one between turns are in the prompt."""

    first: Mapping[str, Place]
    later: Mapping[str, Place]

    def have(self, roles: list[str]) -> bool:
        """Whether messages with these roles are in place, as far as they are instructions."""
        return all(
            (self.later if number else self.first).get(role) is Place.IN_PLACE
            for number, role in enumerate(roles)
            if role in INSTRUCTION_ROLES
        )


def with_sayable_roles(messages: list[Json], at: Places, counts: Counter[str]) -> list[Json]:
    """Messages in which instructions are only where they are rendered in place. Others become
    reminders, in order. Those that stay are the same objects."""
    if not any(message["role"] in INSTRUCTION_ROLES for message in messages):
        return messages
    out: list[Json] = []
    waiting: list[str] = []
    begun = False
    for message in messages:
        role = message["role"]
        if role in INSTRUCTION_ROLES:
            places = at.later if out else at.first
            sayable, text = sayable_role(role, places), text_of(message)
            if sayable is not None and not waiting:
                counts[f"{role}_message"] += sayable != role
                out.append(message if sayable == role else {**message, "role": sayable})
                continue
            if text is None:
                out.append(message)
                continue
            counts[f"{role}_message"] += 1
            last = out[-1] if out else None
            if last is not None and not begun:
                out[-1] = longer(last, after=text)
            elif last is not None and last["role"] in ("user", "tool") and not waiting:
                out[-1] = longer(last, after=reminder(text))
            else:
                waiting.append(reminder(text))
            continue
        begun = True
        if waiting:
            added = _GAP.join(waiting)
            waiting = []
            if role == "user":
                message = longer(message, before=added)
            elif role == "tool":
                message = longer(message, after=added)
            else:
                out.append({"role": "user", "content": added})
        out.append(message)
    if waiting:
        out.append({"role": "user", "content": _GAP.join(waiting)})
    return out


def sayable_role(role: str, places: Mapping[str, Place]) -> str | None:
    """The role with which a template renders an instruction in place; None if there is none."""
    return next((each for each in (role, "system") if places.get(each) is Place.IN_PLACE), None)


def text_of(message: Json, between: str = "\n") -> str | None:
    """The text of a message; None if it has anything else."""
    content = message.get("content")
    if isinstance(content, list):
        texts: list[Any] = [p.get("text") if isinstance(p, dict) else None for p in content]
        return between.join(texts) if all(isinstance(text, str) for text in texts) else None
    return content if isinstance(content, str) else None


def longer(message: Json, before: str = "", after: str = "") -> Json:
    """A message with a text before its content, or after it."""
    content = message.get("content") or ""
    if isinstance(content, list):
        parts = [[{"type": "text", "text": text}] if text else [] for text in (before, after)]
        return {**message, "content": [*parts[0], *content, *parts[1]]}
    return {**message, "content": _GAP.join(text for text in (before, content, after) if text)}


REASONING = "reasoning_content"


@dataclass(frozen=True, slots=True)
class Plan:
    """How to give messages to one template.

    model: what it does with messages as they are.
    thinking_field: where it reads an answer's thinking.
    unsayable: what it loses however it is given: "text beside calls", "parallel calls".
    drops_thinking: thinking is in no later prompt, wherever it is given.
    frame: what it writes around the parts of an answer.
    takes_reasoning: thinking must be apart from the text: the template does not find it in there.
    numbers_calls: the model names calls by their number in the conversation, and reads the names.
    """

    model: TemplateModel
    thinking_field: str = REASONING
    unsayable: frozenset[str] = frozenset()
    drops_thinking: bool = False
    frame: Frame = field(default_factory=Frame)
    takes_reasoning: bool = False
    numbers_calls: bool = False


def fitted(messages: list[Json], plan: Plan, counts: Counter[str]) -> list[Json]:
    """Messages for the plan's template. Counts what was translated.

    Raises ValueError if the template has no way to say them.
    """
    model = plan.model
    given = [
        _with_text(message, model, counts) if type(message.get("content")) is list else message
        for message in messages
    ]
    given = with_sayable_roles(given, Places(model.first, model.later), counts)
    if model.has_calls and not model.has_user_after_results:
        given = _with_longer_results(given, counts)
    if model.wants_short_ids:
        given = with_short_ids(given, counts)
    given = _with_bare_answers(given, plan, counts)
    takes_answers = model.has_text_with_calls and model.has_parallel_calls
    if takes_answers and plan.thinking_field == REASONING:
        return given
    return list(_with_sayable_answers(given, plan, counts))


def with_descriptions(tools: list[Json] | None) -> list[Json] | None:
    """Tools that all have a description, as some templates need one."""
    return tools and [_described(tool) for tool in tools]


def _described(tool: Json) -> Json:
    function = tool.get("function", tool)
    if function.get("description") is not None:
        return tool
    described = {**function, "description": ""}
    return {**tool, "function": described} if "function" in tool else described


def _with_text(message: Json, model: TemplateModel, counts: Counter[str]) -> Json:
    """A message whose list of texts is one text, where the template does not take it whole."""
    role = message["role"]
    asked = "system" if role == "developer" and sayable_role(role, model.first) != role else role
    if asked != "assistant" and model.lists.get(asked, Lists.WHOLE) is Lists.WHOLE:
        return message
    # An answer was generated as one text; others are separate texts.
    text = text_of(message, "" if role == "assistant" else "\n")
    if text is None:
        return message
    counts["list_of_texts"] += 1
    return {**message, "content": text}


def _with_longer_results(messages: list[Json], counts: Counter[str]) -> list[Json]:
    """Messages in which what a user says between results and the next answer ends the result."""
    out: list[Json] = []
    for message in messages:
        text = text_of(message) if message["role"] == "user" else None
        if text is not None and out and out[-1]["role"] == "tool":
            counts["user_after_result"] += 1
            out[-1] = longer(out[-1], after=text)
        else:
            out.append(message)
    return out


def _with_bare_answers(messages: list[Json], plan: Plan, counts: Counter[str]) -> list[Json]:
    """Messages whose answers lack what the template writes itself: parsers leave some of it."""
    names: dict[str, str] = {}
    number = 0
    out = []
    for message in messages:
        calls = message.get("tool_calls") or ()
        if calls or REASONING in message:
            bare = _bare(message, plan.frame)
            counts["answer_frame"] += bare is not message
            message = bare
        if plan.numbers_calls and calls:
            named = []
            for call in calls:
                name = f"functions.{call['function']['name']}:{number}"
                number += 1
                if str(call.get("id")).startswith("call_"):  # as SGLang names them on /v1/responses
                    counts["call_id"] += 1
                    names[call["id"]] = name
                    call = {**call, "id": name}
                named.append(call)
            message = {**message, "tool_calls": named}
        elif message.get("tool_call_id") in names:
            message = {**message, "tool_call_id": names[message["tool_call_id"]]}
        out.append(message)
    return out


def _bare(message: Json, frame: Frame) -> Json:
    thinking, content = message.get(REASONING), message.get("content")
    edits: Json = {}
    if isinstance(thinking, str):
        bare = thinking[_overlap(frame.before_thinking, thinking) :]
        edits[REASONING] = bare[: len(bare) - _overlap(bare, frame.after_thinking)]
    if isinstance(content, str):
        text = content
        if isinstance(thinking, str):
            text = text[_overlap(frame.before_text, text) :]
        if message.get("tool_calls"):
            text = text[: len(text) - _overlap(text, frame.before_call)]
        edits["content"] = text
    if all(message[key] == value for key, value in edits.items()):
        return message
    return {**message, **edits}


def _overlap(before: str, after: str) -> int:
    """How much of the end of a text is the beginning of another, if that is space or markup."""
    for length in range(min(len(before), len(after), 40), 0, -1):
        shared = after[:length]
        if before.endswith(shared) and (shared.isspace() or "<" in shared):
            return length
    return 0


def _with_sayable_answers(messages: list[Json], plan: Plan, counts: Counter[str]) -> Iterator[Json]:
    at = 0
    while at < len(messages):
        message = messages[at]
        at += 1
        if message["role"] != "assistant":
            yield message
            continue
        if plan.thinking_field != REASONING and REASONING in message:
            counts["thinking_field"] += 1
            message = {**message, plan.thinking_field: message[REASONING]}
        calls = message.get("tool_calls") or []
        if calls and text_of(message) and not plan.model.has_text_with_calls:
            _require("text beside calls", plan)
            counts["text_beside_calls"] += 1
            yield {"role": "assistant", "content": message["content"]}
            message = {**message, "content": ""}
        if len(calls) < 2 or plan.model.has_parallel_calls:
            yield message
            continue
        _require("parallel calls", plan)
        counts["parallel_calls"] += 1
        results = []
        while at < len(messages) and messages[at]["role"] == "tool":
            results.append(messages[at])
            at += 1
        yield from _one_by_one(message, calls, results)


def _one_by_one(message: Json, calls: list[Json], results: list[Json]) -> Iterator[Json]:
    """Answers with one call each, each with its results. The first has the thinking."""
    ids = [call.get("id") for call in calls]
    for number, call in enumerate(calls):
        bare = {"role": "assistant", "content": ""}
        yield {**(bare if number else message), "tool_calls": [call]}
        is_last = number == len(calls) - 1
        for result in results:
            answered = result.get("tool_call_id")
            if answered == call.get("id") or (is_last and answered not in ids):
                yield result


def _require(what: str, plan: Plan) -> None:
    if what in plan.unsayable:
        raise ValueError(f"messages: the chat template of this model loses {what}")
