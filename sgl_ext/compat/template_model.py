"""What a chat template does with roles, lists of parts, tools, thinking and calls.

Words that occur nowhere else are rendered and looked for. No name of a model or a template decides
anything, so a template that is changed is observed again. Some templates take no other ids of calls
than those of Mistral's own API: these get ids of 9 letters and digits.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Any

INSTRUCTIONS = ("system", "developer")
ROLES = (*INSTRUCTIONS, "user", "assistant", "tool")


class Place(StrEnum):
    """Where the text of a message is in the prompt."""

    IN_PLACE = "in place"
    HEAD = "moved to the head"
    END = "moved to the end"
    LOST = "lost"
    REFUSED = "refused"


class Lists(StrEnum):
    """What becomes of a content that is a list of texts."""

    WHOLE = "whole"
    PARTLY = "partly lost"
    LOST = "lost"
    PRINTED = "printed as a list"
    REFUSED = "refused"


class Tools(StrEnum):
    """Where the definitions of tools are."""

    FIRST = "before the system text"
    AFTER_SYSTEM = "behind the system text"
    LAST = "in the last user's turn"
    ABSENT = "nowhere"


class Opening(StrEnum):
    """What becomes of the text that opens an answer at the end of a prompt."""

    KEPT = "kept"
    LOST_BARE = "lost without thinking"
    LOST = "lost in the next prompt"


_IDS = {
    (False, False): "not in the prompt",
    (False, True): "in the prompt",
    (True, False): "9 letters and digits, not in the prompt",
    (True, True): "9 letters and digits, in the prompt",
}


@dataclass(frozen=True, slots=True)
class Frame:
    """What a template writes in an answer: what is before its thinking, the space after this, and
    that before its text and before a call. "" where it writes none, or shows no thinking."""

    before_thinking: str = ""
    after_thinking: str = ""
    before_text: str = ""
    before_call: str = ""


@dataclass(frozen=True, slots=True)
class TemplateModel:
    """What a template does. Each fact was seen on a rendered conversation.

    first: the place of the first message's text, by its role.
    later: the same of a message between turns, behind a user's and in front of the next.
    lists: what becomes of lists of parts, by role.
    tools: where tools are defined.
    thinking: where an answer's thinking is in the prompt of the user's next turn: in place, lost,
        or the template refuses it.
    loop_thinking: the same in a loop of tool calls.
    has_calls: whether a call is in the prompt.
    has_text_with_calls: whether a text beside calls stays, and ahead of the results.
    has_parallel_calls: whether both of two calls of one answer stay, and both results.
    has_user_after_results: whether a user's text between results and the next answer stays.
    has_call_ids: whether a call's id is in the prompt.
    wants_short_ids: whether it refuses calls whose ids are not 9 letters and digits.
    opening: whether what a prompt writes of the answer is in the prompt after it, in a loop of tool
        calls.
    grows_by_turns: whether the prompt of a turn is the beginning of the next one's, where a user
        speaks between them.
    grows_in_loops: the same in a loop of tool calls.
    needs_descriptions: whether it refuses a tool without a description.
    """

    first: Mapping[str, Place]
    later: Mapping[str, Place]
    lists: Mapping[str, Lists]
    tools: Tools
    thinking: Place
    loop_thinking: Place
    has_calls: bool
    has_text_with_calls: bool
    has_parallel_calls: bool
    has_user_after_results: bool
    has_call_ids: bool
    wants_short_ids: bool
    opening: Opening
    grows_by_turns: bool
    grows_in_loops: bool
    needs_descriptions: bool = False

    def lines(self) -> list[tuple[str, str]]:
        """Its facts for a person: what it is about, and what was seen."""
        rows = [(f"first {role}", str(place)) for role, place in self.first.items()]
        rows += [(f"{role} between turns", str(place)) for role, place in self.later.items()]
        rows += [(f"list of parts, {role}", str(kind)) for role, kind in self.lists.items()]
        rows += [
            ("tools", str(self.tools)),
            ("thinking before a user's turn", str(self.thinking)),
            ("thinking in a loop of tools", str(self.loop_thinking)),
            ("calls", "kept" if self.has_calls else "lost or refused"),
            ("text beside calls", "kept" if self.has_text_with_calls else "lost"),
            ("parallel calls", "kept" if self.has_parallel_calls else "lost or refused"),
            ("user after results", "kept" if self.has_user_after_results else "lost or refused"),
            ("ids of calls", _IDS[self.wants_short_ids, self.has_call_ids]),
            ("what opens an answer", str(self.opening)),
            ("prompt of the next turn", "grows" if self.grows_by_turns else "changes"),
            ("prompt in a loop of tools", "grows" if self.grows_in_loops else "changes"),
        ]
        return rows


Json = dict[str, Any]
LENGTH = 9


def with_short_ids(messages: list[Json], counts: Counter[str]) -> list[Json]:
    """Messages whose calls have ids of 9 letters and digits. The same id becomes the same one."""
    return [_with_short_ids(message, counts) for message in messages]


def _with_short_ids(message: Json, counts: Counter[str]) -> Json:
    edits: Json = {}
    if calls := message.get("tool_calls"):
        edits["tool_calls"] = [{**call, "id": _short(call.get("id"))} for call in calls]
    if "tool_call_id" in message:
        edits["tool_call_id"] = _short(message["tool_call_id"])
    if all(message[key] == value for key, value in edits.items()):
        return message
    counts["call_id"] += 1
    return {**message, **edits}


def _short(id: Any) -> str:
    if isinstance(id, str) and len(id) == LENGTH and id.isalnum():
        return id
    return hashlib.blake2s(str(id).encode(), usedforsecurity=False).hexdigest()[:LENGTH]


Render = Callable[[list[Json], list[Json]], str]
"""Renders messages and tools in OpenAI's form, as a prompt for an answer. Raises any error."""

