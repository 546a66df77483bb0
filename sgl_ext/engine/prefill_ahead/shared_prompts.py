"""The prompts that all cache groups share, read when an engine starts.

Each line of the operator's file is converted the way of a real request, as far as it is certain,
before the first request is taken: so what is shared does not change while the engine serves.
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import orjson
from starlette.responses import Response

from sgl_ext.engine.core.dry_run import convert
from sgl_ext.engine.core.shared_prefixes import prefixes
from sgl_ext.engine.prefill_ahead.prefiller import Job
from sgl_ext.engine.prefill_ahead.routes import job_of
from sgl_ext.protocols.registry import detect
from sgl_ext.requests.next_turn import Turn, partial_turn


async def list_prefixes(app: Any, manager: Any, path: str | None) -> list[Job]:
    """Has the prompts of a file be shared, and returns them to be prefilled; None names none.

    Raises ValueError naming the line that cannot be.
    """
    jobs: list[Job] = []
    for number, line in enumerate(_lines(path), start=1):
        try:
            job = await _job(app, manager, orjson.loads(line))
        except ValueError as error:
            raise ValueError(f"shared_prefixes={path!r}: line {number}: {error}") from error
        prefixes().add(job.ids, job.asked.lora_path)
        jobs.append(job)
    return jobs


def _lines(path: str | None) -> list[bytes]:
    return Path(path).read_bytes().splitlines() if path else []


async def _job(app: Any, manager: Any, body: Any) -> Job:
    protocol = detect({}, None, body)
    if protocol is None:
        raise ValueError("is a request of no known protocol")
    turn = partial_turn(protocol, body, secrets.token_hex(8)) or Turn(body, ())
    conversion = await convert(app, protocol.path, (), turn.body)
    job = job_of(manager, conversion, turn)
    if isinstance(job, Response):
        raise ValueError(f"was refused: {bytes(job.body).decode()}")
    if job.asked.cache_salt or job.asked.extra_key:
        raise ValueError("has a cache_salt or an extra_key, which nobody shares")
    if job.asked.contains_mm_input():
        raise ValueError("is of more than text")
    return job
