"""How long agents are away between an answer and their next request, by what they do meanwhile.

    answer                              next request
      |------------------ gap ----------------->|
      |            ^ round 1          ^ round 2        when to load what was evicted: `rounds`

Each tool has its latest gaps: of this agent if there are some, else of all agents of the tenant. A
tool may run for a second or for an hour, so nothing is assumed of the shape of gaps: what is
expected is read from the gaps themselves.

A client's own figures, how long each tool ran, tell tools apart that ran side by side. The gap
also contains what the client does itself, so the tool that took longest counts as all of it.
"""

from collections.abc import Collection, Iterable, Mapping

from cachetools import FIFOCache

LONGEST_S = 900.0
"""Longer gaps count as this: an agent that stays away for longer is not expected any more."""
LEAST_GAPS = 4
"""Of fewer gaps little can be read."""
MOST_TOOLS, MOST_NAME = 32, 128
_USUAL_S = 10.0  # what a tool without gaps counts as, beside others

LATE_SHARE = 1 / 8
FACTOR = 3.0
MOST_ROUNDS = 3
LEAST_S = 1.0
"""Shorter gaps have no round: nothing is evicted so soon."""


def rounds(gaps: Iterable[float]) -> tuple[float, ...]:
    """The times after an answer at which an agent with such gaps is expected, ascending.

    At each of them one gap in eight has ended: of all gaps, and after that of those that are at
    least FACTOR times as long as the round before. Many tools are short most times and long at
    others.
    """
    found: list[float] = []
    left = sorted(gap for gap in gaps if LEAST_S <= gap < LONGEST_S)
    while left and len(found) < MOST_ROUNDS:
        found.append(left[max(int((len(left) + 1) * LATE_SHARE) - 1, 0)])
        left = [gap for gap in left if gap >= FACTOR * found[-1]]
    return tuple(found)


class Gaps:
    """The latest gaps of one tenant's agents, so that nothing that a client states changes what is
    expected of another tenant. The entry that was noted longest ago is forgotten.

    limit: of entries, two for each tool of an agent. latest: how many gaps an entry has.
    """

    def __init__(self, limit: int = 1024, latest: int = 32) -> None:
        self._latest = latest
        self._entries: FIFOCache[tuple[str, str], tuple[float, ...]] = FIFOCache(limit)

    def __len__(self) -> int:
        return len(self._entries)

    def of(self, agent: str, tool: str) -> tuple[float, ...]:
        """The gaps of this agent's tool, or if those are fewer than LEAST_GAPS, of all agents'."""
        tool = tool[:MOST_NAME]
        own = self._entries.get((agent, tool), ())
        return own if len(own) >= LEAST_GAPS else self._entries.get(("", tool), ())

    def note(
        self, agent: str, tools: Collection[str], gap_s: float, stated_s: Mapping[str, float]
    ) -> None:
        """Notes how long an agent was away.

        tools: those that its answer called. stated_s: how long each ran, as far as the client says.
        The longest of them took all of the gap, and no other one more than that.
        """
        gap_s = min(max(gap_s, 0.0), LONGEST_S)
        tools = list(tools)[:MOST_TOOLS]
        took_s = {tool: min(max(stated_s[tool], 0.0), gap_s) for tool in tools if tool in stated_s}

        def length(tool: str) -> tuple[float, float]:
            known = sorted(self.of(agent, tool))
            return took_s.get(tool, -1.0), known[len(known) // 2] if known else _USUAL_S

        if tools:
            took_s[max(tools, key=length)] = gap_s
        for tool, each_s in took_s.items():
            for key in ((agent, tool[:MOST_NAME]), ("", tool[:MOST_NAME])):
                latest = (*self._entries.pop(key, ()), each_s)[-self._latest :]
                self._entries[key] = latest
