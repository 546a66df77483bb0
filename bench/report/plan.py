"""The steps of a report and about how long each takes on two cores.

Other machines are slower: a step is ended as one that hangs only after `HANG` times as long.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from sgl_ext_cpu.node import FORKING

from bench.judges import aiperf, guidellm
from bench.lib.other_routers import ROUTERS, install, install_nginx
from bench.report.steps import Step

HANG = 3


@dataclass(frozen=True)
class Planned:
    """A step by its name, its module and flags, and about its time in both sizes, in seconds.

    needs: of `INSTALLERS`, what it compares with.
    """

    name: str
    quick_s: float
    full_s: float
    module: str = ""
    flags: tuple[str, ...] = ()
    has_engines: bool = False
    has_sizes: bool = True
    needs: tuple[str, ...] = ()

    def step(self, *, is_full: bool) -> Step:
        """What runs."""
        flags = self.flags if is_full or not self.has_sizes else (*self.flags, "--quick")
        limit_s = HANG * self.about_s(is_full=is_full)
        return Step(self.name, self._module, flags, limit_s, FORKING if self.has_engines else {})

    def about_s(self, *, is_full: bool) -> float:
        """How long it takes, about."""
        return self.full_s if is_full else self.quick_s or self.full_s

    def command(self, *, is_full: bool) -> str:
        """What a person runs to have the same figures."""
        step = self.step(is_full=is_full)
        return shlex.join(["python", "-m", step.module, *step.flags])

    @property
    def _module(self) -> str:
        return self.module or f"bench.{self.name}"


INSTALLERS: Mapping[str, Callable[[], object]] = {
    "nginx": install_nginx,
    **{name: partial(install, name) for name in ROUTERS},
    "aiperf": aiperf.install,
    "guidellm": guidellm.install,
}
"""What steps compare with, and how it is installed."""
_PEERS = ("nginx", *ROUTERS)

# Without a time in quick form, a step is one of the full report, and of `--only`.
STEPS = (
    Planned("tool_loop", 10, 120),
    Planned("proxy_profile", 15, 120, "bench.proxy", ("--profile",)),
    Planned("index", 120, 900),
    Planned("proxy", 125, 900, needs=_PEERS),
    Planned("routing", 300, 4800, needs=ROUTERS),
    Planned("recorded", 240, 7200, has_engines=True),
    Planned("fanout", 65, 400, has_engines=True),
    Planned("header_strip", 145, 900, has_engines=True),
    Planned("warm_turn", 225, 1200, has_engines=True),
    Planned("pin_flood", 300, 1500, has_engines=True),
    Planned("priority", 290, 1200, has_engines=True),
    Planned("speculative_prefill", 275, 1500, has_engines=True),
    Planned("compaction", 150, 600, has_engines=True),
    Planned("restarts", 300, 2400, has_engines=True),
    Planned("decode", 0, 900, has_engines=True),
    Planned("restarts_day", 0, 1200, "bench.restarts", ("--day",), has_engines=True),
    Planned("judges", 0, 1800, has_engines=True, needs=(*_PEERS, "aiperf", "guidellm")),
)
QUICK_MINUTES = 45
"""What all steps in quick form take together at most, without what is installed for them first."""
GPU = Planned("gpu", 1200, 1200, "bench.report.gpu", has_sizes=False)
"""`make gpu-report`, as a step. Its size is its own."""
NAMES = tuple(planned.name for planned in STEPS)


def chosen(names: Sequence[str] | None, *, is_full: bool, with_gpu: bool) -> tuple[Planned, ...]:
    """The steps of these names; None: all that the size has."""
    every = tuple(one for one in STEPS if is_full or one.quick_s)
    found = every if names is None else tuple(one for one in STEPS if one.name in names)
    return (*found, GPU) if with_gpu else found
