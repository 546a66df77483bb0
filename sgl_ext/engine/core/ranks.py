"""Which rank speaks for an engine."""

from __future__ import annotations


def is_entry_rank() -> bool:
    """Whether this scheduler tells for its engine: the first rank, of an engine that has one tree.

    Replicas and data-parallel attention have a tree each behind one address.
    """
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    return bool(parallel.num_dp_ranks == 1 and parallel.tp_rank == 0 and parallel.pp_rank == 0)
