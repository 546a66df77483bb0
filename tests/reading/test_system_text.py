"""The strip changes the system texts of every protocol, and nothing else."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_ext.protocols.registry import of_path
from sgl_ext.reading.strip import HeaderStrip, strip_request

HEADER = "x-anthropic-billing-header: cc_version=2.1.197.3af; cc_entrypoint=sdk-cli;"
S = "You are a coding agent."
STRIP = HeaderStrip()


def text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


USER = {"role": "user", "content": "hello"}
ECHO = {"role": "user", "content": f"{HEADER}\nwhat is this line?"}
RESULT = {
    "role": "user",
    "content": [{"type": "tool_result", "tool_use_id": "t", "content": HEADER}],
}


def anthropic(system: Any, *messages: Any) -> dict[str, Any]:
    return {"system": system, "messages": [*messages, USER]}


def openai(*content: Any, role: str = "system") -> dict[str, Any]:
    return {"messages": [*({"role": role, "content": c} for c in content), USER]}


CASES = [
    ("/v1/messages", anthropic([text(HEADER), text(S)]), anthropic([text(S)])),
    ("/v1/messages", anthropic([text(HEADER + "\n"), text(S)]), anthropic([text(S)])),
    ("/v1/messages", anthropic(f"{HEADER}\n{S}"), anthropic(S)),
    ("/v1/messages", anthropic([text(S), text(f"{HEADER}\nx")]), anthropic([text(S), text("x")])),
    ("/v1/messages", anthropic(HEADER), {"messages": [USER]}),
    ("/v1/messages", anthropic([text(HEADER)]), {"messages": [USER]}),
    ("/v1/messages/count_tokens", anthropic([text(HEADER), text(S)]), anthropic([text(S)])),
    (
        "/v1/messages",
        anthropic(S, {"role": "system", "content": f"{HEADER}\nmind the gap"}),
        anthropic(S, {"role": "system", "content": "mind the gap"}),
    ),
    ("/v1/messages", anthropic(S, {"role": "system", "content": [text(HEADER)]}), anthropic(S)),
    ("/v1/chat/completions", openai(f"{HEADER}\n{S}"), openai(S)),
    ("/v1/chat/completions", openai([text(HEADER), text(S)]), openai([text(S)])),
    ("/v1/chat/completions", openai(f"{HEADER}{S}", role="developer"), openai(S, role="developer")),
    ("/v1/chat/completions", openai(HEADER), openai()),
    ("/v1/responses", {"instructions": f"{HEADER}\n{S}"}, {"instructions": S}),
    ("/v1/responses", {"instructions": HEADER, "input": "hi"}, {"input": "hi"}),
    (
        "/v1/responses",
        {"input": [{"role": "developer", "content": [text(HEADER), text(S)]}, USER]},
        {"input": [{"role": "developer", "content": [text(S)]}, USER]},
    ),
    ("/v1/completions", {"prompt": f"{HEADER}\n{S}"}, {"prompt": S}),
    ("/v1/completions", {"prompt": [f"{HEADER}\n{S}", S]}, {"prompt": [S, S]}),
    ("/generate", {"text": f"{HEADER}\n{S}"}, {"text": S}),
    ("/generate", {"text": [HEADER, S]}, {"text": ["", S]}),
    ("/api/chat", openai(f"{HEADER}\n{S}"), openai(S)),
    ("/api/generate", {"system": HEADER, "prompt": S}, {"prompt": S}),
    ("/vertex_generate", {"instances": [{"text": HEADER + S}]}, {"instances": [{"text": S}]}),
]

UNTOUCHED = [
    ("/v1/messages", {"system": S, "messages": [ECHO, RESULT]}),
    ("/v1/messages", anthropic([text(f"{S}\n{HEADER}\n")])),
    ("/v1/messages", {"system": text(HEADER), "messages": [USER]}),
    ("/v1/chat/completions", {"messages": [ECHO, {"role": "tool", "content": HEADER}]}),
    ("/v1/chat/completions", {"messages": [{"role": "assistant", "content": HEADER}]}),
    ("/v1/responses", {"input": HEADER}),
    ("/v1/responses", {"input": [ECHO]}),
    ("/v1/completions", {"prompt": [1, 2, 3]}),
    ("/generate", {"input_ids": [[1], [2]]}),
    ("/v1/embeddings", {"input": HEADER}),
    ("/unknown", {"system": HEADER}),
]


@pytest.mark.parametrize(("path", "body", "wanted"), CASES)
def test_system_texts_are_stripped_and_the_body_is_not_changed_in_place(
    path: str, body: Any, wanted: Any
) -> None:
    before = copy.deepcopy(body)
    stripped = strip_request(of_path(path), body, STRIP)
    assert stripped.body == wanted
    assert stripped.headers == 1
    assert stripped.fields["cc_entrypoint"] == "sdk-cli"
    assert body == before


@pytest.mark.parametrize(("path", "body"), UNTOUCHED)
def test_header_like_lines_elsewhere_stay(path: str, body: Any) -> None:
    stripped = strip_request(of_path(path), body, STRIP)
    assert stripped.body is body
    assert stripped.headers == 0


leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just(HEADER)
json_values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["role", "content", "text", "type", "system", "messages", "input"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=20,
)
bodies = st.fixed_dictionaries(
    {},
    optional=dict.fromkeys(
        ("system", "messages", "instructions", "input", "prompt", "text", "instances"), json_values
    ),
)
paths = st.sampled_from(sorted({path for path, *_ in CASES}))


@given(paths, bodies | json_values)
def test_the_strip_never_raises_and_is_idempotent(path: str, body: Any) -> None:
    once = strip_request(of_path(path), body, STRIP)
    twice = strip_request(of_path(path), once.body, STRIP)
    assert twice.body is once.body
    assert twice.headers == 0
    if not once.headers:
        assert once.body is body
