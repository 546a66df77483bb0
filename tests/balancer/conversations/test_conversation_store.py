"""Stored responses and contexts: the requests that engines get, and the answers to clients."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import ClientSession, web

from sgl_ext.balancer.conversations.conversation_store import ConversationStore
from sgl_ext.balancer.conversations.expansion import Expander
from sgl_ext.balancer.conversations.tenant_documents import TenantDocuments
from sgl_ext.balancer.metrics.registry import Metrics
from sgl_ext.balancer.store.sqlite import DocumentStore, SqliteDocuments, StoreThread
from tests.balancer.conftest import Engine, Start

PATH = "/v1/responses"
THOUGHT = {"id": "rs_1", "type": "reasoning", "summary": [], "content": [], "status": None}
CALL = {
    "id": "fc_1",
    "type": "function_call",
    "call_id": "call_1",
    "name": "read",
    "arguments": "{}",
    "status": "completed",
}
RESULT = {"type": "function_call_output", "call_id": "call_1", "output": "x"}
_numbers = count(1)


def said(text: str) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {"id": "msg_1", "type": "message", "role": "assistant", "content": content}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


class Answering:
    """An engine that answers /v1/responses with given items, and keeps the bodies it was sent."""

    def __init__(self, *output: dict[str, Any], status: str = "completed") -> None:
        self.output = list(output) or [said("Hi")]
        self.status = status
        self.ids: list[str] = []
        self.bodies: list[dict[str, Any]] = []

    def engine(self, name: str = "a") -> Engine:
        return Engine(name, self.answer)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.method != "POST":
            return web.json_response({"error": {"message": "disabled"}}, status=400)
        body = orjson.loads(await request.read())
        self.bodies.append(body)
        self.ids.append(f"resp_{next(_numbers)}")
        response = {
            "id": self.ids[-1],
            "object": "response",
            "status": self.status,
            "output": self.output,
            "previous_response_id": None,
        }
        if not body.get("stream"):
            return web.json_response(response)
        told = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await told.prepare(request)
        begun = {**response, "status": "in_progress", "output": []}
        for kind, document in (
            ("response.created", {"response": begun}),
            ("response.output_text.delta", {"delta": "event: response.completed\ndata: {}"}),
            (f"response.{self.status}", {"response": response}),
        ):
            data = orjson.dumps({"type": kind, **document})
            await told.write(b"event: %b\ndata: %b\n\n" % (kind.encode(), data))
        return told


async def ask(client: ClientSession, body: dict[str, Any], tenant: str = "") -> tuple[int, Any]:
    answer = await client.post(PATH, json={"model": "m", **body}, headers={"x-tenant-id": tenant})
    return answer.status, await answer.json(content_type=None)


async def test_a_turn_that_continues_another_is_sent_as_the_whole_conversation(
    start: Start,
) -> None:
    engine = Answering(THOUGHT, CALL)
    client = await start(engine.engine())
    first = {"input": "One", "instructions": "Of the first.", "tools": []}
    assert (await ask(client, first))[0] == 200
    status, second = await ask(
        client, {"input": [RESULT], "previous_response_id": engine.ids[0], "instructions": "Now."}
    )
    assert (status, second["previous_response_id"]) == (200, engine.ids[0])
    whole = [user("One"), THOUGHT, CALL, RESULT]
    assert engine.bodies[1] == {"model": "m", "input": whole, "instructions": "Now."}
    await ask(client, {"input": "Three", "previous_response_id": engine.ids[1]})
    assert engine.bodies[2] == {"model": "m", "input": [*whole, THOUGHT, CALL, user("Three")]}
    await ask(client, {"previous_response_id": engine.ids[0]})
    assert engine.bodies[3]["input"] == whole[:3]


@pytest.mark.parametrize("status", ["completed", "incomplete"])
async def test_a_streamed_answer_is_stored_and_names_the_response_it_continues(
    start: Start, status: str
) -> None:
    engine = Answering(status=status)
    client = await start(engine.engine())
    await client.post(PATH, json={"input": "One", "stream": True})
    body = {"input": "Two", "stream": True, "previous_response_id": engine.ids[0]}
    streamed = await (await client.post(PATH, json=body)).read()
    assert engine.bodies[1] == {"input": [user("One"), said("Hi"), user("Two")], "stream": True}
    events = [part.split(b"\ndata: ") for part in streamed.split(b"\n\n") if part]
    told = {name.decode().removeprefix("event: "): orjson.loads(data) for name, data in events}
    assert list(told) == ["response.created", "response.output_text.delta", f"response.{status}"]
    for kind in ("response.created", f"response.{status}"):
        assert told[kind]["response"]["previous_response_id"] == engine.ids[0]
    await ask(client, {"input": "Three", "previous_response_id": engine.ids[1]})
    assert len(engine.bodies[2]["input"]) == 5


async def test_any_engine_and_a_restarted_balancer_can_continue_a_conversation(
    start: Start, tmp_path: Path
) -> None:
    first, second = Answering(), Answering()
    store = str(tmp_path / "store.sqlite")
    before = await start(first.engine(), store=store)
    await ask(before, {"input": "One"})
    after = await start(second.engine("b"), store=store)
    status, _ = await ask(after, {"input": "Two", "previous_response_id": first.ids[0]})
    assert status == 200
    assert second.bodies[0]["input"] == [user("One"), said("Hi"), user("Two")]
    status, _ = await ask(before, {"input": "Three", "previous_response_id": second.ids[0]})
    assert status == 200
    assert len(first.bodies[1]["input"]) == 5


async def test_responses_that_are_not_stored_or_incomplete_are_unknown(start: Start) -> None:
    engine = Answering()
    client = await start(engine.engine())
    await ask(client, {"input": "One", "store": False})
    engine.status = "queued"
    await ask(client, {"input": "One", "background": True})
    engine.status = "failed"
    await ask(client, {"input": "One"})
    for id in (*engine.ids, "resp_made_up"):
        status, document = await ask(client, {"input": "Two", "previous_response_id": id})
        assert status == 400
        assert document["error"] == {
            "message": f"Previous response with id '{id}' not found.",
            "type": "invalid_request_error",
            "param": "previous_response_id",
            "code": "previous_response_not_found",
        }
    status, document = await ask(client, {"input": "Two", "previous_response_id": 7})
    assert (status, document["error"]["param"]) == (400, "previous_response_id")
    assert len(engine.bodies) == 3


async def test_a_turn_that_is_not_stored_can_continue_a_stored_one(start: Start) -> None:
    engine = Answering()
    client = await start(engine.engine())
    await ask(client, {"input": "One"})
    body = {"input": "Two", "previous_response_id": engine.ids[0], "store": False}
    status, document = await ask(client, body)
    assert (status, document["previous_response_id"]) == (200, engine.ids[0])
    assert (await client.get(f"{PATH}/{engine.ids[1]}")).status == 404


async def test_a_conversation_that_outgrows_a_request_is_413(start: Start) -> None:
    engine = Answering()
    client = await start(engine.engine(), max_body_bytes=1000)
    await ask(client, {"input": "x" * 900})
    status, document = await ask(client, {"input": "y", "previous_response_id": engine.ids[0]})
    assert (status, document["error"]["message"]) == (413, "body: larger than 1000 bytes")


async def test_the_next_turn_may_be_prefilled_by_id(start: Start) -> None:
    engine = Answering()
    client = await start(engine.engine())
    await ask(client, {"input": "One"})
    await client.post("/v1/prefill", json={"previous_response_id": engine.ids[0]})
    whole = {"input": [user("One"), said("Hi")], "nvext": {"protocol": "responses"}}
    assert engine.bodies[1] == whole


async def test_a_tenant_cannot_read_another_tenants_responses(start: Start) -> None:
    engine = Answering()
    client = await start(engine.engine())
    await ask(client, {"input": "One"}, tenant="a")
    id = engine.ids[0]
    status, _ = await ask(client, {"input": "Two", "previous_response_id": id}, tenant="b")
    assert status == 400
    for path in (f"{PATH}/{id}", f"{PATH}/{id}/input_items"):
        assert (await client.get(path, headers={"x-tenant-id": "b"})).status == 404
        assert (await client.get(path, headers={"x-tenant-id": "a"})).status == 200
    assert (await client.delete(f"{PATH}/{id}", headers={"x-tenant-id": "b"})).status == 404
    assert (await client.delete(f"{PATH}/{id}", headers={"x-tenant-id": "a"})).status == 200
    assert (await client.get(f"{PATH}/{id}", headers={"x-tenant-id": "a"})).status == 404


async def test_a_stored_response_is_returned_unchanged(start: Start) -> None:
    engine = Answering(THOUGHT, said("Hi"))
    client = await start(engine.engine())
    await ask(client, {"input": "One"})
    _, answered = await ask(client, {"input": "Two", "previous_response_id": engine.ids[0]})
    found = await (await client.get(f"{PATH}/{engine.ids[1]}")).json()
    assert found == answered
    assert list(found) == list(answered)


async def test_input_items_are_those_of_the_whole_conversation_in_pages(start: Start) -> None:
    engine = Answering()
    client = await start(engine.engine())
    await ask(client, {"input": "One"})
    await ask(client, {"input": [RESULT, user("Two")], "previous_response_id": engine.ids[0]})
    path = f"{PATH}/{engine.ids[1]}/input_items"
    asc = await (await client.get(f"{path}?order=asc")).json()
    ids = [item["id"] for item in asc["data"]]
    one = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "One"}]}
    assert asc["data"][0] == {**one, "id": ids[0]}
    assert [item["type"] for item in asc["data"][1:]] == ["message", RESULT["type"], "message"]
    assert len(set(ids)) == 4
    assert (asc["first_id"], asc["last_id"], asc["has_more"]) == (ids[0], ids[3], False)
    page = await (await client.get(f"{path}?limit=2&after={ids[3]}")).json()
    assert [item["id"] for item in page["data"]] == [ids[2], ids[1]]
    assert page["has_more"]
    for query in ("order=up", "limit=0", "limit=101", "limit=x", "after=nothing"):
        answer = await client.get(f"{path}?{query}")
        assert answer.status == 400
        assert (await answer.json())["error"]["param"] == query.partition("=")[0]


async def test_an_engines_own_response_is_still_found(start: Start) -> None:
    async def knows(request: web.Request) -> web.StreamResponse:
        return web.json_response({"id": request.path.rpartition("/")[2]})

    client = await start(Engine("a", knows))
    answer = await client.get(f"{PATH}/resp_background")
    assert await answer.json() == {"id": "resp_background"}
    without = await start(Answering().engine())
    assert (await without.get(f"{PATH}/resp_background")).status == 404


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
async def test_background_responses_belong_to_their_tenant(start: Start, is_streamed: bool) -> None:
    engine = Answering(status="in_progress")
    reached = []

    async def answer(request: web.Request) -> web.StreamResponse:
        if request.path == PATH:
            return await engine.answer(request)
        reached.append((request.method, request.path))
        return web.json_response({"id": engine.ids[0]})

    client = await start(Engine("a", answer))
    body = {"model": "m", "input": "One", "background": True, "stream": is_streamed}
    await (await client.post(PATH, json=body, headers={"x-tenant-id": "a"})).read()
    paths = (("GET", f"{PATH}/{engine.ids[0]}"), ("POST", f"{PATH}/{engine.ids[0]}/cancel"))
    for method, path in paths:
        refused = await client.request(method, path, headers={"x-tenant-id": "b"})
        assert refused.status == 404
        assert engine.ids[0] in (await refused.json())["error"]["message"]
        assert reached == []
        for headers in ({"x-tenant-id": "a"}, {}):
            assert (await client.request(method, path, headers=headers)).status == 200
            assert reached.pop() == (method, path)


async def test_without_a_store_ids_go_to_the_engines(start: Start) -> None:
    engine = Answering()
    client = await start(engine.engine(), store_limit_bytes=0)
    await ask(client, {"input": "One"})
    body = {"model": "m", "input": "Two", "previous_response_id": engine.ids[0]}
    await ask(client, body)
    assert engine.bodies[1] == body
    assert (await client.post("/v1/contexts", json={"blocks": BLOCKS})).status == 404
    answer = await client.post(PATH, json={"input": "Two", "context_id": "ctx_1"})
    assert answer.status == 404


async def test_malformed_input_goes_to_the_engine(start: Start) -> None:
    engine = Answering()
    client = await start(engine.engine())
    for body in ([], 7, {"input": 7}, {"input": {"role": "user"}}):
        answer = await client.post(PATH, json=body)
        assert answer.status in (200, 500)  # whatever the engine makes of it
    assert engine.bodies[2] == {"input": 7}


# Contexts.

TOOL = {"name": "read", "description": "Reads.", "input_schema": {"type": "object"}}
BLOCKS = [
    {"id": "tools", "layer": "stable", "kind": "tools", "content": [TOOL]},
    {"id": "rules", "layer": "stable", "content": "Be brief. " * 200},
    {"id": "notes", "layer": "project", "kind": "document", "content": "# Notes"},
    {"id": "now", "layer": "runtime"},
]


async def register(client: ClientSession, tenant: str = "") -> dict[str, Any]:
    headers = {"x-tenant-id": tenant}
    answer = await client.post("/v1/contexts", json={"blocks": BLOCKS}, headers=headers)
    assert answer.status == 200, await answer.text()
    document: dict[str, Any] = await answer.json()
    return document


async def test_a_context_is_registered_shown_and_deleted(start: Start) -> None:
    client = await start(Engine("a"))
    found = await register(client)
    assert found["object"] == "context"
    assert [(b["id"], b["layer"], b["pinned_s"]) for b in found["blocks"]] == [
        ("tools", "stable", 3600),
        ("rules", "stable", 3600),
        ("notes", "project", 300),
        ("now", "runtime", 0),
    ]
    assert all(len(block["hash"]) == 64 for block in found["blocks"][:3])
    path = f"/v1/contexts/{found['context_id']}"
    shown = await (await client.get(path)).json()
    assert "content" not in shown["blocks"][0]
    shown = await (await client.get(f"{path}?content=true")).json()
    assert [block["content"] for block in shown["blocks"]] == [
        *(block["content"] for block in BLOCKS[:3]),
        None,
    ]
    assert (await client.get(f"{path}?content=yes")).status == 400
    assert (await register(client))["context_id"] == found["context_id"]
    assert (await client.delete(path)).status == 200
    assert (await client.get(path)).status == 404
    assert (await client.delete(path)).status == 404


async def test_a_tenants_contexts_are_listed_in_pages(start: Start) -> None:
    client = await start(Engine("a"))

    async def listed(query: str = "", tenant: str = "a") -> tuple[int, Any]:
        answer = await client.get(f"/v1/contexts{query}", headers={"x-tenant-id": tenant})
        return answer.status, await answer.json()

    nothing = {"object": "list", "data": [], "has_more": False, "first_id": None, "last_id": None}
    assert await listed() == (200, nothing)
    ids = []
    for number in range(5):
        block = {"id": "rules", "layer": "project", "content": f"Rule {number}."}
        for tenant in ("a", "b") if number == 0 else ("a",):
            document = {"name": f"Number {number}", "blocks": [block]}
            headers = {"x-tenant-id": tenant}
            answer = await client.post("/v1/contexts", json=document, headers=headers)
            found = await answer.json()
        ids.append(found["context_id"])
    whole = (await listed())[1]
    assert [each["context_id"] for each in whole["data"]] == sorted(ids)
    assert (whole["has_more"], whole["first_id"]) == (False, min(ids))
    one = next(each for each in whole["data"] if each["context_id"] == ids[3])
    assert one["name"] == "Number 3"
    assert (one["bytes"], one["layers"]) == (7, {"project": 7})
    assert one["expires_at"] == one["last_used_at"] + 3600
    paged, after = [], ""
    while True:
        page = (await listed(f"?limit=2{after}"))[1]
        paged += page["data"]
        after = f"&after={page['last_id']}"
        if not page["has_more"]:
            break
    assert paged == whole["data"]
    shared = (await listed(tenant="b"))[1]["data"]
    assert [each["context_id"] for each in shared] == ids[:1]
    await client.delete(f"/v1/contexts/{ids[0]}", headers={"x-tenant-id": "b"})
    assert await listed(tenant="b") == (200, nothing)
    assert len((await listed())[1]["data"]) == 5
    for wrong in ("0", "101", "1" * 5000, "x", ""):
        status, error = await listed(f"?limit={wrong}")
        assert status == 400
        assert "limit: must be 1 to 100" in error["error"]["message"]
    assert (await listed("?after=%00"))[0] == 400
    answer = await client.post("/v1/contexts", json={"name": "n" * 129, "blocks": BLOCKS})
    assert answer.status == 400
    assert (await answer.json())["error"]["message"].startswith("name: must be")


async def test_a_request_that_names_a_context_is_placed_like_the_expanded_request(
    start: Start,
) -> None:
    engine = Engine("a")
    client = await start(engine)
    id = (await register(client))["context_id"]
    message = {"role": "user", "content": "Hello"}
    routing = {"messages": [message], "context_id": id, "context_blocks": {"now": "Noon."}}
    await client.post("/v1/messages", json=routing)
    _, body, _ = engine.seen[-1]
    whole = orjson.loads(body)
    mark = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    assert whole["tools"] == [{**TOOL, **mark}]
    assert whole["system"][0] == {"type": "text", "text": BLOCKS[1]["content"], **mark}
    said = [{"type": "text", "text": each} for each in ("Noon.", "Hello")]
    assert whole["messages"] == [{"role": "user", "content": said}]
    explained = [
        await (await client.post("/sgl_ext/explain/v1/messages", json=each)).json()
        for each in (routing, whole)
    ]
    assert explained[0] == explained[1]
    await client.post("/v1/prefill?protocol=messages", json=routing)
    _, body, _ = engine.seen[-1]
    assert orjson.loads(body) == {**whole, "nvext": {"protocol": "messages"}}
    assert (await client.delete(f"/v1/contexts/{id}")).status == 200
    assert (await client.post("/v1/messages", json=routing)).status == 404, "though it was parsed"


async def test_a_session_header_behind_a_context_is_removed(start: Start) -> None:
    engine = Engine("a")
    client = await start(engine)
    id = (await register(client))["context_id"]
    header = "x-anthropic-billing-header: cc_version=1; cch=7;\n"
    for own in (f"{header}Be kind.", "Be kind."):
        await client.post(PATH, json={"input": "Hi", "instructions": own, "context_id": id})
    sent = [orjson.loads(body)["instructions"] for _, body, _ in engine.seen]
    assert sent[0] == sent[1]
    assert sent[0].endswith("Be kind.")
    page = await (await client.get("/metrics")).text()
    assert "sgl_ext_stripped_headers_total 1.0" in page


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions", "/v1/responses"])
async def test_an_unknown_context_is_404_that_says_to_register_it_again(
    start: Start, path: str
) -> None:
    engine = Engine("a")
    client = await start(engine)
    id = (await register(client, "a"))["context_id"]
    for tenant, named in (("a", "ctx_made_up"), ("b", id)):
        headers = {"x-tenant-id": tenant}
        for body in ({"context_id": named}, {"nvext": {"context_id": named}}):
            answer = await client.post(path, json=body, headers=headers)
            assert answer.status == 404
            error = (await answer.json())["error"]
            assert error["message"] == (
                f"context_id: '{named}' is unknown or has expired: "
                "register it again (POST /v1/contexts)."
            )
            if path == "/v1/messages":
                assert error["type"] == "not_found_error"
            else:
                assert (error["code"], error["param"]) == ("context_not_found", "context_id")
    assert engine.seen == []


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/v1/messages", {"context_id": 7}, "context_id: must be the id"),
        ("/v1/messages", {"context_blocks": {}}, "context_id: must be the id"),
        ("/v1/messages", {"context_blocks": {"rules": "x"}}, "context_blocks.rules: "),
        ("/generate", {}, "context_id: requests to /generate cannot name a context"),
        ("/v1/prefill", {}, "context_id: requests to /v1/prefill cannot name a context"),
    ],
)
async def test_malformed_context_fields_of_a_request_are_named(
    start: Start, path: str, body: dict[str, Any], message: str
) -> None:
    client = await start(Engine("a"))
    id = (await register(client))["context_id"]
    named = {} if message.startswith("context_id: must") else {"context_id": id}
    answer = await client.post(path, json=named | body)
    assert answer.status == 400
    assert (await answer.json())["error"]["message"].startswith(message)


async def test_an_invalid_registration_is_400_and_names_the_block(start: Start) -> None:
    client = await start(Engine("a"))
    block = {**BLOCKS[1], "hash": "0" * 64}
    answer = await client.post("/v1/contexts", json={"blocks": [block]})
    assert answer.status == 400
    assert "blocks.0.hash: differs from that of the content of block 'rules'" in await answer.text()
    assert (
        await client.post("/v1/contexts", data=b"{", headers={"content-type": "application/json"})
    ).status == 400


async def test_a_context_is_inserted_ahead_of_a_continued_conversation(start: Start) -> None:
    engine = Answering()
    client = await start(engine.engine())
    id = (await register(client))["context_id"]
    await ask(client, {"input": "One", "context_id": id})
    await ask(client, {"input": "Two", "previous_response_id": engine.ids[0], "context_id": id})
    assert engine.bodies[1]["instructions"] == engine.bodies[0]["instructions"]
    assert engine.bodies[1]["input"] == [user("One"), said("Hi"), user("Two")]


# The store's own failures and its time.


class Clock:
    now = 1e9

    def __call__(self) -> float:
        return self.now


def counts(metrics: Metrics) -> dict[str, int]:
    return {event: number for (event,), number in metrics.store_events.counts.items() if number}


async def one_turn(store: ConversationStore, body: dict[str, Any], id: str) -> Any:
    expander = Expander(keeps_turns=True)
    named = expander.names(PATH, body)
    found = None if named is None else await store.find(named, "")
    whole, turn, *_ = expander.expand(PATH, body, found)
    recorder = store.recorder(turn, "")
    assert recorder is not None
    await recorder.record(
        orjson.dumps({"id": id, "object": "response", "status": "completed", "output": []})
    )
    return whole


async def test_a_conversation_expires_a_ttl_after_its_last_use(tmp_path: Path) -> None:
    clock, metrics = Clock(), Metrics()
    file = DocumentStore(str(tmp_path / "store"), 1 << 20)
    documents = SqliteDocuments(StoreThread(file, metrics))
    store = ConversationStore(TenantDocuments(documents, metrics, 1 << 20, clock), metrics, 60.0)
    await one_turn(store, {"input": "One"}, "resp_1")
    clock.now += 59
    await one_turn(store, {"input": "Two", "previous_response_id": "resp_1"}, "resp_2")
    clock.now += 59
    body = {"input": "Three", "previous_response_id": "resp_2"}
    assert len((await one_turn(store, body, "resp_3"))["input"]) == 3
    clock.now += 61
    assert await store.response("", "resp_1") is None
    assert counts(metrics) == {"stored": 3, "found": 2}
    await documents.close()


def nested(levels: int) -> Any:
    value: Any = "x"
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (PATH, {"input": [user("a") | {"content": nested(300)}]}, "input"),
        ("/v1/messages", {"context_id": "", "metadata": nested(300), "messages": []}, "body"),
        ("/v1/contexts", {"blocks": [{**BLOCKS[0], "content": [{"a": nested(300)}]}]}, "blocks.0"),
        ("/v1/contexts", {"blocks": [{**BLOCKS[0], "layer": []}]}, "blocks.0.layer"),
    ],
    ids=["input", "body", "context", "layer"],
)
async def test_what_cannot_be_written_again_is_400_and_named(
    start: Start, path: str, body: dict[str, Any], field: str
) -> None:
    engine = Engine("a")
    client = await start(engine)
    if "context_id" in body:
        body["context_id"] = (await register(client))["context_id"]
        body["context_blocks"] = {"now": "Noon."}
    answer = await client.post(path, json=body)
    assert answer.status == 400
    assert (await answer.json())["error"]["message"].startswith(field)
    assert engine.seen == []


async def test_the_count_of_a_prompt_includes_the_conversation_that_it_continues(
    start: Start,
) -> None:
    engine = Answering()
    client = await start(engine.engine())
    await ask(client, {"input": "One"})
    body = {"input": "Two", "previous_response_id": engine.ids[0]}
    counted = await client.post(f"{PATH}/input_tokens", json=body)
    assert counted.status == 200
    assert engine.bodies[1] == {"input": [user("One"), said("Hi"), user("Two")]}
    status, _ = await ask(client, {"input": "Three", "previous_response_id": engine.ids[1]})
    assert status == 400, "a count is no turn"
    unknown = await client.post(
        f"{PATH}/input_tokens", json={"input": "a", "previous_response_id": "resp_none"}
    )
    assert (await unknown.json())["error"]["code"] == "previous_response_not_found"
