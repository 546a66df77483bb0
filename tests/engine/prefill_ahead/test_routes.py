"""The answer of `/v1/prefill` while only a part of its prompt is in the cache."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request

from sgl_ext.engine.core.request_context import DryRun, RequestContext
from sgl_ext.engine.prefill_ahead import service
from sgl_ext.engine.prefill_ahead.prefiller import Job
from sgl_ext.engine.prefill_ahead.service import MOST_WAITING, PrefillRequests
from sgl_ext.reading.segments import Chain

BODY = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}


class Halfway:
    """Prefills a part of each job, and never completes it."""

    is_supported = True

    async def idle(self) -> None:
        """It always is."""

    def put(self, job: Job) -> None:
        job.cached_tokens, job.reached_tokens = 100, 600
        job.loaded_tokens, job.prefilled_tokens = 200, 300


def posted(body: Any, tenant: str = "", query: bytes = b"protocol=chat") -> Request:
    data = json.dumps(body).encode()

    async def receive() -> dict[str, Any]:
        nonlocal data
        sent, data = data, b""
        if sent:
            return {"type": "http.request", "body": sent, "more_body": False}
        return await forever()

    scope = {"type": "http", "method": "POST", "path": "/v1/prefill", "query_string": query}
    return Request(scope | {"headers": [(b"x-tenant-id", tenant.encode())]}, receive)


async def forever() -> dict[str, Any]:
    await asyncio.Event().wait()
    raise AssertionError


async def test_a_call_that_waited_long_is_answered_with_what_was_reached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def convert(*_: Any) -> DryRun:
        dry_run = DryRun()
        dry_run.request = SimpleNamespace(input_ids=list(range(1000)))
        chain = Chain(hashes=(1, 2), ends=(10, 20))
        dry_run.context = RequestContext(chain=chain)
        return dry_run

    monkeypatch.setattr(service, "convert", convert)
    monkeypatch.setattr(service, "WAIT_S", 0.5)
    tokenizer = SimpleNamespace(decode=lambda ids: "")
    manager = SimpleNamespace(max_req_input_len=2000, tokenizer=tokenizer)
    requests = PrefillRequests(None, manager, Halfway())  # type: ignore[arg-type]
    answer = await requests.post(posted(BODY))
    assert answer.status_code == 200
    assert json.loads(bytes(answer.body)) == {
        "prompt_tokens": 1000,
        "cached_tokens": 100,
        "loaded_tokens": 200,
        "prefilled_tokens": 300,
        "segments": 2,
        "complete": False,
        "why": "busy",
    }


async def test_however_many_prompts_a_tenant_sends_another_finds_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def convert(*_: Any) -> DryRun:
        return await forever()  # type: ignore[return-value]

    monkeypatch.setattr(service, "convert", convert)
    requests = PrefillRequests(None, SimpleNamespace(), Halfway())  # type: ignore[arg-type]

    async def admitted(tenant: str) -> int:
        query = b"protocol=chat&wait=false"
        calls = [posted(BODY, tenant, query) for _ in range(2 * MOST_WAITING)]
        return [(await requests.post(call)).status_code for call in calls].count(202)

    assert [await admitted(tenant) for tenant in "abcab"] == [32, 16, 8, 0, 0]


async def test_where_no_slice_runs_no_prompt_is_converted(monkeypatch: pytest.MonkeyPatch) -> None:
    async def convert(*_: Any) -> DryRun:
        raise AssertionError("the prompt is converted in vain")

    monkeypatch.setattr(service, "convert", convert)
    refusing = SimpleNamespace(is_supported=False)
    requests = PrefillRequests(None, SimpleNamespace(), refusing)  # type: ignore[arg-type]
    answer = json.loads(bytes((await requests.post(posted(BODY))).body))
    assert (answer["complete"], answer["why"]) == (False, "unsupported")
