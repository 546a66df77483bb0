"""The eviction priority of what a request leaves in the cache.

Eviction takes the lowest priority first, and the least recently used among equals. A node of the
tree keeps the highest priority that any request gave it, because that request may still share
it. So the low priority is only for what no later request will read:

    the new part of a prompt   if its client asked not to keep it, or ended its session with it
    an output                  of such a request, or one that begins with thinking, which the
                               chat template omits when the output is sent back

All else is equal: recency alone decides between system prompts, tool results and turns.
"""

from typing import NamedTuple

EVICT_FIRST = 0
EVICT_NORMALLY = 1


class EvictionPriority(NamedTuple):
    """The priorities of what a request adds to the cache."""

    prompt: int = EVICT_NORMALLY
    answer: int = EVICT_NORMALLY


def eviction_priority(*, is_kept: bool, is_last: bool, is_answer_kept: bool) -> EvictionPriority:
    """The priorities of a request's prompt and output.

    is_kept: the client did not ask to drop the prompt.
    is_last: the client ended the session with this request.
    is_answer_kept: the next turn's prompt will contain this output as it was generated.
    """
    prompt = EVICT_NORMALLY if is_kept and not is_last else EVICT_FIRST
    return EvictionPriority(prompt, prompt if is_answer_kept else EVICT_FIRST)
