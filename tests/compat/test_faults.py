"""Errors that SGLang answers with another status or text than they have."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from fastapi import FastAPI, HTTPException, Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.testclient import TestClient

from sgl_ext.compat import errors
from sgl_ext.compat.errors import EngineError, with_field
from sgl_ext.engine.core.request_context import RequestContext, enter, put_on
from sgl_ext.protocols.chat import CHAT
from sgl_ext.protocols.responses import RESPONSES

PATH = "/v1/responses"
LOGGER = "sglang.srt.entrypoints.openai.serving_responses"
CREATED = b'event: response.created\ndata: {"type": "response.created"}\n\n'
ADDED = b'event: response.output_item.added\ndata: {"type": "x"}\n\n'
FAILED = b'event: response.failed\ndata: {"response": {"error": {"message": "Aborted"}}}\n\n'

TOO_LONG = b"The input (9 tokens) is longer than the model's context length (5 tokens)."


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
def client() -> TestClient:
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
                yield FAILED.replace(b"Aborted", TOO_LONG)
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
    client: TestClient, case: str
) -> None:
    answer = client.post(PATH, json={"case": case})
    _, status, message = CASES[case]
    assert answer.status_code == status
    error = answer.json()["error"]
    assert error["message"].startswith(message)
    assert not error["message"].endswith(" None None")
    assert error["type"] == ("invalid_request_error" if status < 500 else "server_error")


def test_a_stream_that_is_aborted_before_its_content_has_a_status(client: TestClient) -> None:
    answer = client.post(PATH, json={"fails": "early"})
    assert answer.status_code == 503
    assert answer.json()["error"]["message"] == "Aborted"
    long = client.post(PATH, json={"fails": "too long"})  # as Codex looks for it
    assert long.status_code == 200
    assert long.content.startswith(CREATED + b"event: response.failed")
    assert b'"code":"context_length_exceeded"' in long.content
    late = client.post(PATH, json={"fails": "late"})
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
    ],
)
def test_a_grammar_that_cannot_be_made_names_its_field(
    protocol: Any, kind: str, body: Any, param: str | None
) -> None:
    error = with_field(EngineError(400, f"Failed to compile {kind} grammar: x"), protocol, body)
    assert error.param == param
    assert error.message.startswith(param or "Failed")
    if kind == "structural_tag" and body["text"]:
        assert error.message == "text.format or tools: no grammar can be made of it: x"
