"""What libraries found wrong with a body is told as the field's path and one sentence.

Errors of the engine are in their protocol's shape and expose nothing of the server.

Errors that SGLang answers with another status or text than they have.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
import requests
from fastapi import FastAPI, HTTPException, Request
from fastapi.exception_handlers import http_exception_handler
from fastapi.exceptions import RequestValidationError
from jinja2 import TemplateError
from pydantic import BaseModel, ValidationError, model_validator
from sglang.srt.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest
from starlette.responses import JSONResponse, StreamingResponse
from starlette.testclient import TestClient

from sgl_ext.compat import errors
from sgl_ext.compat.errors import (
    EngineError,
    Wrong,
    error_of_validation,
    failed_event,
    fields_of,
    of_item,
    plain,
    read_error,
    scrubbed,
    shaped,
    with_field,
    with_path,
)
from sgl_ext.engine import sglang_api
from sgl_ext.engine.core.request_context import RequestContext, enter, entered, put_on
from sgl_ext.protocols.chat import CHAT
from sgl_ext.protocols.registry import COMPLETIONS, GENERATE, errors_of, of_path
from sgl_ext.protocols.responses import RESPONSES
from tests.engine.scheduler.test_event_publisher import Engine
from tests.waiting import HANG_S

GENERIC, USER = "function-after[check(), Generic]", "function-after[check(), User]"
TEXT = f"""3 validation errors for ChatCompletionRequest
messages.2.{GENERIC}.content.str
  Input should be a valid string [type=string_type, input_value={{'a': 1}}, input_type=dict]
    For further information visit https://errors.pydantic.dev/2.14/v/string_type
messages.2.{GENERIC}.content.list[union[Text,function-after[a(), b.Image]]]
  Input should be a valid list [type=list_type, input_value={{'a': 1}}, input_type=dict]
    For further information visit https://errors.pydantic.dev/2.14/v/list_type
messages.2.{USER}.role
  Input should be 'user' [type=literal_error, input_value='tool', input_type=str]
    For further information visit https://errors.pydantic.dev/2.14/v/literal_error"""
LISTED = (
    "2 validation errors:\n  {'type': 'list_type', 'loc': ('body', 'text', 'list[str]'), "
    "'msg': 'Input should be a valid list', 'input': 5}\n  {'type': 'x', 'loc': ('body', 'n'), "
    "'msg': \"It's no number\", 'input': 5}"
)


def test_pydantics_text_becomes_one_sentence() -> None:
    assert plain(TEXT) == "messages.2.content: must be a string or a list"
    assert plain(LISTED) == "text: must be a list"
    assert plain("n must be positive") == "n must be positive"


def test_an_items_error_names_the_clients_item() -> None:
    said = plain(TEXT)
    items: list[Any] = [{"role": "user", "content": "a"}, {"output": {"a": 1}}]
    assert of_item(said, items) == Wrong("input[1].output", "must be a string or a list")
    assert of_item(said, "a") == Wrong("input", "must be a string or a list")
    assert of_item("tools.0.name: Field required", items) is None


@pytest.mark.parametrize(
    ("said", "item", "path", "what"),
    [
        ("'int' object is not iterable", {"summary": 5}, "summary", "must be a list"),
        (
            "sequence item 0: expected str instance, int found",
            {"summary": [{"type": "summary_text", "text": 5}]},
            "summary[0].text",
            "must be a string",
        ),
        (
            "messages.1.content.0: must be an object",
            {"content": [{"type": "input_text", "text": "a"}, 5]},
            "content[1]",
            "must be an object",
        ),
        ("Unsupported Responses API input item type: 5", {"type": 5}, "type", "must be a string"),
        (
            "Unsupported Responses API input item type: x",
            {"type": "x"},
            "type",
            "'x' is not supported",
        ),
    ],
)
def test_an_error_of_code_that_takes_types_for_granted_names_the_clients_item(
    said: str, item: Any, path: str, what: str
) -> None:
    items = [{"role": "user", "content": "a"}, {"type": "message", "role": "user", **item}]
    assert of_item(said, items) == Wrong(f"input[1].{path}", what)


