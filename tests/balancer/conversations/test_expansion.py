"""Input items that are named by their id, as the AI SDK sends them."""

from __future__ import annotations

from typing import Any

import pytest

from sgl_ext.balancer.conversations.expansion import MAX_REFERENCES
from tests.balancer.conftest import Start
from tests.balancer.conversations.test_conversation_store import (
    CALL,
    PATH,
    RESULT,
    THOUGHT,
    Answering,
    ask,
    said,
    user,
)


def refer(id: Any) -> dict[str, Any]:
    return {"type": "item_reference", "id": id}


@pytest.mark.parametrize("streams", [False, True])
async def test_a_reference_is_replaced_by_the_item_of_the_answer(
    start: Start, streams: bool
) -> None:
    engine = Answering(THOUGHT, CALL)
    client = await start(engine.engine())
    answer = await client.post(PATH, json={"input": "One", "stream": streams})
    await answer.read()
    status, _ = await ask(client, {"input": [user("One"), refer("rs_1"), refer("fc_1"), RESULT]})
    assert status == 200
    whole = [user("One"), THOUGHT, CALL, RESULT]
    assert engine.bodies[1]["input"] == whole
    await ask(client, {"input": "Three", "previous_response_id": engine.ids[1]})
    assert engine.bodies[2]["input"] == [*whole, THOUGHT, CALL, user("Three")]


async def test_a_reference_can_follow_a_response_that_is_continued(start: Start) -> None:
    engine = Answering(THOUGHT, CALL)
    client = await start(engine.engine())
    await ask(client, {"input": "One"})
    engine.output = [said("Hi")]
    await ask(client, {"input": "Two"})
    entered = [refer("fc_1"), RESULT]
    body = {"input": entered, "previous_response_id": engine.ids[1]}
    assert (await ask(client, body))[0] == 200
    assert engine.bodies[2]["input"] == [user("Two"), said("Hi"), CALL, RESULT]


@pytest.mark.parametrize("lost", ["never", "tenant", "unstored", "deleted"])
async def test_an_unknown_item_is_named(start: Start, lost: str) -> None:
    engine = Answering(CALL)
    client = await start(engine.engine())
    if lost != "never":
        await ask(client, {"input": "One", "store": lost != "unstored"}, tenant="a")
    if lost == "deleted":
        await client.delete(f"{PATH}/{engine.ids[0]}", headers={"x-tenant-id": "a"})
    tenant = "b" if lost == "tenant" else "a"
    status, answer = await ask(client, {"input": [user("One"), refer("fc_1")]}, tenant)
    assert status == 404
    assert answer["error"]["param"] == "input[1].id"
    assert answer["error"]["type"] == "invalid_request_error"
    assert answer["error"]["message"].startswith("Item with id 'fc_1' not found.")
    assert len(engine.bodies) == (lost != "never")


@pytest.mark.parametrize(
    ("items", "field"),
    [
        ([refer(None)], "input[0].id"),
        ([{"type": "item_reference"}], "input[0].id"),
        ([refer("fc_1"), refer("fc_1")], "input[1].id"),
        ([refer(f"fc_{k}") for k in range(MAX_REFERENCES + 1)], "input"),
    ],
)
async def test_a_bad_reference_is_refused(start: Start, items: list[Any], field: str) -> None:
    client = await start(Answering(CALL).engine())
    await ask(client, {"input": "One"})
    status, answer = await ask(client, {"input": items})
    assert (status, answer["error"]["param"]) == (400, field)


async def test_what_references_insert_is_no_larger_than_a_body(start: Start) -> None:
    engine = Answering(*({**said("x" * 60_000), "id": f"msg_{k}"} for k in range(4)))
    client = await start(engine.engine(), max_body_bytes=200_000)
    await ask(client, {"input": "One"})
    assert (await ask(client, {"input": [refer("msg_0"), refer("msg_1")]}))[0] == 200
    status, _ = await ask(client, {"input": [refer(f"msg_{k}") for k in range(4)]})
    assert status == 413
