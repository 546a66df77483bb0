"""The routes of an engine with several data-parallel ranks, without its schedulers."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from sgl_ext.engine.core.request_context import RequestContext, enter
from sgl_ext.engine.http.extension import HttpExtension
from sgl_ext.engine.http.request_hook import send_hints
from sgl_ext.engine.http.routes import event_routes, pin_routes
from sgl_ext.pin_mirror import PinMirror
from sgl_ext.settings.schema import EngineSettings
from sgl_ext.wire.events import EVENTS_PATH, SUBSCRIBERS_PATH

PREFIX = "ab" * 16


class Rank:
    """One rank's pins, and its scheduler, which deletes at once."""

    def __init__(self, *prefixes: str) -> None:
        self.pins = PinMirror()
        row = {"segment": None, "tokens": 5, "left_s": 9.0, "owner": "", "session": "s"}
        self.pins.apply({"pinned": [row | {"prefix": prefix} for prefix in prefixes]}, 0.0)

    def unpin(self, prefixes: list[str]) -> None:
        self.pins.apply({"unpinned": prefixes}, 0.0)


def client_of(*ranks: Rank) -> TestClient:
    outboxes: Any = ranks
    return TestClient(Starlette(routes=pin_routes([each.pins for each in ranks], outboxes)))


def test_a_pin_tells_its_rank() -> None:
    client = client_of(Rank(), Rank(PREFIX))
    (pin,) = client.get("/v1/pins").json()["pins"]
    assert (pin["prefix"], pin["rank"]) == (PREFIX, 1)


def test_pins_are_deleted_at_all_ranks_or_at_one() -> None:
    ranks = Rank(PREFIX), Rank(PREFIX)
    client = client_of(*ranks)
    at_one = client.delete("/v1/pins", params={"prefix": PREFIX}, headers={"x-sgl-ext-rank": "1"})
    assert at_one.json() == {"deleted": 1}
    assert (len(ranks[0].pins), len(ranks[1].pins)) == (1, 0)
    assert client.delete("/v1/pins", params={"session": "s"}).json() == {"deleted": 1}
    assert not len(ranks[0].pins)


async def first_line(app: Starlette, query: bytes) -> tuple[int, dict[str, Any]]:
    """The status and the first line of the stream with this query."""
    got: asyncio.Queue[Any] = asyncio.Queue()
    scope = {
        "type": "http",
        "method": "GET",
        "path": EVENTS_PATH,
        "query_string": query,
        "headers": [],
    }
    task = asyncio.create_task(app(scope, asyncio.Event().wait, got.put))  # type: ignore[arg-type]
    start, body = await got.get(), await got.get()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return start["status"], orjson.loads(body["body"])


async def test_each_rank_has_a_stream_of_its_own() -> None:
    extension = HttpExtension(EngineSettings(), ranks=2)
    extension.broadcasters[1].apply(b'{"publishes": ["prefixes"], "load": {"running": 7}}')
    app = Starlette(routes=event_routes(extension.broadcasters, lambda: extension.subscriber_count))
    assert (await first_line(app, b""))[1]["publishes"] == []
    status, line = await first_line(app, b"rank=1")
    assert (status, line["publishes"], line["load"]) == (200, ["prefixes"], {"running": 7})
    status, line = await first_line(app, b"rank=2")
    assert status == 404
    assert "ranks 0 to 1" in line["error"]["message"]
    assert TestClient(app).get(SUBSCRIBERS_PATH).json() == {"subscribers": 0}


@pytest.mark.parametrize(
    ("ranks", "stated", "rank"),
    [(2, "1", 1), (2, "0", 0), (2, "2", None), (2, None, None), (2, "-1", None), (1, "0", None)],
)
def test_a_request_goes_to_the_rank_that_the_balancer_states(
    ranks: int, stated: str | None, rank: int | None
) -> None:
    assert HttpExtension(EngineSettings(), ranks).rank_of(stated) == rank


async def test_it_overrides_the_rank_that_the_client_states() -> None:
    request = SimpleNamespace(routed_dp_rank=0, kv_hints=None, session_params=None)
    enter(RequestContext("/generate", rank=1))
    send_hints(None, request)
    assert request.routed_dp_rank == 1


@pytest.mark.parametrize("sampling", [{"n": 2}, [{"n": 2}, {"n": 2}]])
async def test_several_samples_are_not_handed_over(sampling: Any) -> None:
    fields = {"kv_hints": None, "session_params": None, "bootstrap_room": None}
    request = SimpleNamespace(sampling_params=sampling, **fields)
    enter(RequestContext("/generate", bootstrap=("127.0.0.1", 8998, 7)))
    with pytest.raises(ValueError, match="n: must be 1"):
        send_hints(None, request)
    request.sampling_params = {"max_new_tokens": 4}
    send_hints(None, request)
    assert (request.bootstrap_host, request.bootstrap_port) == ("127.0.0.1", 8998)
    assert request.bootstrap_room == 7