@pytest.mark.parametrize(
    ("said", "field"),
    [
        ("routed_dp_rank=5 out of range [0, 1)", "routed_dp_rank"),
        ("routed_dp_rank=5 out of range [0, 1)", "data_parallel_rank"),
        ("extra_key should be a string for a single request.", "extra_key"),
        ("request watermark must set enabled or key", "watermark"),
        ("LoRA adapter 'x' was requested, but LoRA is not enabled.", "lora_path"),
        ("The server is not configured to return hidden states.", "return_hidden_states"),
        ("Use return_meta_info with it.", "return_meta_info"),
    ],
)
def test_a_field_of_the_body_that_an_error_names_is_its_field(said: str, field: str) -> None:
    error = EngineError(400, said)
    assert with_path(error, {"model": "m", field: 5}).param == field
    assert with_path(error, {"model": "m"}) == error
    assert with_path(error._replace(status=503), {field: 5}).param is None


def test_jsonschemas_text_ends_where_its_own_words_begin() -> None:
    message = (
        "Tool 2 function has invalid 'parameters' schema: 'x' is not valid\n\nFailed validating"
    )
    message += " 'anyOf' in metaschema['allOf'][3]:\n    {'anyOf': []}"
    assert plain(message) == "tools.2.function.parameters: 'x' is not valid"


def test_of_several_types_the_one_that_comes_furthest_counts() -> None:
    def wrong(*errors: tuple[tuple[Any, ...], str]) -> list[Wrong]:
        return fields_of([{"loc": ("body", *where), "msg": what} for where, what in errors])

    role = ("messages", 0, GENERIC, "role"), "Value error, 'role' must be another"
    content = ("messages", 0, USER, "content", "str"), "a string"
    assert wrong(role, content) == [Wrong("messages.0.content", "a string")]
    other = ("messages", 0, USER, "role"), "be 'user'"
    assert wrong(role, other) == [Wrong("messages.0.role", "'role' must be another")]
    deep = ("content", "list[union[Text,Image]]", 0, "text"), "Field required"
    assert wrong((("content", "str"), "a string"), deep) == [Wrong("content.0.text", deep[1])]
    kind = ("format", "Tag", "type"), "be 'tag'"
    missing = ("format", "Tag", "begin"), "Field required"
    text = ("format", "Text", "type"), "be 'text'"
    assert wrong(text, kind, missing)[0] == Wrong("format.type", "be 'text'")


CHAT_BODY: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "a"}]}
RESPONSE: dict[str, Any] = {"model": "tiny", "store": False}
OF_LIBRARIES = ("pydantic", "ChatCompletion", "http", "validation error", "metaschema", "'loc'")
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/responses", {"input": [CALL, {**OUTPUT, "output": {"a": 1}}]}, "input[1].output"),
        ("/v1/responses", {"input": [{"role": "user", "content": {}}]}, "input[0].content"),
        ("/v1/responses", {"input": [{**CALL, "name": 5}]}, "input[0].name"),
        ("/v1/responses", {"input": [{"type": "message", "role": "user"}]}, "input"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": {}}]},
            "messages.0.content",
        ),
        ("/v1/chat/completions", {"messages": []}, "messages"),
        (
            "/v1/chat/completions",
            {"response_format": {"type": "json_schema"}},
            "response_format.json_schema",
        ),
        ("/v1/completions", {"model": "tiny", "prompt": []}, "prompt"),
        ("/generate", {"text": 5}, None),
        ("/api/chat", {"model": "tiny", "messages": [{"role": "user"}]}, None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_no_error_names_a_library(
    engine: Engine, path: str, body: dict[str, Any], param: str | None, stream: bool
) -> None:
    whole = {**body, "stream": stream}
    if path == "/v1/responses":
        whole = {**RESPONSE, **whole}
    elif path == "/v1/chat/completions":
        whole = {**CHAT_BODY, **whole}
    refused = requests.post(engine.url + path, json=whole, timeout=HANG_S)
    assert refused.status_code == 400, refused.text
    error = refused.json()["error"]
    for word in (
        "pydantic",
        "ChatCompletion",
        "http",
        "validation error",
        "metaschema",
        ".cc",
        "'loc'",
    ):
        assert word not in refused.text
    if param is not None:
        assert error["param"] == param
        assert error["message"].startswith(f"{param}: ")
    assert "\n" not in error["message"].strip()


def test_a_native_error_names_no_file_of_a_library(engine: Engine) -> None:
    body = {"text": "a", "sampling_params": {"regex": "("}}
    refused = requests.post(f"{engine.url}/generate", json=body, timeout=HANG_S)
    assert refused.status_code == 400
    assert "parenthesis is not closed" in refused.json()["error"]["message"]
    assert ".cc" not in refused.text


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
        "messages.0.role: must be 'user'; messages.0.content: a string; n: an integer; and 1 more"
    )
    assert error_of_validation([{"loc": ("body",), "msg": "no object"}]) == EngineError(
        400, "body: no object"
    )


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("Input should be a valid integer, unable to parse string as an integer", "an integer"),
        ("Input should be a valid dictionary or instance of ImageURL", "an object"),
        ("Input should be a valid boolean, unable to interpret input", "a boolean"),
        ("Input should be 'auto' or 'disabled'", "'auto' or 'disabled'"),
        ("Input should be greater than or equal to 1", "greater than or equal to 1"),
        ("n must be at least 1", "at least 1"),
        ("Value error, n must be positive", "positive"),
        ("Unable to parse input string as an integer, exceeded maximum size", "a smaller integer"),
    ],
)
def test_pydantic_s_words_are_those_of_our_errors(said: str, words: str) -> None:
    error = error_of_validation([{"loc": ("body", "n"), "msg": said}])
    assert error == EngineError(400, f"n: must be {words}", "n")


