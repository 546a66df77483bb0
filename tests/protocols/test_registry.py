"""Protocols are found by path, by name and by what a body looks like."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from sgl_ext.protocols import routes
from sgl_ext.protocols.anthropic import ANTHROPIC
from sgl_ext.protocols.chat import CHAT
from sgl_ext.protocols.errors import OPENAI_ERRORS
from sgl_ext.protocols.registry import PATHS, PROTOCOLS, UNKNOWN, detect, errors_of, of_path
from sgl_ext.protocols.responses import RESPONSES
from sgl_ext.reading.cache_marks import TtlLimits, read_marks
from sgl_ext.reading.protocol import MarkRules, Part, Protocol
from sgl_ext.reading.segments import read_chain
from sgl_ext.reading.strip import HeaderStrip, strip_request

HEADER = "x-anthropic-billing-header: cc_version=2.1;\n"
USER = {"role": "user", "content": "Go."}
CALL = {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "r"}]}
RESULT = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a"}]}
THINKING = {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm."}]}
TEXT = {"role": "assistant", "content": [{"type": "text", "text": "Hi."}]}


def test_each_path_belongs_to_one_protocol() -> None:
    listed = [path for protocol in PROTOCOLS for path in protocol.paths]
    assert len(listed) == len(set(listed))
    assert all(path in of_path(path).paths for path in PATHS)
    assert of_path("/invocations") is of_path("/v1/chat/completions")
    assert of_path("/v1/embeddings") is UNKNOWN


@pytest.mark.parametrize("path", PATHS)
def test_the_balancer_routes_each_path_by_prefix_under_its_own_label(path: str) -> None:
    route = routes.to_one("POST", path)
    assert route is not None
    assert route.placed
    assert route.runs == of_path(path).generates
    assert routes.label_of(path) == path


@pytest.mark.parametrize(
    ("path", "protocol"),
    [
        ("/v1/messages", ANTHROPIC),
        ("/v1/messages/count_tokens", ANTHROPIC),
        ("/v1/messages/batches", ANTHROPIC),
        ("/v1/responses", RESPONSES),
        ("/v1/responses/resp_1/input_items", RESPONSES),
        ("/v1/chat/completions", CHAT),
        ("/generate", CHAT),
        ("/v1/messagesx", CHAT),
        ("/", CHAT),
    ],
)
def test_a_path_below_a_protocols_has_its_errors_and_any_other_has_openais(
    path: str, protocol: Protocol
) -> None:
    assert errors_of(path) is protocol.errors


def test_each_protocol_names_the_request_and_the_message_in_its_errors() -> None:
    body = orjson.loads(ANTHROPIC.errors.body(503, "No.", "req_1", None, None))
    error = {"type": "overloaded_error", "message": "No."}
    assert body == {"type": "error", "error": error, "request_id": "req_1"}
    body = orjson.loads(RESPONSES.errors.body(404, "No.", "req_1", None, "model"))
    error = {"message": "No.", "type": "invalid_request_error", "param": "model", "code": None}
    assert body == {"error": error}
    assert b'"sequence_number":7' in RESPONSES.errors.event("No.", 7, "req_1")


@pytest.mark.parametrize(
    ("headers", "stated", "body", "expected"),
    [
        ({}, None, {"nvext": {"protocol": "chat"}, "input": "Go."}, CHAT),
        ({}, "messages", {"messages": [USER]}, ANTHROPIC),
        ({}, "responses", {"nvext": {"protocol": "chat"}}, CHAT),
        ({}, "responses", {"nvext": {}}, RESPONSES),
        ({}, "generate", {"messages": [USER]}, None),
        ({}, None, {"nvext": {"protocol": 7}, "messages": [USER]}, None),
        ({}, "", {"messages": [USER]}, CHAT),
        ({}, None, {"input": [USER], "messages": [USER]}, RESPONSES),
        ({}, None, {"messages": [USER]}, CHAT),
        ({}, None, {"messages": [USER], "system": "Be."}, ANTHROPIC),
        ({}, None, {"messages": [USER], "system": None}, CHAT),
        ({"anthropic-version": "2023-06-01"}, None, {"messages": [USER]}, ANTHROPIC),
        ({}, None, {"messages": [USER], "tools": [{"name": "r", "input_schema": {}}]}, ANTHROPIC),
        ({}, None, {"messages": [USER], "tools": [{"function": {"name": "r"}}]}, CHAT),
        ({}, None, {"messages": [USER, CALL]}, ANTHROPIC),
        ({}, None, {"messages": [RESULT]}, ANTHROPIC),
        ({}, None, {"messages": [USER, THINKING]}, ANTHROPIC),
        ({}, None, {"messages": [USER, TEXT]}, CHAT),
        ({}, None, {"prompt": "Go."}, None),
        ({}, None, {"messages": "Go."}, None),
        ({}, "chat", None, None),
    ],
)
def test_the_protocol_of_a_body_is_detected(
    headers: dict[str, str], stated: str | None, body: Any, expected: Protocol | None
) -> None:
    assert detect(headers, stated, body) is expected


def test_a_protocol_needs_only_paths_errors_and_its_prompts_fields() -> None:
    """The example of docs/how/architecture.md."""
    example = Protocol(
        paths=("/v2/chat",),
        errors=OPENAI_ERRORS,
        prompt=(
            (Part.TOOLS, "tools"),
            (Part.INSTRUCTIONS, "preamble"),
            (Part.MESSAGES, "turns"),
        ),
        marks=MarkRules(),
    )
    body = {"preamble": f"{HEADER}Be brief.", "turns": [USER]}
    stripped = strip_request(example, body, HeaderStrip()).body
    assert stripped == {"preamble": "Be brief.", "turns": [USER]}
    chat = {"messages": [{"role": "system", "content": "Be brief."}, USER]}
    assert read_chain(example, stripped) == read_chain(CHAT, chat)
    marked = body | {"nvext": {"cache_control": {"type": "ephemeral", "ttl": "1h"}}}
    assert read_marks(example, marked, TtlLimits(60, 7200)).whole_ttl_s == 3600