_WORDS = ("jelquin", "morvast", "tubriko", "sandovel", "hirtemo", "wexolin", "pradunk", "gostiva")
_A, _B, _C, _D, _E, _THOUGHT, _TOOL, _ID = _WORDS
_KEY, _KEY_2 = "tosquin", "velmarh"
_TOOLS: list[Json] = [
    {
        "type": "function",
        "function": {
            "name": _TOOL,
            "description": "Looks up.",
            "parameters": {
                "type": "object",
                "properties": {"key": {"type": "string", "description": "What."}},
            },
        },
    }
]


def observe(render: Render, thinking: Render | None = None) -> TemplateModel:
    """What a template does. Raises ValueError if it does not even render a user's text.

    thinking: renders for a model that thinks only on demand.
    """
    if _rendered(render, [_said("user", _A)]) is None:
        if _rendered(render, [_said("user", _A)], _TOOLS) is None:
            raise ValueError("the template renders no user's message")
        render, thinking = map(_with_tools, (render, thinking or render))
    thinking = thinking or render
    shortened = _rendering_short_ids(render)
    wants_short_ids = not _has(render, _called(), _KEY) and _has(shortened, _called(), _KEY)
    if wants_short_ids:
        render, thinking = shortened, _rendering_short_ids(thinking)
    return TemplateModel(
        first={role: _place_of_first(render, role) for role in INSTRUCTIONS},
        later={role: _place_of_later(render, role) for role in INSTRUCTIONS},
        lists={role: _lists(render, role) for role in ROLES},
        tools=_place_of_tools(render),
        thinking=_place_of_thinking(thinking, [*_thinking_turn(), _said("user", _E)]),
        loop_thinking=_place_of_thinking(thinking, _called(reasoning_content=_THOUGHT)),
        has_calls=_has(render, _called(), _KEY),
        has_text_with_calls=_has_text_with_calls(render),
        has_parallel_calls=_has(render, _called(calls=2), _C, _D, _KEY, _KEY_2),
        has_user_after_results=_has(render, [*_called(), _said("user", _E)], _E),
        has_call_ids=_has(render, _called(), _SHORT_ID if wants_short_ids else _ID),
        wants_short_ids=wants_short_ids,
        opening=_opening(render, thinking),
        grows_by_turns=_grows(thinking, _turns()),
        grows_in_loops=_grows(thinking, _loop()),
        needs_descriptions=_needs_descriptions(render),
    )


