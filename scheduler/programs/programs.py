"""All agents of one engine: what each does, which one started which, and whether it comes back.

    lead     ==#==#        #==#...         # an answer that calls tools
               |  waits    ^
    sub-agent   ==#==#==.--|               . an answer that calls none

A sub-agent is known by its client's headers, or because its first request comes in the session of
an agent that runs tools. It has ended once its parent goes on with results after the sub-agent has
answered without a call: its answer is one of those results. Other ends: its client says so, it was
sent for one answer only, or its conversation was compacted into another one: the client says so, or
a session whose only agent talks goes on with what is left of its prompt. Without any of these the
chance that an agent returns falls with the time that it is away.

All ranks of an engine have the same programs: everything depends only on the calls and their order.
The tables are bounded: of too many agents, the tenant that has most loses the one that has been
silent for longest.
"""

from collections import Counter, OrderedDict
from collections.abc import Mapping
from math import inf
from types import MappingProxyType
from typing import NamedTuple

from scheduler.programs.agent import AWAY, Agent, Doing
from scheduler.programs.compaction import is_left_of
from scheduler.programs.gaps import LONGEST_S, MOST_NAME, MOST_TOOLS
from scheduler.programs.habits import Habits, tools_of

LIMIT = 4096
MOST_TENANTS = 256
MOST_IN_SESSION = 256
ABANDONED_S = 60.0
"""A request that takes longer may have lost its client, and then there is no answer."""
PARENT, COMPACTED = "parent", "compacted"
ENDED_BELOW = 0.05
"""With a lower chance to return, an agent counts as one that has ended."""


class Request(NamedTuple):
    """What a request says about its agent. The names are those of `Agent`.

    brings_results: its last messages are results of tools.
    stated_s: how long each tool ran, if the client says so.
    is_last: no request follows it. is_compacted: its conversation takes the place of another.
    head, tokens: of its prompt, if its session has one lead at a time; else the head is 0.
    """

    name: str
    owner: str = ""
    session: str = ""
    id: str = ""
    parent_id: str = ""
    is_subagent: bool = False
    brings_results: bool = False
    stated_s: Mapping[str, float] = MappingProxyType({})
    is_last: bool = False
    is_compacted: bool = False
    head: int = 0
    tokens: int = 0


class Outlook(NamedTuple):
    """What is expected of an agent.

    chance: that it sends another request. soon_s, late_s: if it does, it comes within these times
        from now, with one chance in two and nine in ten.
    has_ended: no request of it is expected.
    """

    chance: float
    soon_s: float
    late_s: float
    has_ended: bool


_ENDED = Outlook(0.0, inf, inf, True)
_HERE = Outlook(1.0, 0.0, 0.0, False)


class Change(NamedTuple):
    """What a request showed. after: what its agent did before; None if it is a new one.
    ended: the names of other agents that have ended, and what showed it: PARENT or COMPACTED.
    gone: what those did that never came back.
    is_shorter: its prompt is what is left of the agent's last one."""

    after: Doing | None
    ended: tuple[tuple[str, str], ...] = ()
    gone: tuple[Doing, ...] = ()
    is_shorter: bool = False


class _Tenant:
    """agents: by name, the one that is silent for longest first. sessions: their agents' names."""

    def __init__(self) -> None:
        self.habits = Habits()
        self.agents: OrderedDict[str, Agent] = OrderedDict()
        self.sessions: dict[str, dict[str, None]] = {}


