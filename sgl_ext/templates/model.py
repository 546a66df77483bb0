"""What a chat template does with roles, lists of parts, tools, thinking and calls."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

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
