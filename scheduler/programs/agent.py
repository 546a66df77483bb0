"""One agent: a conversation, and what it does between two requests.

    from       by                                            to
    (new)      a request                                     COMPUTING
    COMPUTING  the engine has computed its answer            OPEN
    OPEN       the answer is known, and calls tools          CALLING   it will return
    OPEN       the answer is known, and calls none           TALKING   it may return
    any        what shows that it ended                      ENDED
    any        a request, because nothing is known for sure  COMPUTING

An answer is known a moment after it was computed, or never, if the engine cannot read the model's
calls.
"""

from dataclasses import dataclass, field
from enum import StrEnum


class Doing(StrEnum):
    """What an agent does."""

    COMPUTING = "computing"
    OPEN = "open"
    CALLING = "calling"
    TALKING = "talking"
    ENDED = "ended"


AWAY = (Doing.OPEN, Doing.CALLING, Doing.TALKING)
"""Between an answer and the next request."""


@dataclass(slots=True, eq=False)
class Agent:
    """Only `Programs` changes it.

    name: of its conversation, unique among all tenants. owner: its tenant.
    session: of the harness, with all its agents; "" if none is stated.
    id: by which its client tells it from other agents of the session; "" for a lead.
    parent: the name of the agent that started it; "" if there is none, or it is unknown.
    children: the names of those that it started and that have not ended.
    since_s: when it began to do what it does.
    tools: those that its last answer called.
    is_last: it will not come back after the answer that is computed now.
    head, tokens: of its last prompt: a number for its beginning, 0 if unknown, and its length.
    is_unseen: the engine cannot read its calls: it has brought results of calls that no answer had.
    """

    name: str
    owner: str
    session: str
    id: str = ""
    parent: str = ""
    is_subagent: bool = False
    children: set[str] = field(default_factory=set)
    doing: Doing = Doing.COMPUTING
    since_s: float = 0.0
    tools: tuple[str, ...] = ()
    is_last: bool = False
    head: int = 0
    tokens: int = 0
    is_unseen: bool = False
