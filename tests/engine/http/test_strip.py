"""The strip on real engines: a prompt with a header has the tokens of the prompt without it.

Proven by the radix cache, which compares token ids: when a prompt's twin was
answered just before, all of it but the last token is read from the cache.
"""

from __future__ import annotations

from typing import Any

import pytest
import requests
from sgl_ext_cpu.node import Node

from tests.reading.test_strip import CASES, HEADER, S, text
from tests.waiting import HANG_S, until

LEFT = {
    "/v1/messages": {"max_tokens": 1, "messages": [{"role": "user", "content": "hello"}]},
    "/v1/messages/count_tokens": {},
    "/v1/chat/completions": {"max_tokens": 1},
    "/v1/responses": {"max_output_tokens": 3, "input": "hello", "store": False},
    "/v1/completions": {"max_tokens": 1},
    "/generate": {"sampling_params": {"max_new_tokens": 1}},
}
ONE_PROMPT = [
    case
    for case in CASES
    if case[0] in LEFT and not isinstance(case[1].get("prompt", case[1].get("text")), list)
]


def tokens(node: Node, path: str, body: dict[str, Any]) -> tuple[int, int]:
    """All prompt tokens of an answer, and the cached ones."""
    complete = (
        {**LEFT[path], **body} if path == "/generate" else {"model": "tiny", **LEFT[path], **body}
    )
    answer = node.post(path, complete)
    assert answer.ok, answer.text
    document = answer.json()
    if path == "/generate":
        return document["meta_info"]["prompt_tokens"], document["meta_info"]["cached_tokens"]
    usage = document.get("usage", document)
    if path.startswith("/v1/messages"):
        cached = usage.get("cache_read_input_tokens") or 0
        return usage["input_tokens"] + cached, cached
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    return usage.get("prompt_tokens") or usage["input_tokens"], details.get("cached_tokens", 0)


@pytest.mark.parametrize(("path", "headed", "plain"), ONE_PROMPT)
def test_a_prompt_with_a_header_has_the_tokens_of_the_prompt_without_it(
    node: Node, path: str, headed: dict[str, Any], plain: dict[str, Any]
) -> None:
    node.flush()
    whole, _ = tokens(node, path, plain)
    if path.endswith("count_tokens"):
        assert tokens(node, path, headed) == (whole, 0)
    else:
        assert tokens(node, path, headed) == (whole, whole - 1)


def test_chat_token_ids_are_equal_one_by_one(node: Node) -> None:
    def ids(system: str) -> list[int]:
        messages = [{"role": "system", "content": system}, {"role": "user", "content": "hello"}]
        body = {"model": "m", "max_tokens": 1, "return_prompt_token_ids": True}
        answer = node.post("/v1/chat/completions", {**body, "messages": messages})
        found: list[int] = answer.json()["choices"][0]["prompt_token_ids"]
        return found

    assert ids(f"{HEADER}\r\n{S}") == ids(S)
    assert ids(f"{S}\n{HEADER}") != ids(S)


def test_a_header_elsewhere_reaches_the_model_and_is_counted(node: Node) -> None:
    plain: dict[str, Any] = {"system": S, "messages": [{"role": "user", "content": "explain"}]}
    echo = {**plain, "messages": [{"role": "user", "content": f"{HEADER}\nexplain"}]}
    stripped = node.metric("sgl_ext_headers_stripped_total")
    left = node.metric("sgl_ext_headers_not_stripped_total")
    assert tokens(node, "/v1/messages", echo)[0] > tokens(node, "/v1/messages", plain)[0] + 20
    assert node.metric("sgl_ext_headers_not_stripped_total") == left + 1
    assert node.metric("sgl_ext_headers_stripped_total") == stripped
    tokens(node, "/v1/messages", {**plain, "system": [text(HEADER), text(S)]})
    assert node.metric("sgl_ext_headers_stripped_total") == stripped + 1


def test_an_engine_stops_work_when_its_client_disconnects(node: Node) -> None:
    body = {"model": "m", "max_tokens": 100_000, "stream": True}
    body["messages"] = [{"role": "user", "content": "go on"}]
    with node.post("/v1/messages", body, stream=True) as answer:
        assert next(answer.iter_lines())

    def is_idle() -> bool:
        loads = [requests.get(f"{url}/v1/loads", timeout=HANG_S).json() for url in node.engines]
        return not any(rank["num_running_reqs"] for load in loads for rank in load["loads"])

    until(is_idle)
