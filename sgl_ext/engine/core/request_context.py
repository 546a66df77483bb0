"""What the extension knows of one HTTP request, and the context variable that carries it.

SGLang hands no object of ours along its chain of calls, so one context variable does. Each part
of the way reads what it needs, and writes what it finds out:

    request hook      reads the body                            path ... conversation
    conversion        renders and tokenizes the prompt          pins, is_answer_reusable
    generate_request  sends the hints to the scheduler          are_hints_sent
    answer            completes what SGLang answers             finish_reason ... thinking

SGLang converts some requests in threads that do not inherit context variables. For those, and for
middleware, the context is also on the request (`put_on`, `context_of`).

A dry run (`convert`) finds out what the engine would generate from for a body. A request with the
body goes through the application itself: reading, validation, template, tools,
adapters, salt. Where its generation would begin, SGLang's request is noted, and an error is
raised that SGLang answers without a log line. So the result is what a real request of that body
comes to, in each protocol, and a body that SGLang rejects is rejected in SGLang's own words.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import orjson

from sgl_ext.engine.sglang_http_types import GenerateReqInput
from sgl_ext.protocols.registry import of_path
from sgl_ext.reading.cache_marks import NO_MARKS, Marks
from sgl_ext.reading.client import NO_FACTS, ClientFacts
from sgl_ext.reading.compaction import Summary
from sgl_ext.reading.hints import USUAL, Importance
from sgl_ext.reading.protocol import Protocol
from sgl_ext.reading.segments import Chain

WHOLE_PROMPT = -1
"""In place of a number of tokens: all tokens of the prompt."""
_ON_REQUEST = "sgl_ext_context"


@dataclass(slots=True)
class RequestContext:
    """One HTTP request: what its client sent, and what the extension found out since.

    body: as the client sent it, without stripped headers. SGLang gets a translated one.
    batch: the chains of its prompts if it has several; `chain` is empty then.
    pins: for each prefix to pin, its length in tokens and its TTL in seconds, ascending.
        Complete once the prompt is rendered.
    owner: the tenant that pins are charged to. session: the name that the client gave.
    facts: what the client says about itself.
    group: requests of one cache group share cached prefixes; None is a group, too.
    conversation: a number that all turns of a conversation share; None if it is unknown.
    request_id: by which the client and the balancer know it.
    purpose: what the balancer sent it for, "" for the first attempt of a client's own.
    queued_s: how long the request waited in the balancer's admission queue. window_s: how long a
        window of that queue was then.
    bootstrap: host, port and room through which a prefill engine hands its KV to a decode engine.
    rank: the data-parallel rank that the balancer chose; None: SGLang chooses.
    is_last: the client says that this is the conversation's last turn.
    is_demoted: the client wants the session's pins on this prompt to end.
    summary: the answer sums the conversation up, and the prompt keeps what the turn before had.
    is_answer_reusable: whether the next turn's prompt continues with the answer as generated.
    are_hints_sent: whether a generation took the hints; later ones have another prompt.
    finish_reason, matched_stop: how SGLang says that the answer ended.
    is_cut: something else than the model ended the answer. has_open_call: inside of a call.
    parts: the words of a whole answer and the numbers of its calls, in order.
    top_logprobs: how many log probabilities of each token its stream has; None: it has none.
    usage: what the start of a stream counted. thinking_tokens: those of the answer.
    thinking: the hash of the block that is being sent.
    failed_status, fault: the HTTP status and the text of its error, if SGLang answers others.
    wrong_field: the client's name of a field that is out of its range.
    call_end: finds the end of the call that is being sent.
    withdrawn_tools: the names of tools that the conversation has removed.
    cached_messages: what the message cache found for the body, until SGLang converts it.
    is_array_allowed: whether the prompt's tokens may be an array, and not a list.
    found_in_messages: what SGLang found in the messages and tools of a chat completion, by name,
        with what it was found in.
    after_sending: what the request need not wait for.
    renderings: collects rendered prompts while a copy of the body is rendered, and not tokenized.
    is_prompt_encoded: what the tokenizer encodes next is the prompt, which was written as text.
    dry_run: stops this request before its generation.
    keeps_tools: whether tools that may not be called stay in the prompt.
    allowed_tools: the names that `tool_choice` allows; None: it has no list of them.
    calls: what `sgl_ext.compat.tool_choice` finds out about the calls of the answer.
    """

    path: str = ""
    body: Any = None
    chain: Chain = field(default_factory=Chain)
    marks: Marks = NO_MARKS
    importance: Importance = USUAL
    owner: str = ""
    session: str = ""
    facts: ClientFacts = NO_FACTS
    group: str | None = None
    conversation: int | None = None
    request_id: str = ""
    purpose: str = ""
    queued_s: float = 0.0
    window_s: float = 0.0
    bootstrap: tuple[str, int, int] | None = None
    rank: int | None = None
    is_last: bool = False
    is_demoted: bool = False
    summary: Summary | None = None
    is_answer_reusable: bool = True
    pins: tuple[tuple[int, float], ...] = ()
    are_hints_sent: bool = False
    finish_reason: str | None = None
    matched_stop: Any = None
    is_cut: bool = False
    has_open_call: bool = False
    parts: tuple[str | int, ...] = ()
    usage: dict[str, Any] | None = None
    thinking_tokens: int = 0
    top_logprobs: int | None = None
    thinking: Any = None
    failed_status: int | None = None
    fault: str = ""
    wrong_field: str | None = None
    call_end: Any = None
    withdrawn_tools: frozenset[str] = frozenset()
    cached_messages: tuple[Any, ...] = ()
    is_array_allowed: bool = False
    found_in_messages: dict[str, tuple[Any, int, Any, Any]] = field(default_factory=dict)
    after_sending: Callable[[], None] | None = None
    renderings: list[str] | None = None
    is_prompt_encoded: bool = False
    dry_run: "DryRun | None" = None
    batch: tuple[Chain, ...] = ()
    keeps_tools: bool = False
    allowed_tools: frozenset[str] | None = None
    calls: Any = None

    @property
    def protocol(self) -> Protocol:
        """The protocol of the request's path."""
        return of_path(self.path)

    def run_after_sending(self) -> None:
        """Runs `after_sending` once the event loop is free: a request is sent without a wait."""
        if self.after_sending is not None:
            asyncio.get_running_loop().call_soon(self.after_sending)
            self.after_sending = None


