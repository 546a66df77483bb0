"""Whether an engine that has work and sends nothing hangs, or is busy.

An engine that computes sends events several times a second. A scheduler that compiles a kernel on
its first use sends none for minutes, and its requests are lost if it is taken for one that hangs.

    no event and no sign of work for    engine                              it is
    < STALL_S                                                               waited for
    >= STALL_S                          started < `compile_timeout_s` ago    waited for
    >= STALL_S                          is older                            made to generate

An engine that sends no event for `compile_timeout_s` must generate a token, whatever it shows.

A scheduler that waits for a device or another rank computes, too: it waits in a loop. So CPU time
shows nothing, but such a loop touches no new memory. A compiler does, though not in every second:
so signs are read from LOOK_S on. Just after its start an engine may also wait for another one that
compiles the same kernels, and show no sign.
"""

from dataclasses import dataclass

STALL_S = 60.0
LOOK_S = STALL_S / 2
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
    if quiet_s < STALL_S and silent_s < max(compile_timeout_s, STALL_S):
        return True
    return age_s is not None and age_s < compile_timeout_s