def test_the_part_of_a_message_that_is_wrong_is_named_and_not_its_role() -> None:
    at = ("body", "messages", 0)
    part = (*at, "UserParam", "content", "list[Text,Image]", 0)
    found = [
        {"loc": (*at, "GenericParam", "role"), "msg": "'role' must be one of 'system', 'root'."},
        {"loc": (*at, "GenericParam", "content", "str"), "msg": "Input should be a valid string"},
        {"loc": (*at, "UserParam", "content", "str"), "msg": "Input should be a valid string"},
        {"loc": (*part, "TextPart", "text"), "msg": "Input should be a valid string"},
        {"loc": (*part, "ImagePart", "type"), "msg": "Input should be 'image_url'"},
        {"loc": (*part, "ImagePart", "image_url"), "msg": "Field required"},
    ]
    where = "messages.0.content.0.text"
    assert error_of_validation(found) == EngineError(400, f"{where}: must be a string", where)


USED = {"type": "tool_use", "id": "c", "name": 5, "input": {}}
THOUGHT = {"type": "thinking", "thinking": {"a": 1}}
PARTS = (
    "'text', 'thinking', 'reasoning', 'image_url', 'video_url', 'audio_url', 'input_audio' or "
    "'tool_reference'"
)
BLOCKS = (
    "'text', 'image', 'tool_use', 'tool_result', 'tool_reference', 'search_result', 'thinking' or "
    "'redacted_thinking'"
)
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"schema": {}}}


def of_user(*parts: Any) -> Any:
    return [{"role": "user", "content": [*parts]}]


@pytest.mark.parametrize(
    ("model", "field", "value", "path", "what"),
    [
        (CompletionRequest, "prompt", {}, "prompt", "must be a string or a list"),
        (CompletionRequest, "prompt", [None], "prompt.0", "must be an integer, a string or a list"),
        (CompletionRequest, "prompt", ["ok", 5], "prompt.1", "must be a string"),
        (CompletionRequest, "stop", 5, "stop", "must be a string or a list"),
        (
            CompletionRequest,
            "bootstrap_room",
            "x",
            "bootstrap_room",
            "must be an integer or a list",
        ),
        (ChatCompletionRequest, "response_format", {}, "response_format.type", "Field required"),
        (
            ChatCompletionRequest,
            "response_format",
            {"type": 5},
            "response_format.type",
            "must be 'text', 'json_object', 'json_schema' or 'structural_tag'",
        ),
        (
            ChatCompletionRequest,
            "response_format",
            JSON_SCHEMA,
            "response_format.json_schema.name",
            "Field required",
        ),
        (
            ChatCompletionRequest,
            "tool_choice",
            {"type": "x"},
            "tool_choice.type",
            "must be 'function'",
        ),
        (
            ChatCompletionRequest,
            "messages",
            of_user({"type": "text", "text": {}}),
            "messages.0.content.0.text",
            "must be a string",
        ),
        (
            ChatCompletionRequest,
            "messages",
            of_user({"type": "x"}),
            "messages.0.content.0.type",
            f"must be {PARTS}",
        ),
        (
            ChatCompletionRequest,
            "messages",
            of_user({}),
            "messages.0.content.0.type",
            "Field required",
        ),
        (
            AnthropicMessagesRequest,
            "messages",
            of_user({"type": "x"}),
            "messages.0.content.0.type",
            f"must be {BLOCKS}",
        ),
        (
            AnthropicMessagesRequest,
            "messages",
            of_user({"text": "a"}),
            "messages.0.content.0.type",
            "Field required",
        ),
        (
            AnthropicMessagesRequest,
            "messages",
            of_user(USED),
            "messages.0.content.0.name",
            "must be a string",
        ),
        (
            AnthropicMessagesRequest,
            "messages",
            of_user(THOUGHT),
            "messages.0.content.0.thinking",
            "must be a string",
        ),
        (AnthropicMessagesRequest, "tools", [5], "tools.0", "must be an object"),
        (
            AnthropicMessagesRequest,
            "tools",
            [{"name": 5, "input_schema": {}}],
            "tools.0.name",
            "must be a string",
        ),
        (
            AnthropicMessagesRequest,
            "thinking",
            {"type": "enabled", "budget_tokens": 5},
            "thinking.budget_tokens",
            "must be >= 1024 (got 5)",
        ),
    ],
)
def test_sglangs_models_name_the_clients_field_and_all_that_it_may_be(
    model: type[BaseModel], field: str, value: Any, path: str, what: str
) -> None:
    messages = [{"role": "user", "content": "a"}]
    body = {"model": "m", "messages": messages, "max_tokens": 5, "prompt": "a", field: value}
    with pytest.raises(ValidationError) as refused:
        model.model_validate(body)
    wrong = fields_of(refused.value.errors(), body)
    assert wrong[0] == Wrong(path, what), wrong
    assert len(wrong) == 1


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("Tool 'nope' not found in tools list.", "tool_choice: 'nope' is not among the tools"),
        (
            "tool_choice references tool 'nope' but it is not in the forwarded tools list (a, b)",
            "tool_choice: 'nope' is not among the tools",
        ),
    ],
)
def test_a_choice_of_no_tool_names_its_field(said: str, words: str) -> None:
    assert plain(said) == words
    assert with_path(EngineError(400, words)).param == "tool_choice"


