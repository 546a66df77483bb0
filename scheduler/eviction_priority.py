"""What a request leaves in the cache, as eviction sees it: worth keeping, or known to be worthless.

Eviction takes the worthless first, and among equals what was used longest ago. A node of
the tree keeps the highest worth that it ever had, as somebody shares it for whom it has
that. So nothing is ranked that may lose its worth with time: of system prompts, tool results
and turns the recency decides. Worthless is only what nobody will ask for again:

    the new part of a prompt     whose client asked not to keep it, or ended its session with it
    an answer                    of such a request, or one that begins with thinking which the
                                 chat template leaves out when the answer is sent back
"""

from __future__ import annotations

from typing import NamedTuple

EVICT_FIRST = 0
EVICT_NORMALLY = 1


class EvictionPriority(NamedTuple):
    """Of what a request adds to the cache."""

    prompt: int = EVICT_NORMALLY
    answer: int = EVICT_NORMALLY


def eviction_priority(*, is_kept: bool, is_last: bool, is_answer_kept: bool) -> EvictionPriority:
    """is_kept: the client did not ask to forget it; is_last: no turn follows;
    is_answer_kept: the next turn will begin with this answer as it was generated."""
    prompt = EVICT_NORMALLY if is_kept and not is_last else EVICT_FIRST
    return EvictionPriority(prompt, prompt if is_answer_kept else EVICT_FIRST)