def _with_tools(render: Render) -> Render:
    """For templates that render nothing without tools."""
    return lambda messages, tools: render(messages, tools or list(_TOOLS))


def _rendering_short_ids(render: Render) -> Render:
    return lambda messages, tools: render(with_short_ids(messages, Counter()), tools)


def frame_of(render: Render) -> Frame:
    """What the template writes around the thinking and the text of an answer with a call."""
    answer = _called(content=_B, reasoning_content=_THOUGHT)
    text = _rendered(render, answer, _TOOLS) or _rendered(render, _called(content=_B), _TOOLS) or ""
    asked, thought, said = text.find(_A) + len(_A), text.find(_THOUGHT), text.find(_B)
    if said < 0:
        return Frame()
    behind = text[said + len(_B) :]
    before_call = _space_at_start(behind) if thought < said else ""
    if thought < 0:
        return Frame(before_call=before_call)
    after = _space_at_start(text[thought + len(_THOUGHT) :])
    between = text[thought:said]
    before_text = between[len(between.rstrip()) :]
    return Frame(text[asked:thought], after, before_text, before_call)


def _space_at_start(text: str) -> str:
    return text[: len(text) - len(text.lstrip())]


def is_found_in_text(render: Render, wrap: Callable[[str], str]) -> bool:
    """Whether thinking that is wrapped in an answer's text is rendered as in its own field."""
    inside = render(_called(content=wrap(_THOUGHT) + _B), list(_TOOLS))
    return inside == render(_called(content=_B, reasoning_content=_THOUGHT), list(_TOOLS))


def _said(role: str, text: Any) -> Json:
    return {"role": role, "content": text}


def _call(key: str, number: int) -> Json:
    function = {"name": _TOOL, "arguments": json.dumps({"key": key})}
    return {"id": f"functions.{_TOOL}:{number}{_ID}", "type": "function", "function": function}


_SHORT_ID = with_short_ids([{"tool_call_id": _call(_KEY, 0)["id"]}], Counter())[0]["tool_call_id"]


def _called(calls: int = 1, **fields: Any) -> list[Json]:
    """A user's turn, an answer with calls, and their results."""
    keys, results = (_KEY, _KEY_2)[:calls], (_C, _D)[:calls]
    made = [_call(key, number) for number, key in enumerate(keys)]
    answer = {"role": "assistant", "content": "", "tool_calls": made, **fields}
    outputs = [
        {"role": "tool", "tool_call_id": call["id"], "name": _TOOL, "content": result}
        for call, result in zip(made, results, strict=True)
    ]
    return [_said("user", _A), answer, *outputs]


def _thinking_turn() -> list[Json]:
    answer = {"role": "assistant", "content": _B, "reasoning_content": _THOUGHT}
    return [_said("user", _A), answer]


def _turns() -> list[list[Json]]:
    """Prompts of two turns of a user; the first has the answer in place of a user's next words."""
    return [_thinking_turn()[:1], [*_thinking_turn(), _said("user", _E)]]


def _loop() -> list[list[Json]]:
    first, second = _called(reasoning_content=_THOUGHT), _called(calls=2)[1:]
    return [first[:1], first, [*first, *second]]


def _rendered(render: Render, messages: list[Json], tools: Sequence[Json] = ()) -> str | None:
    """The prompt; None if the template refuses the messages."""
    try:
        return render(messages, list(tools))
    except Exception:  # templates raise errors of all kinds
        return None


def _has(render: Render, messages: list[Json], *words: str) -> bool:
    """Whether each word is in the prompt of messages with calls."""
    text = _rendered(render, messages, _TOOLS)
    return text is not None and all(word in text for word in words)


def _place_of_thinking(render: Render, messages: list[Json]) -> Place:
    return _place(_rendered(render, messages, _TOOLS), "", _THOUGHT, "")


def _has_text_with_calls(render: Render) -> bool:
    """Whether a text beside a call stays ahead of the result, also after the final answer."""
    called = _called(content=_B)
    for messages in (called, [*called, _said("assistant", _D), _said("user", _E)]):
        text = _rendered(render, messages, _TOOLS)
        if text is None or not 0 <= text.find(_B) < text.find(_C):
            return False
    return True