def test_an_empty_conversation_names_its_field() -> None:
    said = "Cannot apply chat template to an empty conversation. Provide at least one message."
    for path, field in (("/v1/responses", "input"), ("/v1/chat/completions", "messages")):
        error = with_field(EngineError(400, said), of_path(path), {})
        assert error == EngineError(400, f"{field}: must not be empty", field)


@pytest.mark.parametrize(
    ("path", "field", "value", "param", "what"),
    [
        ("/v1/completions", "response_format", "x", "response_format", "an object"),
        ("/v1/completions", "response_format", [{}], "response_format", "an object"),
        ("/v1/messages/batches", "tools", [{"type": 5}], "tools.0.type", "a string"),
    ],
)
def test_a_field_is_named_whose_type_a_validator_takes_for_granted(
    client: TestClient, path: str, field: str, value: Any, param: str, what: str
) -> None:
    messages = [{"role": "user", "content": "a"}]
    body: Any = {"model": "m", "messages": messages, "max_tokens": 5, field: value}

    async def with_context(scope: Any, receive: Any, send: Any) -> None:
        put_on(Request(scope), RequestContext(path, body))
        await client.app(scope, receive, send)

    refused = TestClient(with_context).post(path, json=body)
    error = refused.json()["error"]
    assert (refused.status_code, error["message"]) == (400, f"{param}: must be {what}")
    assert error.get("param", param) == param


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

    @app.post("/v1/completions")
    async def chat(body: ChatCompletionRequest) -> Any:
        return {"fine": True}

    @app.post("/v1/messages/batches")
    async def message(body: AnthropicMessagesRequest) -> Any:
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


PATH = "/v1/responses"
LOGGER = "sglang.srt.entrypoints.openai.serving_responses"
CREATED = b'event: response.created\ndata: {"type": "response.created"}\n\n'
ADDED = b'event: response.output_item.added\ndata: {"type": "x"}\n\n'
FAILED = b'event: response.failed\ndata: {"response": {"error": {"message": "Aborted"}}}\n\n'

TOO_LONG_TEXT = b"The input (9 tokens) is longer than the model's context length (5 tokens)."


def abort(status: int) -> Any:
    """What the scheduler answers to a request that it aborts."""

    async def handle(manager: Any, out: Any) -> None:
        reason = out["meta_info"]["finish_reason"]
        raise HTTPException(reason["status_code"], reason["message"])

    reason = {"type": "abort", "status_code": status, "message": "Grammar accept_token failed"}
    return errors.note_abort(handle, None, {"meta_info": {"finish_reason": reason}})


async def raise_of_body() -> None:
    try:
        raise ValueError("no such role None")
    except ValueError:
        logging.getLogger(LOGGER).exception("Error in preprocessing prompt inputs")
        raise


