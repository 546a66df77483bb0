"""What routing reads in a request's prompt, without any state of the balancer."""

from collections.abc import Mapping
from typing import Any

import msgspec

from sgl_ext.reading.client import salt_of, session_key, stated_name
from sgl_ext.reading.hints import Importance, read_importance
from sgl_ext.reading.protocol import Protocol
from sgl_ext.reading.segments import (
    Chain,
    longest_of,
    read_batch,
    read_chain,
    with_sorted_tools,
)
from sgl_ext.wire.headers import NO_DEFAULTS, DefaultHints


class Prompt(msgspec.Struct, frozen=True, gc=False):
    """session: of `session_key`. stated: of `stated_name`.
    prefix: breaks ties; equal for requests that share a beginning.
    size_bytes: of the canonical text; of the body for a batch, or if there is no such text.
    """

    chain: Chain
    session: int | None
    prefix: int
    size_bytes: int
    importance: Importance
    stated: str = ""


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
    if chain.hashes:
        size_bytes = chain.ends[-1]
    else:  # a batch computes all of its prompts, and goes where most of the longest is
        chain = longest_of(read_batch(protocol, document, salt=salt))
    session = session_key(headers, body, chain)
    return Prompt(
        chain,
        session,
        chain.hashes[0] if chain.hashes else session or 0,
        size_bytes,
        # Malformed hints are left to the engine, which rejects them.
        read_importance(headers, body, ceiling, defaults),
        stated_name(headers, body),
    )
