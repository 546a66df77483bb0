"""What is compared on one engine: SGLang as it is, its options for agents, and ours.

    stock           recency alone
    hicache         with copies of everything in host memory, twice the device's
    session_radix   what a session alone has used is forgotten at its end
    fixed_ttl       ours, where nothing is held back: what pins and order do alone
    ours            with the marks that Claude Code sets, and default settings
    ours_1h         with marks of an hour
    ours_hicache    ours with host memory

Ours is the balancer's own router, its admission queue and its engine's order of requests; the
others take each request as it comes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from bench.recorded.replay import Replay
from bench.sim.engine import Engine, EngineConfig
from bench.sim.our_router import AdmittingRouter
from bench.sim.policies import RoundRobin
from bench.sim.virtual_time import Policy
from bench.trace.calls import Call
from sgl_ext.settings.schema import BalancerSettings, EngineSettings

HOST_OVER_DEVICE = 2
HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class Arm:
    """is_ours: whether our balancer stands in front. closes: sessions are closed at their ends."""

    pin_ttl_s: float = 0.0
    has_host: bool = False
    is_ours: bool = False
    closes: bool = False
    hold_s: float = BalancerSettings().agent_hold_s

    def engine(self, stock: EngineConfig) -> EngineConfig:
        """Its engine, where SGLang's is like this."""
        return replace(
            stock,
            pin_ttl_s=self.pin_ttl_s,
            host_tokens=HOST_OVER_DEVICE * stock.capacity_tokens if self.has_host else 0,
            aging_s=EngineSettings().aging_s if self.is_ours else 0.0,
        )

    def policy(self, engines: Sequence[Engine], replayed: Replay) -> Policy:
        if self.is_ours:
            return AdmittingRouter(len(engines), hold_s=self.hold_s)
        return Closing(engines, replayed) if self.closes else RoundRobin()


_TTL_S = EngineSettings().pin_ttl_s
ARMS = {
    "stock": Arm(),
    "hicache": Arm(has_host=True),
    "session_radix": Arm(closes=True),
    "fixed_ttl": Arm(pin_ttl_s=_TTL_S, is_ours=True, hold_s=0.0),
    "ours": Arm(pin_ttl_s=_TTL_S, is_ours=True),
    "ours_1h": Arm(pin_ttl_s=HOUR_S, is_ours=True),
    "ours_hicache": Arm(pin_ttl_s=_TTL_S, has_host=True, is_ours=True),
}


class Closing(RoundRobin):
    """Closes each session at its end, as with `--enable-session-radix-cache`."""

    def __init__(self, engines: Sequence[Engine], replayed: Replay) -> None:
        super().__init__()
        self._engines = engines
        self._agents = replayed.agents

    def end(self, call: Call, worker: int, now: float) -> None:
        super().end(call, worker, now)
        if call.turn + 1 == len(self._agents[call.agent].turns):
            self._engines[worker].close(call.keys)
