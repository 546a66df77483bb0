"""What routing needs to know of a request, and what it reads of that in the prompt."""

from collections.abc import Mapping
from typing import Any

import msgspec

from sgl_ext.reading.client import agent_of, is_final, session_key, stated_name
from sgl_ext.reading.hints import Importance, honoured_hints, read_importance
from sgl_ext.reading.protocol import Protocol
from sgl_ext.reading.segments import (
    Chain,
    distinct_bytes,
    longest_of,
    read_batch,
    read_chain,
    salt_of,
    with_sorted_tools,
)
from sgl_ext.wire.headers import NO_DEFAULTS, DefaultHints


class Prompt(msgspec.Struct, frozen=True, gc=False):
    """session: of `session_key`. stated: of `stated_name`.
    prefix: breaks ties; equal for requests that share a beginning.
    size_bytes: of the canonical text, in a batch what its prompts share once; of the body if there
        is no such text.
    others: the chains of a batch's other prompts. hints: of `honoured_hints`.
    agent, is_final: as of a `RoutingRequest`.
    """

    chain: Chain
    session: int | None
    prefix: int
    size_bytes: int
    importance: Importance
    stated: str = ""
    others: tuple[Chain, ...] = ()
    hints: tuple[str, ...] = ()
    agent: int | None = None
    is_final: bool = False


def read_prompt(
    protocol: Protocol,
    headers: Mapping[str, str],
    body: Any,
    size_bytes: int,
    ceiling: int,
    *,
    sort_tools: bool = False,
    defaults: DefaultHints = NO_DEFAULTS,
) -> Prompt:
    """Reads a parsed and stripped body.

    headers: with lower-case names. size_bytes: of the body. ceiling: the tenant's highest priority.
    defaults: hints that count where the request gives none.
    """
    document = with_sorted_tools(body) if sort_tools else body
    salt = salt_of(headers)
    chain = read_chain(protocol, document, salt=salt)
    others: list[Chain] = []
    if chain.hashes:
        size_bytes = chain.ends[-1]
    elif batch := read_batch(protocol, document, salt=salt):
        others = [*batch]
        others.remove(chain := longest_of(batch))
        size_bytes = distinct_bytes(batch) or size_bytes
    session, stated = session_key(headers, body, chain), stated_name(headers, body)
    agent = agent_of(session, chain)
    return Prompt(
        chain,
        session,
        chain.hashes[0] if chain.hashes else session or 0,
        size_bytes,
        # Malformed hints are left to the engine, which rejects them.
        read_importance(headers, body, ceiling, defaults),
        stated,
        tuple(others),
        honoured_hints(headers, body, ceiling),
        agent,
        is_final(headers) if headers else False,
    )


class RoutingRequest(msgspec.Struct, frozen=True, gc=False):
    """What routing needs to know of a request.

    session: a number for the agent's conversation. session_name: the same as logs and pages have
        it; None if it is unknown. agent: of `agent_of`.
    is_final: whether the client states that this is the conversation's last turn.
    prefix: breaks ties; equal for requests that share a beginning.
    runs: whether the engine's scheduler runs it, so that it needs capacity there.
    warms: whether it is prefilled ahead, when the engine is idle: it is no load, and no request
        waits for its prefix.
    only: the URLs of the engines that it may go to; None: any.
    others: the chains of a batch's other prompts: the engine runs each as a request of its own.
    prompts: how many it has.
    due_s: how long after it arrived its answer is due; None if it is not stated.
    """

    chain: Chain
    session: int | None
    prefix: int
    prompt_tokens: int
    is_final: bool = False
    priority: int = 0
    output_tokens: int = 0
    tenant: str = ""
    runs: bool = True
    warms: bool = False
    only: frozenset[str] | None = None
    session_name: str | None = None
    others: tuple[Chain, ...] = ()
    prompts: int = 1
    due_s: float | None = None
    agent: int | None = None


NO_ROUTING = RoutingRequest(Chain(), None, 0, 0, runs=False)
