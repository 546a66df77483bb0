"""The fixed bounds of one connection and one request. docs/reference/limits.md lists all bounds.

Those that depend on a node's memory are settings (`sgl_ext/settings/schema.py`).
"""

_KIB, _MIB = 1 << 10, 1 << 20

# Bytes.
MAX_HEAD_BYTES = 64 * _KIB
MAX_AHEAD_BYTES = 64 * _KIB
"""Of later requests, while an earlier one is answered; then the connection is not read."""
MAX_BODILESS_BYTES = 8 * _KIB
"""A body with a method that needs none, such as GET."""
MAX_SKIPPED_BYTES = _MIB
"""Of a rejected request's body; with a longer one the connection ends."""
FIRST_BUFFER_BYTES = 256 * _KIB
BUFFER_GROWTH = 4
"""A body's buffer at first, and how many times as large it is after it was full."""
MAX_GROWTH_BYTES = 8 * _MIB
"""At once: the new part is filled with zeros while the event loop waits."""
MAX_WRITTEN_BYTES = _MIB
"""Of a body, to a worker in one round of the event loop."""
MAX_RATIO = 100
FREE_INFLATED_BYTES = _MIB
"""A body may inflate to this, and to MAX_RATIO times its compressed size above it."""
INFLATED_STEP_BYTES = 64 * _KIB
"""A body inflates by this much at most before the byte budget is asked for room."""
BUDGET_BODIES = 4
"""How many of the largest bodies the byte budget holds, unless it is set."""
SOCKET_TURNS_BYTES = 16 * _MIB
"""The turns that one WebSocket remembers."""

LARGE_BODY_BYTES = 2 * _MIB
"""A larger body is read in another process: here it could take more than 20 ms."""

# Elements of a JSON body.
UNCOUNTED_BYTES = _MIB // 2
"""Counting takes a third of the time of parsing, and a body of this size parses fast enough."""
MAX_ELEMENTS = 150_000
"""Objects, lists and strings, keys included."""
MAX_COMMAS = 1_200_000
"""Hence numbers: a prompt can be a list of token ids."""
MAX_MESSAGES = 10_000
MAX_BLOCKS = 10_000
"""Blocks of content in all messages, and of instructions."""
MAX_TOOLS = 2_000
MAX_SOCKET_MESSAGES = 16
"""Of one WebSocket, answered or waiting; then it is not read."""
MAX_LANES = 32
"""Of one WebSocket, whose latest response is remembered."""

# Seconds.
IDLE_S = 75.0
HEAD_S = 30.0
UNREAD_S = 120.0
"""A client that reads nothing of its answer for this long counts as disconnected."""
LINGER_S = 2.0
BODY_GRACE_S = 60.0
MIN_BODY_BYTES_PER_S = 8 * _KIB
MAX_BODY_S = 600.0
SOCKET_IDLE_S = 3600.0
"""A WebSocket without a message for this long ends."""
SOCKET_PING_S = 30.0
READING_S = 30.0
"""For a large body, and those that wait before it; the largest takes half a second."""


def body_deadline_s(arrived_bytes: int) -> float:
    """How long after its head a body may be incomplete, if this much of it has arrived."""
    return min(BODY_GRACE_S + arrived_bytes / MIN_BODY_BYTES_PER_S, MAX_BODY_S)
