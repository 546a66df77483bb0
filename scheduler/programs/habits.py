"""How often, and after what time, the agents of one tenant come back."""

from collections import defaultdict
from collections.abc import Collection, Mapping

from scheduler.programs.agent import Agent, Doing
from scheduler.programs.gaps import LEAST_GAPS, Absence, Gaps, rest

PERSON, OPEN = "", "?"
"""No tools: a PERSON writes the next request, and of an OPEN gap it is not known what it was spent
with."""
_MOST_COUNTED = 128.0
# Gaps that are expected while few were seen.
_TOOL_GAPS, _PERSON_GAPS = (0.3, 2.0, 10.0, 60.0), (5.0, 30.0, 120.0, 600.0)
# Before anything was seen: agents that came back, and others.
_BEGIN = {
    (Doing.CALLING, False): (19.0, 1.0),
    (Doing.CALLING, True): (19.0, 1.0),
    (Doing.OPEN, False): (6.0, 1.0),
    (Doing.OPEN, True): (4.0, 1.0),
    (Doing.TALKING, False): (2.0, 1.0),
    (Doing.TALKING, True): (1.0, 9.0),
}

Kind = tuple[Doing, bool]
"""What an agent does, and whether it is a sub-agent."""


class Returned:
    """How many came back, and how many did not. Older ones count less and less."""

    def __init__(self) -> None:
        self._back = self._gone = 0.0

    def note(self, *, is_back: bool) -> None:
        """Counts one more."""
        self._back, self._gone = self._back + is_back, self._gone + (not is_back)
        if self._back + self._gone > _MOST_COUNTED:
            self._back, self._gone = self._back / 2, self._gone / 2

    def share(self, back: float, gone: float) -> float:
        """The share that comes back. back, gone: what is assumed before any is counted."""
        return (self._back + back) / (self._back + back + self._gone + gone)


class Habits:
    """Of one tenant, so that nothing that a client states changes what is expected of others."""

    def __init__(self) -> None:
        self.gaps = Gaps()
        self._returned: defaultdict[Kind, Returned] = defaultdict(Returned)

    def absence(self, agent: str, tools: Collection[str], passed_s: float) -> Absence:
        """What is expected of an agent that does this, and waits for the longest of it."""
        found = (rest(self._known(agent, tool), passed_s) for tool in tools or (OPEN,))
        return max(found, key=lambda one: (one.soon_s, one.late_s))

    def note(self, kind: Kind, *, is_back: bool) -> None:
        """Notes whether an agent came back."""
        self._returned[kind].note(is_back=is_back)

    def chance(self, kind: Kind) -> float:
        """The share of agents of this kind that come back."""
        return self._returned[kind].share(*_BEGIN[kind])

    def note_return(
        self, agent: Agent, now_s: float, *, brings_results: bool, stated_s: Mapping[str, float]
    ) -> None:
        """An agent that was away has sent a request. stated_s: how long each tool ran, if its
        client says so."""
        self.note((agent.doing, agent.is_subagent), is_back=True)
        agent.is_unseen |= agent.doing is Doing.TALKING and brings_results
        gap_s = now_s - agent.since_s
        if agent.doing is Doing.OPEN or agent.is_unseen:
            self.gaps.note(agent.name, (OPEN,), gap_s, {})
        if brings_results and agent.doing is Doing.CALLING:
            self.gaps.note(agent.name, agent.tools, gap_s, stated_s)
        elif not brings_results:
            self.gaps.note(agent.name, (PERSON,), gap_s, {})

    def _known(self, agent: str, tool: str) -> tuple[float, ...]:
        known = self.gaps.of(agent, tool)
        made_up = _PERSON_GAPS if tool == PERSON else _TOOL_GAPS
        return known if len(known) >= LEAST_GAPS else (*known, *made_up)


def tools_of(agent: Agent) -> tuple[str, ...]:
    """What an agent that is away waits for."""
    if agent.doing is Doing.CALLING:
        return agent.tools
    return (PERSON,) if agent.doing is Doing.TALKING else (OPEN,)
