"""Paths that a client's base URL has made of those that are served."""

from __future__ import annotations

import pytest

from sgl_ext.protocols.registry import path_meant
from sgl_ext.protocols.routes import (
    is_beside_responses,
    is_service_beside_responses,
    not_found,
    to_one,
)


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("//v1/messages", "/v1/messages"),
        ("/v1/v1/messages", "/v1/messages"),
        ("/v1//v1/messages/count_tokens", "/v1/messages/count_tokens"),
        ("/messages", "/v1/messages"),
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/v1/responses/", "/v1/responses"),
        ("/v1/v1/models", "/v1/models"),
        ("/anthropic/v1/messages", "/v1/messages"),
        ("/openai/v1/chat/completions", "/v1/chat/completions"),
        ("/api/v1/v1/responses", "/v1/responses"),
    ],
)
def test_the_base_url_that_is_meant_is_named(path: str, meant: str) -> None:
    assert path_meant(path) == meant
    said = not_found("POST", path)
    assert said.startswith(f"POST {path}: Not Found. {meant} is served: ")
    is_anthropics = meant.startswith("/v1/messages")
    assert said.endswith("http://127.0.0.1:30000" + ("" if is_anthropics else "/v1"))


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/files", "/generate", "/", "/v1/v1"])
def test_another_path_means_itself(path: str) -> None:
    assert path_meant(path) == path
    assert not_found("GET", path) == f"GET {path}: Not Found"


def test_services_beside_stored_responses_are_no_ids() -> None:
    assert is_beside_responses("/v1/responses/compact")
    assert not is_beside_responses("/v1/responses/resp_1/cancel")
    assert not is_beside_responses("/v1/responses")
    assert is_service_beside_responses("/v1/responses/input_tokens")
    assert not is_service_beside_responses("/v1/responses/my-own-id")


def test_a_list_has_a_head() -> None:
    assert to_one("HEAD", "/v1/models") is to_one("GET", "/v1/models")
