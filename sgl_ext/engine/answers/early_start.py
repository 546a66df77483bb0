"""Sends a request of `/v1/responses` to the scheduler before its first events are written.

SGLang writes `response.created` and `response.in_progress` with all tools of the request, and
makes the parsers of its answer. Only then does it ask for the first result, which sends the
request. Here the scheduler works meanwhile.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

Write = Callable[..., AsyncIterator[str]]


async def started(
    write: Write, request: Any, params: Any, results: Any, *args: Any, **kw: Any
) -> AsyncIterator[str]:
    """The events that `write` makes of `results`. The first result is requested at once.

    If the events are not read to their end, the first result is no longer waited for.
    """
    first = asyncio.ensure_future(anext(results))
    first.add_done_callback(_retrieve)
    try:
        await asyncio.sleep(0)  # until the request waits for the scheduler
        async for event in write(request, params, _all_of(first, results), *args, **kw):
            yield event
    finally:
        first.cancel()


async def _all_of(first: "asyncio.Future[Any]", results: Any) -> AsyncIterator[Any]:
    try:
        result = await first
    except StopAsyncIteration:
        return
    yield result
    async for result in results:
        yield result


def _retrieve(first: "asyncio.Future[Any]") -> None:
    """An error is raised where the first result is read, and logged nowhere else."""
    if not first.cancelled():
        first.exception()
