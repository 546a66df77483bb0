"""Whether an engine that has work and sends nothing stands still, hangs, or is busy.

An engine that computes sends events several times a second. A scheduler that compiles a kernel on
its first use sends none for minutes, and its requests are lost if it is taken for one that hangs.

    no event and no sign of work for    engine                              it is
    < `stalled_after_s`                                                     used
    >= `stalled_after_s`                                                    stalled
    >= HANG_S                           started < `compile_timeout_s` ago   stalled, waited for
    >= HANG_S                           is older                            made to generate

An engine that is stalled gets nothing new, and the requests that it has stay there. That costs
little if it goes on after all. A scheduler sends nothing during a step, so a step with a long
prompt may take longer. An engine that must generate a token and does not hangs: it loses its
requests. After RESTART_S more its launcher starts it again.

An engine that sends no event for `compile_timeout_s` must generate a token, whatever it shows.

A scheduler that waits for a device or another rank computes, too: it waits in a loop. So CPU time
shows nothing, but such a loop touches no new memory. A compiler does, though not in every second:
so signs are read from LOOK_S on. Just after its start an engine may also wait for another one that
compiles the same kernels, and show no sign.
"""

from dataclasses import dataclass

HANG_S = 60.0
RESTART_S = 60.0
STALLED_S = 10.0
# What a step may take besides, of the time that its largest prompt takes at the usual speed.
STEP_FACTOR = 3.0
# The speed of an engine that does not say how fast it computes.
SLOW_TOKENS_PER_S = 1000.0
LOOK_S = STALLED_S / 2
# Compilers cause thousands a second, a loop that waits none.
WORKING_FAULTS = 200


@dataclass(frozen=True, slots=True)
class Signs:
    """What an engine says about itself: its age, and the page faults of its schedulers and of the
    processes that they started, within a second."""

    age_s: float
    page_faults: int

    @property
    def is_working(self) -> bool:
        """Whether its schedulers work."""
        return self.page_faults >= WORKING_FAULTS


def is_waited_for(
    silent_s: float, quiet_s: float, age_s: float | None, compile_timeout_s: float
) -> bool:
    """Whether to go on waiting for an engine that has work.

    silent_s: since its last event. quiet_s: since its last event or sign of work.
    age_s: since its start; None if it does not say.
    """
    if quiet_s < HANG_S and silent_s < max(compile_timeout_s, HANG_S):
        return True
    return age_s is not None and age_s < compile_timeout_s


def stalled_after_s(prompt_tokens: int, tokens_per_s: float) -> float:
    """How long an engine may be quiet before it is stalled.

    prompt_tokens: the most that it has to compute for one of its requests. tokens_per_s: as fast as
    it computed others; 0 if that is not known.
    """
    step_s = prompt_tokens / (tokens_per_s or SLOW_TOKENS_PER_S)
    return min(STALLED_S + STEP_FACTOR * step_s, HANG_S)
