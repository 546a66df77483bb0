"""How often, and after what time, the agents of one tenant come back."""

from typing import NamedTuple

from scheduler.programs.gaps import LEAST_GAPS, Gaps

_MOST_COUNTED = 128.0
# Gaps that are expected while few were seen.
_USUAL_GAPS = (0.3, 2.0, 10.0, 60.0)
_ANY = "?"  # in place of a tool: whatever an agent does meanwhile


class Absence(NamedTuple):
    """Half of an agent's gaps end within `soon_s`, and nine in ten within `late_s`."""

    soon_s: float
    late_s: float


class Habits:
    """Of one tenant, so that nothing that a client states changes what is expected of others."""

    def __init__(self) -> None:
        self._gaps = Gaps()
        self._back = self._gone = 0.0

    def absence(self, agent: str) -> Absence:
        """What is expected of a gap of this agent that begins."""
        known = self._gaps.of(agent, _ANY)
        gaps = sorted(known if len(known) >= LEAST_GAPS else (*known, *_USUAL_GAPS))
        return Absence(gaps[len(gaps) // 2], gaps[len(gaps) * 9 // 10])

    def note_gap(self, agent: str, gap_s: float) -> None:
        """Notes how long an agent was away."""
        self._gaps.note(agent, (_ANY,), gap_s, {})

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