class Programs:
    """The agents of one engine."""

    def __init__(self, limit: int = LIMIT) -> None:
        self.limit = limit
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()
        self._owners: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._owners)

    def request(self, seen: Request, now_s: float) -> Change:
        """An agent sent a request."""
        tenant = self._tenant(seen.owner)
        gone = self._forget_silent(tenant, now_s)
        agent = self._agent(seen.name)
        after = None if agent is None else agent.doing
        is_shorter = after in AWAY and agent is not None and _is_left_of(seen, agent)
        if agent is None:
            agent = self._begin(tenant, seen)
        elif agent.doing in AWAY:
            tenant.habits.note_return(
                agent, now_s, brings_results=seen.brings_results, stated_s=seen.stated_s
            )
        ended: dict[str, str] = {}
        if seen.brings_results:
            ended |= dict.fromkeys(self._answered_children(agent), PARENT)
        if after is None:
            ended |= dict.fromkeys(self._former(tenant, agent, seen), COMPACTED)
        for name in ended:
            self._end(name, now_s)
        agent.doing, agent.since_s, agent.is_last = Doing.COMPUTING, now_s, seen.is_last
        agent.head, agent.tokens = seen.head, seen.tokens
        tenant.agents.move_to_end(agent.name)
        return Change(after, tuple(ended.items()), gone, is_shorter)

    def computed(self, name: str, now_s: float) -> None:
        """The engine has computed an agent's answer."""
        agent = self._agent(name)
        if agent is None or agent.doing is not Doing.COMPUTING:
            return
        agent.doing, agent.since_s, agent.tools = Doing.OPEN, now_s, ()
        self._tenants[agent.owner].agents.move_to_end(name)
        if agent.is_last:
            self._end(name, now_s)

    def answered(self, name: str, tools: tuple[str, ...], at_s: float) -> None:
        """An answer, of which all was sent at this time, calls these tools. It is ignored if the
        agent has sent its next request since."""
        agent = self._agent(name)
        if agent is None or agent.doing is not Doing.OPEN or (agent.is_unseen and not tools):
            return
        agent.tools = tuple(tool[:MOST_NAME] for tool in tools[:MOST_TOOLS])
        agent.doing = Doing.CALLING if tools else Doing.TALKING
        agent.since_s = max(agent.since_s, at_s)

    def outlook(self, name: str, now_s: float) -> Outlook | None:
        """What is expected of an agent; None if it is not known."""
        agent = self._agent(name)
        if agent is None:
            return None
        if agent.doing is Doing.ENDED:
            return _ENDED
        doing, passed_s = agent.doing, max(now_s - agent.since_s, 0.0)
        if doing is Doing.COMPUTING:
            if passed_s < ABANDONED_S:
                return _HERE
            doing = Doing.OPEN
        habits = self._tenants[agent.owner].habits
        absence = habits.absence(name, tools_of(agent), passed_s)
        usual = habits.chance((doing, agent.is_subagent))
        stays = usual * absence.share
        chance = stays / (stays + 1 - usual)
        return Outlook(chance, absence.soon_s, absence.late_s, chance < ENDED_BELOW)

    def doing(self) -> Counter[Doing]:
        """How many agents do each thing."""
        agents = (one for tenant in self._tenants.values() for one in tenant.agents.values())
        return Counter(one.doing for one in agents)

    def agent(self, name: str) -> Agent | None:
        """An agent, to be read."""
        return self._agent(name)

    def _agent(self, name: str) -> Agent | None:
        owner = self._owners.get(name)
        return None if owner is None else self._tenants[owner].agents[name]

    def _tenant(self, owner: str) -> _Tenant:
        if owner not in self._tenants:
            self._tenants[owner] = _Tenant()
            if len(self._tenants) > MOST_TENANTS:
                oldest = next(iter(self._tenants))
                for name in [*self._tenants[oldest].agents]:
                    self._forget(name)
                del self._tenants[oldest]
        self._tenants.move_to_end(owner)
        return self._tenants[owner]

    def _begin(self, tenant: _Tenant, seen: Request) -> Agent:
        agent = Agent(seen.name, seen.owner, seen.session, seen.id, is_subagent=seen.is_subagent)
        parent = self._parent(tenant, seen)
        if parent is not None:
            agent.parent, agent.is_subagent = parent.name, True
            parent.children.add(agent.name)
        tenant.agents[agent.name] = agent
        self._owners[agent.name] = agent.owner
        if agent.session:
            members = tenant.sessions.setdefault(agent.session, {})
            members[agent.name] = None
            if len(members) > MOST_IN_SESSION:
                others = (name for name in members if name != agent.name)
                self._forget(min(others, key=lambda name: tenant.agents[name].since_s))
        if len(self) > self.limit:
            largest = max(self._tenants.values(), key=lambda one: len(one.agents))
            self._forget(next(iter(largest.agents)))
        return agent

    def _parent(self, tenant: _Tenant, seen: Request) -> Agent | None:
        """The agent that started a new one: the one that its client names, else the one of its
        session that was the last to call tools."""
        names = tenant.sessions.get(seen.session, {}) if seen.session else {}
        members = [tenant.agents[name] for name in names]
        if seen.id and (seen.parent_id or seen.is_subagent):
            named = [one for one in members if one.id == seen.parent_id]
            if seen.parent_id and not named:
                named = [one for one in members if not one.id]
            # Of several with this id, one that waits for its tools.
            members = [one for one in named if one.doing is Doing.CALLING] or named
        elif not seen.is_compacted:
            members = [one for one in members if one.doing is Doing.CALLING]
        else:
            return None
        return max(members, key=lambda one: one.since_s, default=None)

    def _answered_children(self, agent: Agent) -> list[str]:
        children = ((name, self._agent(name)) for name in sorted(agent.children))
        return [name for name, one in children if one is not None and one.doing is Doing.TALKING]

    def _former(self, tenant: _Tenant, agent: Agent, seen: Request) -> list[str]:
        """The conversations whose place a new one takes."""
        members = tenant.sessions.get(agent.session, {})
        others = [tenant.agents[name] for name in members if name != agent.name]
        kind = agent.id, agent.is_subagent
        same = [one for one in others if (one.id, one.is_subagent) == kind and one.doing in AWAY]
        if not seen.is_compacted:
            is_sure = len(same) == 1 and same[0].doing is Doing.TALKING
            same = [one for one in same if is_sure and _is_left_of(seen, one)]
        return [one.name for one in same]

    def _end(self, name: str, now_s: float) -> None:
        agent = self._agent(name)
        assert agent is not None, "only agents that are known end"
        agent.doing, agent.since_s = Doing.ENDED, now_s
        self._leave_parent(agent)

    def _forget_silent(self, tenant: _Tenant, now_s: float) -> tuple[Doing, ...]:
        """Forgets the agents that have been silent for so long that they will not come back; what
        they did."""
        gone: list[Doing] = []
        while tenant.agents:
            agent = next(iter(tenant.agents.values()))
            if now_s - agent.since_s < LONGEST_S:
                break
            if agent.doing in AWAY:
                tenant.habits.note((agent.doing, agent.is_subagent), is_back=False)
                gone.append(agent.doing)
            self._forget(agent.name)
        return tuple(gone)

    def _forget(self, name: str) -> None:
        tenant = self._tenants[self._owners.pop(name)]
        agent = tenant.agents.pop(name)
        self._leave_parent(agent)
        if agent.session:
            members = tenant.sessions[agent.session]
            del members[name]
            if not members:
                del tenant.sessions[agent.session]

    def _leave_parent(self, agent: Agent) -> None:
        if (parent := self._agent(agent.parent)) is not None:
            parent.children.discard(agent.name)

    def check(self) -> None:
        """Asserts the invariants."""
        assert len(self) <= self.limit
        assert len(self._tenants) <= MOST_TENANTS
        assert len(self) == sum(len(tenant.agents) for tenant in self._tenants.values())
        for owner, tenant in self._tenants.items():
            listed = [name for members in tenant.sessions.values() for name in members]
            assert sorted(listed) == sorted(n for n, one in tenant.agents.items() if one.session)
            assert all(0 < len(members) <= MOST_IN_SESSION for members in tenant.sessions.values())
            for name, agent in tenant.agents.items():
                assert (agent.name, agent.owner, self._owners[name]) == (name, owner, owner)
                for child in agent.children:
                    one = self._agent(child)
                    assert one is not None
                    assert one.parent == name
                    assert one.doing is not Doing.ENDED


def _is_left_of(seen: Request, agent: Agent) -> bool:
    return is_left_of(seen.head, seen.tokens, agent.head, agent.tokens)
