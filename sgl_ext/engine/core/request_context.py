"""What the extension knows of one HTTP request, and the context variable that carries it.

SGLang hands no object of ours along its chain of calls, so one context variable does. Each part
of the way reads what it needs, and writes what it finds out:

    request hook      reads the body                            path ... pins
    conversion        renders and tokenizes the prompt          pins, is_answer_reusable
    generate_request  sends the hints to the scheduler          are_hints_sent
    answer            completes usage and the stop reason       finish_reason, matched_stop
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from sgl_ext.requests.cache_marks import Marks
from sgl_ext.requests.priority import USUAL, Importance
from sgl_ext.requests.segments import Chain

WHOLE_PROMPT = -1
"""In place of a number of tokens: all tokens of the prompt."""


@dataclass(slots=True)
class RequestContext:
    """What one HTTP request asks for, and what became of it.

    pins: for each prefix to pin, its length in tokens and its TTL in seconds, ascending.
        Complete once the prompt is rendered.
    owner: the tenant that pins are charged to. session: the name that the client gave.
    group: requests of one cache group share cached prefixes; None is a group, too.
    conversation: a number that all turns of a conversation share; None if it is unknown.
    is_last: the client says that this is the conversation's last turn.
    is_answer_reusable: whether the next turn's prompt continues with the answer as generated.
    are_hints_sent: whether a generation took the hints; later ones have another prompt.
    finish_reason, matched_stop: how SGLang says that the answer ended.
    """

    path: str
    body: Any
    chain: Chain
    marks: Marks
    importance: Importance = USUAL
    owner: str = ""
    session: str = ""
    group: str | None = None
    conversation: int | None = None
    is_last: bool = False
    is_answer_reusable: bool = True
    pins: tuple[tuple[int, float], ...] = ()
    are_hints_sent: bool = False
    finish_reason: str | None = None
    matched_stop: Any = None


_current: ContextVar[RequestContext | None] = ContextVar("sgl_ext_request", default=None)


def enter(context: RequestContext) -> None:
    """Makes `context` the current one, for this task and the tasks that it starts."""
    _current.set(context)


def current() -> RequestContext | None:
    """The context of the request that this task works on; None outside of requests."""
    return _current.get()