_current: ContextVar[RequestContext | None] = ContextVar("sgl_ext_request", default=None)


enter = _current.set
"""Makes a context the current one, for this task and the tasks that it starts."""
current = _current.get
"""The context of the request that this task works on; None outside of requests."""


@contextmanager
def entered(context: RequestContext) -> Iterator[None]:
    """Makes `context` the current one inside the block."""
    token = _current.set(context)
    try:
        yield
    finally:
        _current.reset(token)


def current_dry_run() -> "DryRun | None":
    """The dry run that this task is part of."""
    context = _current.get()
    return None if context is None else context.dry_run


def put_on(request: Any, context: RequestContext) -> None:
    """Puts a context on its HTTP request."""
    setattr(request.state, _ON_REQUEST, context)


def context_of(request: Any) -> RequestContext | None:
    """The context that was put on an HTTP request."""
    return None if request is None else getattr(request.state, _ON_REQUEST, None)


def context_in(scope: Any) -> RequestContext | None:
    """The context that was put on the HTTP request of an ASGI scope."""
    found: RequestContext | None = scope.get("state", {}).get(_ON_REQUEST)
    return found


def conversation_name(context: RequestContext) -> str | None:
    """A conversation's name, unique among all tenants; None if the conversation is unknown."""
    if context.conversation is None:
        return None
    return f"{context.owner}/{context.conversation:032x}"


_LEFT_OUT = (b"host", b"content-length", b"content-type", b"content-encoding", b"transfer-encoding")

Headers = Iterable[tuple[bytes, bytes]]


class Stopped(ValueError):
    """Ends a dry run where its generation would begin."""


@dataclass
class DryRun:
    """What a body comes to.

    request: SGLang's, with the prompt's tokens; None if SGLang rejected the body.
    context: what the extension knows of it.
    status, answer: of the rejection.
    """

    request: GenerateReqInput | None = None
    context: RequestContext = field(default_factory=RequestContext)
    status: int = 0
    answer: bytes = b""

    def stop(self, request: GenerateReqInput, context: RequestContext) -> None:
        """Notes the first request that would be generated from. Raises Stopped."""
        if self.request is None:
            self.request, self.context = request, replace(context, dry_run=None)
        raise Stopped("this request is a dry run")


async def convert(app: Any, path: str, headers: Headers, body: Any) -> DryRun:
    """What a body, posted to a path of the application, comes to."""
    dry_run = DryRun()
    sent = [(name, value) for name, value in headers if name.lower() not in _LEFT_OUT]
    sent.append((b"content-type", b"application/json"))

    async def post() -> None:
        enter(RequestContext(dry_run=dry_run))
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
            answer = await client.post(path, headers=sent, content=orjson.dumps(body))
        dry_run.status, dry_run.answer = answer.status_code, answer.content

    await asyncio.create_task(post())  # a task has context variables of its own
    return dry_run