def _place_of_first(render: Render, role: str) -> Place:
    messages = [_said(role, _A), _said("user", _B)]
    later = [*messages, _said("assistant", _C), _said("user", _D)]
    alone = _place(_rendered(render, messages), "", _A, _B)
    return alone if alone is not Place.IN_PLACE else _place(_rendered(render, later), "", _A, _B)


def _place_of_later(render: Render, role: str) -> Place:
    messages = [
        _said("system", _E),
        _said("user", _A),
        _said("assistant", _B),
        _said("user", _C),
        _said(role, _D),
    ]
    more = [_said("assistant", _THOUGHT), _said("user", _ID)]
    after = _place(_rendered(render, [*messages, *more]), _C, _D, _THOUGHT)
    last = _place(_rendered(render, messages), _C, _D, "")
    return after if after is not Place.IN_PLACE else last


def _place(text: str | None, before: str, word: str, after: str) -> Place:
    """Where a word is that should be between two others; "" is an end of the prompt."""
    if text is None:
        return Place.REFUSED
    at = text.find(word)
    if at < 0:
        return Place.LOST
    if before and at < text.find(before):
        return Place.HEAD
    if after and at > text.find(after):
        return Place.END
    return Place.IN_PLACE


def _lists(render: Render, role: str) -> Lists:
    parts = [{"type": "text", "text": text} for text in (_C, _D)]
    if role == "tool":
        messages = _called()
        messages[-1]["content"] = parts
    elif role == "assistant":
        messages = [_said("user", _A), _said(role, parts), _said("user", _B)]
    else:
        messages = [_said(role, parts), *([_said("user", _A)] if role in INSTRUCTIONS else ())]
    text = _rendered(render, messages)
    if text is None:
        return Lists.REFUSED
    if "'type'" in text or '"type"' in text:
        return Lists.PRINTED
    found = (_C in text) + (_D in text)
    return (Lists.LOST, Lists.PARTLY, Lists.WHOLE)[found]


def _place_of_tools(render: Render) -> Tools:
    messages = [_said("system", _A), _said("user", _B), _said("assistant", _C), _said("user", _D)]
    text = _rendered(render, messages, _TOOLS)
    if text is None or _TOOL not in text:
        return Tools.ABSENT
    at = text.find(_TOOL)
    if at > text.find(_C):
        return Tools.LAST
    return Tools.FIRST if at < text.find(_A) else Tools.AFTER_SYSTEM


def _needs_descriptions(render: Render) -> bool:
    asked = [_said("user", _A)]
    if _rendered(render, asked, _TOOLS) is None:
        return False
    bare = {**_TOOLS[0], "function": {**_TOOLS[0]["function"], "description": None}}
    return _rendered(render, asked, [bare]) is None


def _opening(render: Render, thinking: Render) -> Opening:
    if _is_continued(render, _called()):
        return Opening.KEPT
    is_kept = _is_continued(thinking, _called(reasoning_content=_THOUGHT))
    return Opening.LOST_BARE if is_kept else Opening.LOST


def _is_continued(render: Render, answered: list[Json]) -> bool:
    """Whether the prompt for an answer with a call is the beginning of the one after it."""
    before, after = (_rendered(render, each, _TOOLS) for each in (answered[:1], answered))
    return before is not None and after is not None and after.startswith(before)


def call_in(render: Render) -> tuple[str, str]:
    """How a call is in the prompt: what is between the user's text and the result, and the same
    without what opens an answer."""
    before = _rendered(render, _called()[:1], _TOOLS) or ""
    text = _rendered(render, _called(), _TOOLS) or ""
    whole = text[text.find(_A) + len(_A) : text.find(_C)]
    return whole, text[len(before) : text.find(_C)] if text.startswith(before) else whole


def _grows(render: Render, prompts: list[list[Json]]) -> bool:
    """Whether each prompt begins with the one before, without what opens the answer."""
    texts = [_rendered(render, messages, _TOOLS) for messages in prompts]
    for before, after in pairwise(texts):
        if before is None or after is None:
            return False
        end = max(before.rfind(word) + len(word) for word in _WORDS)
        if not after.startswith(before[:end]):
            return False
    return True
