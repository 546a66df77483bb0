"""Reads the prompts that all cache groups share, when an engine starts.

Each line of the operator's file is a request, which is converted like a real one as far as its
prompt is certain. That happens before the server takes requests, so the shared prompts do not
change while it serves.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
from starlette.responses import Response

from sgl_ext.engine.core.shared_prefixes import prefixes
from sgl_ext.engine.prefill_ahead.prefiller import Job
from sgl_ext.engine.prefill_ahead.routes import read_job
from sgl_ext.engine.sglang_http_types import TokenizerManager
from sgl_ext.protocols.registry import detect


async def share_prompts(app: Any, manager: TokenizerManager, path: str | None) -> list[Job]:
    """Shares the prompts of a file, and returns the jobs that prefill them.

    Raises ValueError naming the line that cannot be shared.
    """
    jobs: list[Job] = []
    for number, line in enumerate(_lines(path), start=1):
        try:
            job = await _job(app, manager, orjson.loads(line))
        except ValueError as error:
            raise ValueError(f"shared_prefixes={path!r}: line {number}: {error}") from error
        prefixes().add(job.ids, job.request.lora_path)
        jobs.append(job)
    return jobs


def _lines(path: str | None) -> list[bytes]:
    return Path(path).read_bytes().splitlines() if path else []


async def _job(app: Any, manager: TokenizerManager, body: Any) -> Job:
    protocol = detect({}, None, body)
    if protocol is None:
        raise ValueError("is a request of no known protocol")
    job = await read_job(app, manager, protocol, (), body)
    if isinstance(job, Response):
        raise ValueError(f"was rejected: {bytes(job.body).decode()}")
    if job.request.cache_salt or job.request.extra_key:
        raise ValueError("has a cache_salt or an extra_key, which cannot be shared")
    if job.request.contains_mm_input():
        raise ValueError("is of more than text")
    return job
