"""How often, and after what time, the agents of one tenant come back."""

from typing import NamedTuple

from scheduler.programs.gaps import LEAST_GAPS, LONGEST_S

_LATEST = 32  # gaps, of each agent and of each tenant
_MOST_COUNTED = 128.0
# Gaps that are expected while few were seen.
_USUAL_GAPS = (0.3, 2.0, 10.0, 60.0)


class Absence(NamedTuple):
    """Half of an agent's gaps end within `soon_s`, and nine in ten within `late_s`."""

    soon_s: float
    late_s: float


class Habits:
    """Of one tenant, so that nothing that a client states changes what is expected of others."""

    def __init__(self) -> None:
        self._gaps: tuple[float, ...] = ()
        self._back = self._gone = 0.0

    def absence(self, own: tuple[float, ...]) -> Absence:
        """What is expected of a gap that begins. own: the agent's latest gaps. If those are few,
        the tenant's count in their place."""
        known = own if len(own) >= LEAST_GAPS else self._gaps
        gaps = sorted(known if len(known) >= LEAST_GAPS else (*known, *_USUAL_GAPS))
        return Absence(gaps[len(gaps) // 2], gaps[len(gaps) * 9 // 10])

    def note_gap(self, own: tuple[float, ...], gap_s: float) -> tuple[float, ...]:
        """Notes how long an agent was away. own: as above; returns them with this one."""
        gap_s = min(max(gap_s, 0.0), LONGEST_S)
        self._gaps = (*self._gaps, gap_s)[-_LATEST:]
        return (*own, gap_s)[-_LATEST:]

    def note(self, *, is_back: bool) -> None:
        """Counts an agent that came back after its first answer, or did not. Older ones count less
        and less."""
        self._back, self._gone = self._back + is_back, self._gone + (not is_back)
        if self._back + self._gone > _MOST_COUNTED:
            self._back, self._gone = self._back / 2, self._gone / 2

    @property
    def share_back(self) -> float:
        """The share that comes back; 0 before any did."""
        return self._back / (self._back + self._gone + 1.0)
