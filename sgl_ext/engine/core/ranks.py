"""Which rank speaks for an engine."""

from __future__ import annotations

from sgl_ext.engine import sglang_api


def is_entry_rank() -> bool:
    """Whether this scheduler tells for its engine: the first rank, of an engine that has one tree.

    Replicas and data-parallel attention have a tree each behind one address.
    """
    parallel = sglang_api.get_parallel()
    return bool(parallel.num_dp_ranks == 1 and parallel.tp_rank == 0 and parallel.pp_rank == 0)
