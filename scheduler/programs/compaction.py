"""Whether a prompt is what is left of a longer one that was compacted.

    before   head | message message message ...
    after    head | summary                         of the same conversation, or of a new one

The head is the beginning of a prompt, with its tools and instructions. A client that compacts does
not send the longer prompt again.
"""

from collections.abc import Sequence

HEAD_TOKENS = 1024
_LEFT = 0.5


def head_of(prompt: Sequence[int]) -> int:
    """A number for the beginning of a prompt, equal in all processes; 0 if the prompt is so short
    that its beginning may be more than tools and instructions."""
    return hash(tuple(prompt[:HEAD_TOKENS])) or 1 if len(prompt) >= 2 * HEAD_TOKENS else 0


def is_left_of(head: int, tokens: int, earlier_head: int, earlier_tokens: int) -> bool:
    """Whether a prompt is what is left of an earlier one. tokens: their lengths."""
    return head != 0 and head == earlier_head and tokens < _LEFT * earlier_tokens
