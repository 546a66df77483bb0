"""Prefill and decode engines: of each request one computes the prompt, and another answers.

A request is placed on a prefill engine as on any other: by what it holds and by its load. The
decode engine gets all KV from there, so only its load counts. SGLang's engines hand the KV over.
"""

import secrets
from collections.abc import Collection, Iterable

from sgl_ext.balancer.routing.worker import DECODE, PREFILL, Worker
from sgl_ext.requests.session import BOOTSTRAP_HEADER

_LINE = b"%b: %%b\r\n" % BOOTSTRAP_HEADER.encode()
_ROOMS = 10**17


def can_answer(workers: Iterable[Worker]) -> bool:
    """Whether these workers can answer requests: one that does all, or one of each role."""
    roles = {worker.role for worker in workers}
    return "" in roles or {PREFILL, DECODE} <= roles


def least_loaded(able: Collection[Worker], tried: Collection[Worker]) -> Worker | None:
    """The decode engine with the least load; one that was not tried if there is one."""
    able = [worker for worker in able if worker not in tried] or able
    return min(able, key=lambda w: (w.in_flight + w.peer_load.in_flight, w.id), default=None)


def hand_over_line(prefill: Worker) -> bytes:
    """The header line by which two engines find each other for a request."""
    return _LINE % f"{prefill.bootstrap} {secrets.randbelow(_ROOMS)}".encode()
