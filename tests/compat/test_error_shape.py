"""Errors of the engine are in their protocol's shape and expose nothing of the server."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from fastapi import FastAPI, HTTPException
from fastapi.exception_handlers import http_exception_handler
from fastapi.exceptions import RequestValidationError
from jinja2 import TemplateError
from pydantic import BaseModel, model_validator
from starlette.responses import JSONResponse, StreamingResponse
from starlette.testclient import TestClient

from sgl_ext.compat import errors
from sgl_ext.compat.errors import (
    EngineError,
    error_of_validation,
    failed_event,
    read_error,
    scrubbed,
    shaped,
)
from sgl_ext.protocols.registry import errors_of

FLAT = {"object": "error", "message": "n must be positive", "type": "BadRequest", "code": 400}
TOO_LONG = "The input (300 tokens) is longer than the model's context length (256 tokens)."
TOO_MUCH = (
    "Requested token count exceeds the model's maximum context length of 256 tokens. You "
    "requested a total of 300 tokens: 200 tokens from the input messages and 100 tokens for the "
    "completion. Please reduce the number of tokens."
)
TRACE = (
    "1 validation error:\n  {'type': 'missing', 'loc': ('body', 'tools')}\n\n"
    '  File "/srv/lib/sglang/srt/entrypoints/http_server.py", line 1870, in chat\n'
    "    POST /v1/chat/completions [{'type': 'missing'}]"
)


def read(document: Any, status: int = 400) -> EngineError:
    return read_error(status, orjson.dumps(document))


@pytest.mark.parametrize(
    "document",
    [
        FLAT,
        {"error": {"message": "n must be positive", "code": 400}},
        {"type": "error", "error": {"type": "BadRequestError", "message": "n must be positive"}},
        {"detail": "n must be positive"},
        "n must be positive",
    ],
)
def test_every_shape_of_sglangs_is_read(document: Any) -> None:
    assert read(document) == EngineError(400, "n must be positive")


def test_a_body_that_is_no_json_is_read() -> None:
    assert read_error(404, b"Not Found \xff").message == "Not Found \ufffd"


def test_each_protocol_has_its_shape() -> None:
    error = EngineError(404, "The model 'x' does not exist", "model")
    assert orjson.loads(shaped(errors_of("/v1/responses"), error, "req_1")) == {
        "error": {
            "message": "The model 'x' does not exist",
            "type": "invalid_request_error",
            "param": "model",
            "code": "model_not_found",
        }
    }
    assert orjson.loads(shaped(errors_of("/v1/messages"), error, "req_1")) == {
        "type": "error",
        "error": {"type": "not_found_error", "message": "The model 'x' does not exist"},
        "request_id": "req_1",
    }


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (TOO_LONG, "prompt is too long: 300 tokens > 256 maximum"),
        (TOO_MUCH, "input length and `max_tokens` exceed context limit: 200 + 100 > 256"),
    ],
)
def test_a_full_context_is_worded_as_harnesses_expect(message: str, words: str) -> None:
    error = EngineError(400, message)
    assert orjson.loads(shaped(errors_of("/v1/messages"), error, ""))["error"][
        "message"
    ].startswith(words)
    openai = errors_of("/v1/chat/completions")
    found = orjson.loads(shaped(openai, error, ""))["error"]
    assert found["code"] == "context_length_exceeded"
    assert found["message"].startswith("This model's maximum context length is 256 tokens. ")


@pytest.mark.parametrize(
    ("status", "message", "expected"),
    [
        (400, TRACE, "1 validation error:\n  {'type': 'missing', 'loc': ('body', 'tools')}"),
        (
            400,
            'No grammar: [21:56:20] /project/cpp/converter.cc:4175: Unsupported type "x"',
            'No grammar: Unsupported type "x"',
        ),
        (400, "cannot read /srv/models/tiny/config.json", "cannot read a file of the server"),
        (400, "see https://host/docs/a.json or /v1/models", None),
        (400, "", "The request failed."),
        (500, "division by zero in /srv/a.py", "Internal server error"),
        (503, "The request queue is full.", None),
    ],
)
def test_nothing_of_the_server_is_exposed(status: int, message: str, expected: str | None) -> None:
    assert scrubbed(status, message) == (message if expected is None else expected)
    assert len(scrubbed(400, "x" * 5000)) == 1000


def test_pydantic_s_errors_are_named_by_field() -> None:
    union = "function-after[validate(), Message]"
    found = [
        {"loc": ("body", "messages", 0, union, "role"), "msg": "Input should be 'user'"},
        {"loc": ("body", "messages", 0, union, "content", "str"), "msg": "a string"},
        {"loc": ("body", "messages", 0, union, "content", "list[Part]"), "msg": "a list"},
        {"loc": ("body", "n"), "msg": "an integer"},
        {"loc": ("body", "m"), "msg": "an integer"},
    ]
    error = error_of_validation(found)
    assert error.param == "messages.0.role"
    assert error.message == (
        "messages.0.role: Input should be 'user'; messages.0.content: a string; "
        "n: an integer; and 1 more"
    )
    assert error_of_validation([{"loc": ("body",), "msg": "no object"}]) == EngineError(
        400, "body: no object"
    )


def test_a_failed_response_says_why() -> None:
    response = {"id": "r", "error": {"code": "server_error", "message": TOO_LONG}}
    data = b"event: response.failed\ndata: %b\n\n" % orjson.dumps({"response": response})
    head, _, text = failed_event(data).partition(b"\ndata: ")
    assert head == b"event: response.failed"
    assert orjson.loads(text)["response"]["error"] == {
        "code": "context_length_exceeded",
        "message": "This model's maximum context length is 256 tokens. However, your messages "
        "resulted in 300 tokens. Please reduce the length of the messages.",
    }


JSON = {"content-type": "application/json"}


class Body(BaseModel):
    n: int = 1

    @model_validator(mode="before")
    @classmethod
    def careless(cls, values: Any) -> Any:
        assert values.get("n").bit_length
        return values


def event(kind: str, document: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps(document))


START = event("message_start", {"message": {}})
DELTA = event("content_block_delta", {"text": "a"})
STOP = event("message_stop", {})
BAD = event("error", {"type": "error", "error": {"type": "invalid_request_error", "message": "m"}})


@pytest.fixture(scope="module")
def client() -> TestClient:
    app = FastAPI()

    @app.exception_handler(RequestValidationError)
    async def of_sglang(request: Any, error: Any) -> Any:
        return JSONResponse({"sglang": "own"}, 400)

    @app.post("/generate")
    @app.post("/v1/messages")
    @app.post("/v1/chat/completions")
    async def answer(body: Body) -> Any:
        if body.n == 0:
            raise HTTPException(503, "The queue is full.")
        if body.n == 1:
            raise ZeroDivisionError
        if body.n == 9:
            raise HTTPException(400, {"message": "n: is not supported", "param": "n"})
        return {"fine": True}

    @app.post("/api/chat")
    @app.post("/encode")
    @app.post("/v1/embeddings")
    async def native(body: Body) -> Any:
        if body.n == 3:
            return JSONResponse({"detail": 'File "/srv/app/server.py", line 4'}, 400)
        raise (ZeroDivisionError, IndexError, TemplateError("no such role"))[body.n]

    @app.post("/detokenize")
    @app.post("/v1/detokenize")
    async def detokenize() -> Any:
        return JSONResponse({"message": "Internal server error during detokenization"}, 500)

    @app.post("/v1/messages/stream/{which}")
    @app.post("/v1/responses/stream/{which}")
    @app.post("/v1/completions/stream/{which}")
    async def stream(which: str) -> Any:
        async def events() -> Any:
            for part in STREAMS[which]:
                yield part

        return StreamingResponse(events(), media_type="text/event-stream")

    app.add_exception_handler(HTTPException, http_exception_handler)  # as SGLang has its own
    errors.install(app)
    return TestClient(app, raise_server_exceptions=False)


STREAMS: dict[str, Sequence[bytes]] = {
    "good": (START, DELTA, STOP),
    "early": (START, BAD, STOP),
    "late": (START, DELTA, BAD, STOP),
    "one": (START,),
    "none": (),
    "chat": (b'data: {"choices":[]}\n\n', b"data: %b\n\n" % orjson.dumps({"error": FLAT})),
}


def test_errors_have_one_request_id_and_their_own_status(client: TestClient) -> None:
    for body, status, expected in (
        ({"n": 0}, 503, "The queue is full."),
        ({"n": 1}, 500, "Internal server error"),
        ({"n": 9}, 400, "n: is not supported"),
        ({"n": [], "m": 1}, 400, "body: a field has a value of a type that it cannot have"),
    ):
        answer = client.post("/v1/messages", json=body)
        assert answer.status_code == status
        assert answer.json()["error"]["message"].startswith(expected)
        assert answer.headers.get_list("request-id") == [answer.json()["request_id"]]
        answer = client.post("/v1/chat/completions", json=body)
        assert answer.status_code == status
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert answer.json()["error"]["param"] == ("n" if body == {"n": 9} else None)
        assert len(answer.headers.get_list("x-request-id")) == 1


def test_successes_and_native_errors_are_sglangs_own(client: TestClient) -> None:
    answer = client.post("/v1/messages", json={"n": 2})
    assert answer.json() == {"fine": True}
    assert "request-id" not in answer.headers
    assert client.post("/generate", content=b"{", headers=JSON).json() == {"sglang": "own"}
    assert client.post("/v1/messages", content=b"{", headers=JSON).json()["error"]["type"] == (
        "invalid_request_error"
    )


@pytest.mark.parametrize("which", ["good", "one", "none"])
def test_a_stream_without_errors_passes_unchanged(client: TestClient, which: str) -> None:
    answer = client.post(f"/v1/messages/stream/{which}")
    assert answer.status_code == 200
    assert answer.content == b"".join(STREAMS[which])


def test_an_error_that_follows_from_the_body_alone_is_a_bad_request(client: TestClient) -> None:
    for n, status in ((0, 500), (1, 400), (2, 400)):
        assert client.post("/api/chat", json={"n": n}).status_code == status
    assert "value" in client.post("/api/chat", json={"n": 1}).json()["error"]["message"]
    for path in ("/detokenize", "/v1/detokenize"):
        assert client.post(path).status_code == 400


def test_a_native_error_exposes_no_internals(client: TestClient) -> None:
    answer = client.post("/api/chat", json={"n": 3})
    assert answer.status_code == 400
    assert "server.py" not in answer.text
    assert answer.json()["error"]["message"]


def test_a_model_that_generates_text_embeds_nothing(client: TestClient) -> None:
    assert client.post("/encode", json={"n": 0}).status_code == 500
    manager = SimpleNamespace(is_generation=True)
    client.app.state.openai_serving_chat = SimpleNamespace(tokenizer_manager=manager)  # type: ignore[attr-defined]
    try:
        for path in ("/encode", "/v1/embeddings"):
            answer = client.post(path, json={"n": 0})
            assert answer.status_code == 400
            assert "generates text" in answer.json()["error"]["message"]
    finally:
        del client.app.state.openai_serving_chat  # type: ignore[attr-defined]


def test_a_stream_of_messages_that_fails_at_once_has_a_status(client: TestClient) -> None:
    answer = client.post("/v1/messages/stream/early")
    assert answer.status_code == 400
    assert answer.json()["error"] == {"type": "invalid_request_error", "message": "m"}
    assert answer.headers["content-type"] == "application/json"


def test_a_stream_that_fails_later_ends_in_its_event(client: TestClient) -> None:
    answer = client.post("/v1/messages/stream/late")
    assert answer.status_code == 200
    assert answer.content == START + DELTA + BAD + STOP
    answer = client.post("/v1/completions/stream/chat")
    error = orjson.loads(answer.content.rsplit(b"data: ", 1)[1])["error"]
    assert error == {
        "message": "n must be positive",
        "type": "invalid_request_error",
        "param": None,
        "code": None,
    }
