"""Whether the tier that engines share is read and written: a disk may be full, fail, or be slow.

    on --full, failing--> off --after RETRY_S one more try--> on, or off again
    on --behind---------> off --once nothing waits to be written--> on

A full disk is still read. One that is behind is still read, and what would wait for it is not
written. `Behind` means that pages were written for BEHIND_S without a pause: what waits to be
written keeps its room in host memory, which requests need.
"""

from enum import StrEnum

RETRY_S = 60.0
BEHIND_S = 30.0
PAUSE_S = 0.02


class Off(StrEnum):
    """Why it is off. Status, logs and metrics use these names."""

    FULL = "full"
    FAILING = "failing"
    BEHIND = "behind"


class TierSwitch:
    """The switch of one engine. why: why it is off; None while it is on. is_patient: all is
    written, however long that takes: the engine ends."""

    def __init__(self) -> None:
        self.why: Off | None = None
        self.is_patient = False
        self._retry_s = 0.0
        self._busy_since_s = 0.0
        self._ended_s = float("-inf")

    def may_read(self, now_s: float) -> bool:
        return self.why is not Off.FAILING or now_s >= self._retry_s

    def begin_write(self, now_s: float) -> bool:
        """A call is about to write. Returns whether it may."""
        if now_s - self._ended_s > PAUSE_S:
            self._busy_since_s = now_s
            if self.why is Off.BEHIND:
                self.why = None
        if self.why is None and now_s - self._busy_since_s > BEHIND_S and not self.is_patient:
            self.why = Off.BEHIND
        if self.why is Off.BEHIND:
            return self.is_patient
        return self.why is None or now_s >= self._retry_s

    def end_write(self, now_s: float) -> None:
        """The call has written, or has left out what it had."""
        self._ended_s = now_s

    def failed(self, why: Off, now_s: float) -> None:
        """Something could not be read or written."""
        self.why, self._retry_s = why, now_s + RETRY_S

    def worked(self, what_failed: tuple[Off, ...]) -> None:
        """Something was read or written, which with these would not work."""
        if self.why in what_failed:
            self.why = None
