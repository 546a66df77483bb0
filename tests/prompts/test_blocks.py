"""Blocks: what a client wrote as one, and together exactly what chains are hashes of."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_ext.prompts.blocks import read_blocks
from sgl_ext.protocols.registry import GENERATING_PATHS, of_path
from sgl_ext.reading.segments import read_chain
from tests.prompts.examples import CHAT, MESSAGES, RESPONSES, messages

PATHS = [path for path in GENERATING_PATHS if of_path(path).turns_field]
texts = st.text(max_size=12)
parts = st.one_of(
    texts.map(lambda text: {"type": "text", "text": text}),
    st.fixed_dictionaries({"type": st.just("tool_use"), "name": texts, "input": st.just({})}),
    st.fixed_dictionaries({"type": st.just("tool_result"), "content": texts}),
    texts,
)
contents = st.one_of(st.none(), texts, st.lists(parts, max_size=3))
said = st.one_of(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["user", "assistant", "system", "developer", "tool"]),
            "content": contents,
        },
        optional={"tool_calls": st.just([{"id": "1", "function": {"name": "f"}}]), "x": texts},
    ),
    st.fixed_dictionaries({"type": st.just("function_call_output"), "output": texts}),
    texts,
)
tools = st.lists(st.fixed_dictionaries({"name": texts}), max_size=3)
bodies = st.fixed_dictionaries(
    {},
    optional={
        "tools": tools,
        "system": contents,
        "instructions": contents,
        "messages": st.lists(said, max_size=4),
        "input": st.one_of(texts, st.lists(said, max_size=4)),
    },
)


def whole(path: str, body: Any) -> bytes:
    return b"".join(block.frame + block.text for block in read_blocks(of_path(path), body))


def labels(path: str, body: Any) -> list[str]:
    return [block.label for block in read_blocks(of_path(path), body)]


@given(st.sampled_from(sorted(PATHS)), bodies, bodies, st.sampled_from(["tools", "messages", ""]))
def test_blocks_are_equal_exactly_where_chains_are(
    path: str, left: dict[str, Any], right: dict[str, Any], changed: str
) -> None:
    if changed:
        right = {**left, changed: right.get(changed)}
    ours, theirs = read_chain(of_path(path), left), read_chain(of_path(path), right)
    assert (_closed(path, left) == _closed(path, right)) == (ours.hashes[-1:] == theirs.hashes[-1:])


def _closed(path: str, body: Any) -> bytes:
    """The canonical text; the end of a list of tools alone is no block's."""
    blocks = read_blocks(of_path(path), body)
    text = whole(path, body)
    return text + b"]" if blocks and blocks[-1].part == "tools" else text


@given(st.sampled_from(sorted(PATHS)), bodies)
def test_ends_are_those_of_the_chain(path: str, body: dict[str, Any]) -> None:
    chain, text = read_chain(of_path(path), body), _closed(path, body)
    assert len(text) == (chain.ends[-1] if chain.ends else 0)
    blocks = read_blocks(of_path(path), body)
    if blocks:
        assert blocks[-1].end == len(whole(path, body))


@given(st.sampled_from(sorted(PATHS)), bodies)
def test_the_head_ends_where_the_chains_head_ends(path: str, body: dict[str, Any]) -> None:
    chain, blocks = read_chain(of_path(path), body), read_blocks(of_path(path), body)
    head = [block for block in blocks if block.in_head]
    ends = (0, *chain.ends)
    closes = bool(head) and head[-1].part == "tools"
    assert ends[chain.head_segments] == (head[-1].end + closes if head else 0)


def test_labels_are_places_in_the_body() -> None:
    assert labels(MESSAGES, messages(1)) == [
        *(f"tools[{n}]" for n in range(6)),
        "system[0]",
        "system[1]",
        "messages[0].content",
        "messages[1].content[0]",
        "messages[1].content[1]",
        "messages[2].content[0]",
    ]
    chat = {
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
        ]
    }
    assert labels(CHAT, chat) == ["messages[0].content", "messages[1].tool_calls"]
    responses = {"instructions": "s", "input": [{"type": "function_call", "name": "f"}, "x"]}
    assert labels(RESPONSES, responses) == ["instructions", "input[0]", "input[1]"]


@pytest.mark.parametrize("body", [None, [], {"messages": 3}, {"tools": [{1: 2}]}, {"input": {}}])
def test_a_malformed_body_has_no_blocks(body: Any) -> None:
    assert all(read_blocks(of_path(path), body) == [] for path in PATHS)
