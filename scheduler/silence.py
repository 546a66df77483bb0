"""Whether an engine that has work and sends nothing hangs, or is busy.

An engine that computes sends events several times a second. A scheduler that compiles a kernel on
its first use sends none for minutes, and its requests are lost if it is taken for one that hangs.

    silent for        engine                                          it is
    < STALL_S                                                         fine
    >= STALL_S        started less than `compile_timeout_s` ago       waited for
    < compile_timeout_s    touches new memory, as compilers do        waited for
    otherwise                                                         made to generate a token

A scheduler that waits for a device or another rank computes, too: it waits in a loop. So CPU time
shows nothing, but such a loop touches no new memory. Just after its start an engine may also wait
for another one that compiles the same kernels, of which it shows no sign.
"""

from dataclasses import dataclass

STALL_S = 60.0
# Compilers cause thousands a second, a loop that waits none.
WORKING_FAULTS = 200


@dataclass(frozen=True, slots=True)
class Signs:
    """What an engine says about itself: its age, and the page faults of its schedulers and of the
    processes that they started, within a second."""

    age_s: float
    page_faults: int


def is_waited_for(silent_s: float, signs: Signs | None, compile_timeout_s: float) -> bool:
    """Whether to go on waiting for an engine that has had work and sent nothing for so long.

    signs: None if it does not say.
    """
    if silent_s < STALL_S:
        return True
    if signs is None:
        return False
    is_working = signs.page_faults >= WORKING_FAULTS and silent_s < compile_timeout_s
    return is_working or signs.age_s < compile_timeout_s
