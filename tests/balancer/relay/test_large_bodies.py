"""Large bodies are read in another process, with the same result, and its end loses only them."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from io import BytesIO
from typing import Any

import orjson
import pytest
from msgspec import structs

from sgl_ext.balancer.conversations.expansion import Found, Named
from sgl_ext.balancer.relay.bodies import LargeBodies
from sgl_ext.balancer.relay.reading import BodyReader, ReadPlan
from sgl_ext.limits.bounds import LARGE_BODY_BYTES
from sgl_ext.limits.byte_account import ByteAccount
from sgl_ext.protocols.errors import BalancerError
from sgl_ext.reading.strip import HeaderStrip
from tests.balancer.conftest import Engine, Start

TEXT = "x" * LARGE_BODY_BYTES
HEADER = "x-anthropic-billing-header: cc_version=2;\n"
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"


def plan(path: str, **other: Any) -> ReadPlan:
    common = {"runs": True, "warms": False, "ceiling": 10, "is_charged": False}
    return ReadPlan(path, path.encode(), (), {}, **{**common, **other})


def body_of(text: str, **fields: Any) -> bytes:
    said = [{"role": "system", "content": HEADER + "s"}, {"role": "user", "content": text}]
    return orjson.dumps({"model": "m", "messages": said, **fields})


FAILED: list[str] = []
ACCOUNT = ByteAccount(100 * LARGE_BODY_BYTES)


@pytest.fixture(scope="module")
def large() -> Iterator[LargeBodies]:
    made = LargeBodies(ACCOUNT, FAILED.append, HeaderStrip(), sort_tools=False, keeps_turns=True)
    yield made
    made.close()


@pytest.fixture(scope="module")
def small() -> BodyReader:
    return BodyReader(HeaderStrip(), sort_tools=False, keeps_turns=True)


@pytest.mark.parametrize(
    ("request_", "body", "found"),
    [
        (plan(CHAT), body_of(TEXT, tools=[{"type": "function"}]), None),
        (plan(CHAT, is_charged=True), body_of(TEXT, stream=True), None),
        (plan(RESPONSES), orjson.dumps({"input": TEXT, "previous_response_id": "a"}), None),
        (
            plan(RESPONSES),
            orjson.dumps({"input": TEXT, "previous_response_id": "a"}),
            Found([b'{"input":[{"role":"user","content":"earlier"}],"output":[]}']),
        ),
    ],
    # pytest would make the names from the bodies, and passes them to processes that it starts.
    ids=["chat", "charged", "continues", "expanded"],
)
async def test_the_other_process_reads_the_same(
    large: LargeBodies, small: BodyReader, request_: ReadPlan, body: bytes, found: Found | None
) -> None:
    here = small.read(request_, body, found)
    there = await large.read("", request_, body, found)
    if isinstance(here, Named):
        assert there == here
        return
    assert not isinstance(there, Named)
    assert structs.replace(there, stripped=here.stripped) == here
    assert (there.body is None) == (here.body is None)
    assert there.stripped[1:] == here.stripped[1:]
    assert TEXT not in str(there.stripped.body)
    assert ACCOUNT.used == 0


async def test_an_error_has_the_same_words(large: LargeBodies, small: BodyReader) -> None:
    body = body_of(TEXT, stream="yes")
    with pytest.raises(BalancerError) as here:
        small.read(plan(CHAT), body)
    with pytest.raises(BalancerError) as there:
        await large.read("", plan(CHAT), body, None)
    assert vars(there.value) == vars(here.value)


async def test_the_next_body_starts_a_process_if_it_has_ended(large: LargeBodies) -> None:
    body = body_of(TEXT)
    await large.read("", plan(CHAT), body, None)
    for process in multiprocessing.active_children():
        process.kill()
        process.join()
    FAILED.clear()
    with pytest.raises(BalancerError) as error:
        await large.read("", plan(CHAT), body, None)
    assert error.value.status == 503
    assert error.value.retry_after_s
    assert FAILED == ["large_bodies"]
    assert (await large.read("", plan(CHAT), body, None)) is not None
    assert ACCOUNT.used == 0


async def test_without_room_a_body_does_not_wait() -> None:
    account = ByteAccount(LARGE_BODY_BYTES)
    full = LargeBodies(account, FAILED.append, HeaderStrip(), sort_tools=False, keeps_turns=True)
    with pytest.raises(BalancerError) as error:
        await full.read("", plan(CHAT), body_of(TEXT), None)
    assert error.value.status == 503
    assert account.used == 0


async def test_a_large_request_that_names_a_context_arrives_with_it(start: Start) -> None:
    engine = Engine("a")
    client = await start(engine, store_limit_bytes=1 << 30)
    block = {"id": "rules", "layer": "stable", "content": "the rules"}
    made = await (await client.post("/v1/contexts", json={"blocks": [block]})).json()
    turns = [{"role": "user", "content": TEXT}]
    body = {"model": "m", "max_tokens": 5, "messages": turns, "context_id": made["context_id"]}
    json = {"content-type": "application/json"}
    sent = BytesIO(orjson.dumps(body))
    assert (await client.post(MESSAGES, data=sent, headers=json)).status == 200
    ((_, received, _),) = engine.seen
    document = orjson.loads(received)
    assert document["system"][0]["text"] == "the rules"
    assert document["messages"] == turns
