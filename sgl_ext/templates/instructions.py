"""Instructions where a model's prompts have them: in their place, or as reminders beside it."""

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from sgl_ext.reading.protocol import INSTRUCTION_ROLES
from sgl_ext.reading.rewriting import reminder
from sgl_ext.templates.model import Place

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
    """A message with a text ahead of its content, or behind it."""
    content = message.get("content") or ""
    if isinstance(content, list):
        parts = [[{"type": "text", "text": text}] if text else [] for text in (before, after)]
        return {**message, "content": [*parts[0], *content, *parts[1]]}
    return {**message, "content": _GAP.join(text for text in (before, content, after) if text)}
