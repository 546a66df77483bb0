"""What libraries found wrong with a body is told as the field's path and one sentence."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from sgl_ext_cpu.nursery import Nursery

from sgl_ext.compat.errors import Wrong, fields_of, of_item, plain
from tests.engine.scheduler.test_event_publisher import Engine, running_engine

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
    assert plain(TEXT) == "messages.2.content: Input should be a valid string"
    assert plain(LISTED) == "text: Input should be a valid list"
    assert plain("n must be positive") == "n must be positive"


def test_an_items_error_names_the_clients_item() -> None:
    said = plain(TEXT)
    items: list[Any] = [{"role": "user", "content": "a"}, {"output": {"a": 1}}]
    assert of_item(said, items) == Wrong("input[1].output", "Input should be a valid string")
    assert of_item(said, "a") == Wrong("input", "Input should be a valid string")
    assert of_item("tools.0.name: Field required", items) is None


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


@pytest.fixture(scope="module")
def engine(
    nursery: Nursery, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    log = tmp_path_factory.mktemp("validation") / "engine.log"
    with running_engine(nursery, tiny_model, log, "--tool-call-parser", "qwen25") as started:
        yield started


CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "a"}]}
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
        whole = {**CHAT, **whole}
    refused = requests.post(engine.url + path, json=whole, timeout=60)
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
    refused = requests.post(f"{engine.url}/generate", json=body, timeout=60)
    assert refused.status_code == 400
    assert "parenthesis is not closed" in refused.json()["error"]["message"]
    assert ".cc" not in refused.text
