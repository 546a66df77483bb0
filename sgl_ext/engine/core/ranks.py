"""The entry rank, which counts and publishes for its engine."""

from __future__ import annotations

from sgl_ext.engine import sglang_api


def is_entry_rank() -> bool:
    """Whether this is the first rank of an engine that has one tree.

    With replicas or data-parallel attention, one address stands for several trees: no rank of such
    an engine publishes.
    """
    parallel = sglang_api.get_parallel()
    return bool(parallel.num_dp_ranks == 1 and parallel.tp_rank == 0 and parallel.pp_rank == 0)