async def fail(make: Any) -> Any:
    try:
        await make()
    except HTTPException as error:
        return f"{error.status_code}: {error.detail}"
    except Exception as error:
        return f"{error} {error.__cause__}"


CASES: dict[str, tuple[Any, int, str]] = {
    "an abort": (lambda: abort(500), 500, "Internal server error"),
    "a full queue": (lambda: abort(503), 503, "Grammar accept_token failed"),
    "a bug": (lambda: errors.note_failure(lambda: _raised(AttributeError("x"))), 500, "Internal"),
    "the body": (raise_of_body, 400, "no such role None"),
}


async def _raised(error: Exception) -> None:
    raise error


@pytest.fixture(scope="module")
def client_of() -> TestClient:
    app = FastAPI()

    @app.post(PATH)
    async def answer(request: Request) -> Any:
        body = await request.json()
        context = RequestContext(PATH, body)
        enter(context)
        put_on(request, context)
        if "case" in body:
            return JSONResponse({"message": await fail(CASES[body["case"]][0])}, 400)

        async def events() -> Any:
            yield CREATED
            if body["fails"] == "too long":
                yield FAILED.replace(b"Aborted", TOO_LONG_TEXT)
                return
            if body["fails"] == "late":
                yield ADDED
            await fail(lambda: abort(503))
            yield ADDED
            yield FAILED

        return StreamingResponse(events(), media_type="text/event-stream")

    app.add_exception_handler(HTTPException, lambda request, error: None)  # type: ignore[arg-type]
    errors.install(app)
    return TestClient(app, raise_server_exceptions=False)


@pytest.mark.parametrize("case", CASES)
def test_an_error_has_the_status_and_the_text_that_sglang_knows(
    client_of: TestClient, case: str
) -> None:
    answer = client_of.post(PATH, json={"case": case})
    _, status, message = CASES[case]
    assert answer.status_code == status
    error = answer.json()["error"]
    assert error["message"].startswith(message)
    assert not error["message"].endswith(" None None")
    assert error["type"] == ("invalid_request_error" if status < 500 else "server_error")


def test_a_stream_that_is_aborted_before_its_content_has_a_status(client_of: TestClient) -> None:
    answer = client_of.post(PATH, json={"fails": "early"})
    assert answer.status_code == 503
    assert answer.json()["error"]["message"] == "Aborted"
    long = client_of.post(PATH, json={"fails": "too long"})  # as Codex looks for it
    assert long.status_code == 200
    assert long.content.startswith(CREATED + b"event: response.failed")
    assert b'"code":"context_length_exceeded"' in long.content
    late = client_of.post(PATH, json={"fails": "late"})
    assert late.status_code == 200
    assert late.content.startswith(CREATED + ADDED + ADDED)


def test_a_client_s_error_is_logged_in_one_line_and_the_server_s_with_its_trace(
    caplog: pytest.LogCaptureFixture,
) -> None:
    errors.quiet_client_faults()
    logger = logging.getLogger(LOGGER)
    for error in (ValueError("no role"), MemoryError("full")):
        try:
            raise error
        except Exception:
            logger.exception("Error in preprocessing prompt inputs")
    rejected, failed = caplog.records
    assert rejected.getMessage() == "Error in preprocessing prompt inputs: ValueError('no role')"
    assert (rejected.exc_info, rejected.levelname) == (None, "WARNING")
    assert failed.exc_info is not None


@pytest.mark.parametrize(
    ("protocol", "kind", "body", "param"),
    [
        (RESPONSES, "json", {"text": {"format": {"a": 1}}, "tools": [1]}, "text.format"),
        (RESPONSES, "structural_tag", {"text": {"format": {"a": 1}}, "tools": [1]}, "text.format"),
        (RESPONSES, "structural_tag", {"text": None, "tools": [1]}, "tools"),
        (CHAT, "regex", {"regex": "("}, "regex"),
        (CHAT, "json", {}, None),
        (COMPLETIONS, "json", {"json_schema": "x"}, "json_schema"),
        (COMPLETIONS, "json", {"response_format": {"a": 1}}, "response_format"),
        *(
            (GENERATE, kind, {"sampling_params": {name: "x"}}, f"sampling_params.{name}")
            for kind, name in (("json", "json_schema"), ("ebnf", "ebnf"), ("structural_tag",) * 2)
        ),
    ],
)
def test_a_grammar_that_cannot_be_made_names_its_field(
    protocol: Any, kind: str, body: Any, param: str | None
) -> None:
    error = with_field(EngineError(400, f"Failed to compile {kind} grammar: x"), protocol, body)
    assert error.param == param
    assert error.message.startswith(param or "Failed")
    if kind == "structural_tag" and body.get("text"):
        assert error.message == "text.format or tools: no grammar can be made of it: x"


