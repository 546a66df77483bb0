"""Rewrites bodies that harnesses send, and that SGLang rejects or misreads, into ones it accepts.

    body as sent --> translate --> body for SGLang's own validation and conversion
                         |
                         +--> counts of what was rewritten or left out, for a metric

Fields keep their documented meaning as far as an engine can provide it. Tools that run on a
vendor's servers are left out; tools that the client runs become plain tools; content that the
model cannot see is replaced by a text that names it. An invalid value stays, and SGLang rejects
it. A body that needs no change is returned as the same object, and the given body is never
modified. Translating twice gives the same result as once.

Each protocol's rewriting is in `sgl_ext/protocols/translation/`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from sgl_ext.requests.protocol import Model, Protocol


class Translated(NamedTuple):
    """A body for SGLang, and how often each kind of thing was rewritten or left out."""

    body: Any
    counts: Mapping[str, int]


def translate(protocol: Protocol, body: Any, model: Model) -> Translated:
    """The body that SGLang gets for one that a client posted. Never raises."""
    if protocol.translate is None or not isinstance(body, dict):
        return Translated(body, {})
    counts: Counter[str] = Counter()
    return Translated(protocol.translate(body, model, counts), counts)
