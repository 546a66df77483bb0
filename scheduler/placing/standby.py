"""Which second worker computes a session's prompt ahead, before its own worker is too busy.

A session leaves its worker when that worker is full, or when waiting there costs more than
computing its prompt elsewhere (`scheduler.placing.placement`, `scheduler.capacity`). Its client
then waits for the whole prompt. An idle worker can compute the prompt earlier: most of the next
turn's prompt is this turn's.

A worker is strained when three quarters of the requests that it can run at once are in flight
there, or when its pending work takes half as long as computing this prompt: at the whole of that
the next turn would move. One standby is enough, so none is chosen while another worker holds
the prompt.
"""

from collections.abc import Collection, Mapping

from scheduler.placing.placement import rendezvous

FULL = 0.75
LONG_WAIT = 0.5
# Computing fewer tokens than this is not worth a second request.
LEAST_TOKENS = 1024


def is_strained(prompt_tokens: int, pending_tokens: int, running: float | None) -> bool:
    """Whether a session's worker may be unable to take the next turn soon.

    pending_tokens: tokens that it still has to prefill for other requests.
    running: the share of its request slots in use, 1 if it queues, None if unknown.
    """
    is_full = running is not None and running >= FULL
    return is_full or pending_tokens >= LONG_WAIT * prompt_tokens


def choose_standby(
    prompt_tokens: int, prefix: int, held_tokens: Mapping[str, int], idle: Collection[str]
) -> str | None:
    """The standby for a session whose worker is strained; None if another worker holds the
    prompt or none is idle.

    It is the idle worker that holds most of the prompt; ties are broken as in placement.
    held_tokens: how much of the prompt each other worker holds or is about to hold.
    idle: those of them where nothing runs.
    """
    if any(prompt_tokens - held < LEAST_TOKENS for held in held_tokens.values()):
        return None
    return max(idle, key=lambda w: (held_tokens[w], rendezvous(prefix, w), w), default=None)