async def test_generate_says_in_known_words_that_an_aborted_prompt_is_too_long() -> None:
    async def handle(manager: Any, out: Any) -> Any:
        return out

    text = "Input length (700 tokens) exceeds the maximum allowed length (700 tokens). Use less."
    told = {}
    for path in ("/generate", "/v1/completions"):
        context = RequestContext(path, {})
        reason = {"type": "abort", "message": text, "status_code": 400}
        with entered(context):
            out = await errors.note_abort(handle, None, {"meta_info": {"finish_reason": reason}})
        told[path] = out["meta_info"]["finish_reason"]["message"]
        assert context.failed_status == 400
    assert told["/generate"].startswith("This model's maximum context length is 699 tokens.")
    assert told["/v1/completions"] == text, "the error middleware words it"


@pytest.mark.parametrize(
    ("body", "path", "what"),
    [
        ({"temperature": "x"}, "temperature", "must be a number"),
        ({"max_new_tokens": 1.5, "n": 1}, "max_new_tokens", "must be an integer"),
        ({"n": 1, "ignore_eos": "no"}, "ignore_eos", "must be true or false"),
        ({"stop": ["a", 5]}, "stop.1", "must be a string"),
        ({"stop": 5}, "stop", "must be a string or a list of strings"),
        ({"stop_token_ids": 5}, "stop_token_ids", "must be a list"),
        ({"stop_token_ids": [1, "a"]}, "stop_token_ids.1", "must be an integer"),
        ({"logit_bias": [1]}, "logit_bias", "must be an object"),
        ({"logit_bias": {"5": "x"}}, "logit_bias.5", "must be a number"),
        ({"tempreature": 1}, "tempreature", "is no field"),
        ({"top_k": "a", "temperature": "x"}, "top_k", "must be an integer"),
    ],
)
def test_a_wrong_sampling_parameter_of_generate_is_named(
    body: dict[str, Any], path: str, what: str
) -> None:
    check = sglang_api.generate_contract_error
    for params, place in ((body, ""), ([{}, body], ".1")):
        whole = {"text": "a", "sampling_params": params}
        assert errors.of_contract(whole, check) == (f"sampling_params{place}.{path}", what)
    assert errors.of_contract({"text": "a", "sampling_params": {"temperature": 1}}, check) is None


@pytest.mark.parametrize(
    ("body", "path", "what"),
    [
        ({"text": ["a", 5]}, "text.1", "must be a string"),
        ({"max_thinking_tokens": -5}, "max_thinking_tokens", "must be an integer of at least 0"),
        (
            {"top_logprobs_num": True},
            "top_logprobs_num",
            "must be an integer or a list of integers",
        ),
        ({"image_data": {"a": 1}}, "image_data.a", "is no field"),
        ([], "", "invalid type: sequence, expected struct GenerateRequest"),
        (
            {"x": "y" * 5, "sampling_params": dict.fromkeys(map(str, range(1001)), 1)},
            "sampling_params",
            "is no field",
        ),
    ],
)
def test_a_wrong_field_of_generate_is_named(body: Any, path: str, what: str) -> None:
    assert errors.of_contract(body, sglang_api.generate_contract_error) == (path, what)


@pytest.mark.parametrize(
    ("prompt", "path", "what"),
    [
        (["ok", 5], "prompt.1", "must be a string"),
        (["ok", None], "prompt.1", "must be a string"),
        (["ok", ["x"]], "prompt.1", "must be a string"),
        ([1, "x"], "prompt.1", "must be an integer"),
        ([[1, 2], "x"], "prompt.1", "must be a list"),
        ([[1, 2], [3, "x"]], "prompt.1.1", "must be an integer"),
    ],
)
def test_the_wrong_entry_of_a_list_of_prompts_is_named(
    prompt: list[Any], path: str, what: str
) -> None:
    class Body(BaseModel):
        prompt: list[int] | list[list[int]] | str | list[str]

    with pytest.raises(ValidationError) as refused:
        Body(prompt=prompt)
    found = [{**error, "loc": ("body", *error["loc"])} for error in refused.value.errors()]
    assert errors.fields_of(found) == [(path, what)]
