"""The steps of a report and how much time each has.

A step may also use what earlier steps left of their time, so that all of them together end within
the sum. `soak`, `chaos` and `rank_agreement` are not among them: they run for as long as one likes.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from sgl_ext_cpu.node import FORKING

from bench.report.steps import Step


@dataclass(frozen=True)
class Planned:
    """A step by its name, its module and flags, and its time in both sizes, in seconds."""

    name: str
    quick_s: float
    full_s: float
    module: str = ""
    flags: tuple[str, ...] = ()
    has_engines: bool = False
    has_sizes: bool = True

    def step(self, *, is_full: bool) -> Step:
        """What runs."""
        flags = self.flags if is_full or not self.has_sizes else (*self.flags, "--quick")
        limit_s = self.full_s if is_full else self.quick_s or self.full_s
        return Step(self.name, self._module, flags, limit_s, FORKING if self.has_engines else {})

    def command(self, *, is_full: bool) -> str:
        """What a person runs to have the same figures."""
        step = self.step(is_full=is_full)
        return shlex.join(["python", "-m", step.module, *step.flags])

    @property
    def _module(self) -> str:
        return self.module or f"bench.{self.name}"


# Short ones first: what they leave goes to those whose time is harder to foresee. Without a time
# in quick form, a step is one of the full report only.
STEPS = (
    Planned("store", 10, 120),
    Planned("tool_loop", 20, 120),
    Planned("proxy_profile", 20, 120, "bench.proxy", ("--profile",)),
    Planned("templates", 50, 400),
    Planned("index", 100, 900),
    Planned("proxy", 110, 900),
    Planned("routing", 250, 5400),
    Planned("routing_kind", 140, 900, "bench.routing", ("--shape", "published_kind")),
    Planned("routing_unkind", 140, 900, "bench.routing", ("--shape", "published_unkind")),
    Planned("routing_harnesses", 230, 5400, "bench.routing", ("--harnesses",)),
    Planned("fanout", 80, 400, has_engines=True),
    Planned("header_strip", 140, 900, has_engines=True),
    Planned("tenant_probe", 0, 900, has_engines=True),
    Planned("misroute", 0, 600, has_engines=True),
    Planned("warm_turn", 230, 1200, has_engines=True),
    Planned("long_history", 160, 1200, has_engines=True),
    Planned("pin_flood", 260, 1500, has_engines=True),
    Planned("priority", 220, 1200, has_engines=True),
    Planned("speculative_prefill", 300, 1500, has_engines=True),
    Planned("judges", 220, 1800, has_engines=True),
)
QUICK_MINUTES = 45
"""What all steps in quick form take together at most."""
GPU = Planned("gpu", 1200, 1200, "bench.report.gpu", has_sizes=False)
"""`make gpu-report`, as a step. Its size is its own."""
NAMES = tuple(planned.name for planned in STEPS)


def chosen(names: Sequence[str] | None, *, is_full: bool, with_gpu: bool) -> tuple[Planned, ...]:
    """The steps of these names; None: all that the size has."""
    every = tuple(one for one in STEPS if is_full or one.quick_s)
    found = every if names is None else tuple(one for one in STEPS if one.name in names)
    return (*found, GPU) if with_gpu else found
