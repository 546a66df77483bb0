"""No reader raises on a body whose fields have any type."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_ext.protocols.prompt_cache import read_kv_hints
from sgl_ext.protocols.registry import PATHS, detect, of_path
from sgl_ext.reading.cache_marks import TtlLimits, read_marks
from sgl_ext.reading.client import session_key, stated_session
from sgl_ext.reading.hints import read_importance
from sgl_ext.reading.next_turn import partial_turn
from sgl_ext.reading.places import locate
from sgl_ext.reading.protocol import Model
from sgl_ext.reading.rewriting import translate
from sgl_ext.reading.segments import read_chain, with_sorted_tools
from sgl_ext.reading.strip import HeaderStrip, strip_request

FIELDS = st.sampled_from(
    [
        *("messages", "input", "system", "tools", "tool_choice", "content", "role", "type", "text"),
        *("cache_control", "ttl", "nvext", "agent_hints", "priority", "osl", "metadata", "user_id"),
        *("service_tier", "prompt_cache_key", "prompt_cache_retention", "model", "prompt"),
        *("prompt_cache_options", "prompt_cache_breakpoint", "mode", "kv_hints", "actions"),
        *("action_type", "action_version", "payload", "output"),
        *("thinking", "source", "name", "input_schema", "function", "arguments", "call_id"),
    ]
)
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=4)
    | st.sampled_from(["user", "system", "ephemeral", "1h", "tool_use", "image", "namespace"])
    | st.sampled_from(["explicit", "kv.pin", "demote"])
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(FIELDS, inner, max_size=5),
    max_leaves=25,
)
STRIP = HeaderStrip(("x-anthropic-billing-header",))


def read_all(path: str, body: Any) -> None:
    """Reads a body as the balancer and the engine do before SGLang sees it."""
    protocol = of_path(path)
    stripped = strip_request(protocol, body, STRIP).body
    assert strip_request(protocol, stripped, STRIP).body is stripped
    read_kv_hints(stripped)
    marks = read_marks(protocol, stripped, TtlLimits(1.0, 3600.0, 300.0, 0.0))
    chain = read_chain(protocol, with_sorted_tools(stripped))
    read_importance({}, stripped, 100)
    session_key({}, stripped, chain)
    stated_session({}, stripped)
    detect({}, None, stripped)
    partial_turn(protocol, stripped, "nonce")
    if isinstance(stripped, dict):
        locate(
            protocol,
            stripped,
            [mark.place for mark in marks.blocks],
            lambda copy: str(copy)[:1000],
        )
    model = Model(sees=False)
    translated = translate(protocol, stripped, model).body
    assert translate(protocol, translated, model).body == translated


@given(st.sampled_from(sorted(PATHS)), VALUES)
def test_no_reader_raises(path: str, body: Any) -> None:
    read_all(path, body)


@pytest.mark.parametrize("path", sorted(PATHS))
@pytest.mark.parametrize("field", ["messages", "input", "system", "tools", "metadata", "nvext"])
@pytest.mark.parametrize(
    "value",
    [
        b"[" * 1000 + b"]" * 1000,
        b'{"content":' * 1000 + b"1" + b"}" * 1000,
        b"[" + b'{"type":"custom","name":"n"},' * 10_000 + b"{}]",
        b"18446744073709551615",
        b'"\\u0000\\ufffd"',
    ],
)
def test_deeply_nested_and_long_bodies_are_read(path: str, field: str, value: bytes) -> None:
    read_all(path, orjson.loads(b'{"%b": %b}' % (field.encode(), value)))
