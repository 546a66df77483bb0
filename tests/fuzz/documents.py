"""JSON requests for the fuzzer: bodies of each protocol, mutated as values and as text."""

from __future__ import annotations

import json
import re
from random import Random
from typing import Any

_MARK = {"type": "ephemeral", "ttl": "1h"}
_TOOL: dict[str, Any] = {"name": "f", "description": "d", "input_schema": {"type": "object"}}
TENANTS = ("", "t", "u", "\xe9")
CONTEXT = {
    "blocks": [
        {"id": "tools", "kind": "tools", "layer": "stable", "content": [_TOOL]},
        {"id": "rules", "layer": "project", "content": "Rules."},
        {"id": "now", "layer": "runtime"},
    ]
}
CONTEXT_ID = "ctx_4be8cfb6f722fa77cf84933f79c0770ad4c7d5ec"
RESPONSE_ID = "resp_1"
_COMMON: dict[str, Any] = {
    "model": "m",
    "stream": True,
    "priority": 5,
    "service_tier": "flex",
    "prompt_cache_key": "k",
    "cache_salt": "s",
    "nvext": {"agent_hints": {"priority": 7, "osl": 50}, "cache_control": _MARK},
    "kv_hints": {"actions": [{"action_type": "kv.pin", "payload": {"ttl": "5m"}}]},
}
_BREAK = {"prompt_cache_breakpoint": {"mode": "explicit"}}
_OPTIONS = {"prompt_cache_options": {"mode": "implicit", "ttl": "30m"}}
_BODIES: dict[str, dict[str, Any]] = {
    "/v1/messages": {
        **_COMMON,
        "max_tokens": 5,
        "system": [{"type": "text", "text": "s", "cache_control": _MARK}],
        "tools": [_TOOL],
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f"}]},
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "t", "content": [{"a": 1}]}],
            },
        ],
    },
    "/v1/chat/completions": {
        **_COMMON,
        "max_completion_tokens": 5,
        "messages": [
            {"role": "system", "content": "x-anthropic-billing-header: a=b;\nhello"},
            {"role": "user", "content": [{"type": "text", "text": "a", **_BREAK}]},
        ],
        **_OPTIONS,
        "stream_options": {"include_usage": True},
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
        "tool_choice": "none",
    },
    "/v1/responses": {
        **_COMMON,
        "max_output_tokens": 5,
        "instructions": "i",
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "a", **_BREAK}]}],
        **_OPTIONS,
        "store": False,
        "background": False,
    },
    "/v1/completions": {**_COMMON, "max_tokens": 5, "prompt": "p"},
    "/generate": {
        "text": "p",
        "sampling_params": {"max_new_tokens": 5},
        "stream": False,
        "extra_key": "e",
        "priority": 3,
    },
}
_NAMING: list[dict[str, Any]] = [
    {"context_id": CONTEXT_ID, "context_blocks": {"now": "Noon."}},
    {"nvext": {"context_id": CONTEXT_ID, "agent_hints": {"priority": 2}}},
    {"previous_response_id": RESPONSE_ID, "store": True},
    {"previous_response_id": RESPONSE_ID, "context_id": CONTEXT_ID},
]
_VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2**63, 2**64 - 1, -(2**63), 0.5, 5.0, 1e300, "", "5", "true"),
    *([], {}, [[]], [None], {"type": 5}, "\u0000", "\ud7ff", "x" * 5000, [{"role": "user"}]),
]
_TOKENS = [
    *("NaN", "Infinity", "-Infinity", "-0", "-0.0", "1e400", "-1e400", "1e-400", "5.0", "5e0"),
    *("123456789012345678901234567890", "-9223372036854775809", "18446744073709551616", "0x5"),
    *("+5", "05", ".5", "5.", "1_0", "1E5", "0.1e1", "true", "True", "null", "nul", "'a'"),
    *('"\\ud800"', '"\\udc00\\ud800"', '"\\ud83d\\ude00"', '"\\u0000"', '"\\x41"', '"a\nb"'),
    *('"\t"', '"\\/"', '""', "[" * 300 + "]" * 300, "[" * 1100 + "]" * 1100),
    *('{"a":' * 600 + "1" + "}" * 600, "[1,]", "{}"),
    *(
        '[{"type":"tool_result","content":' * depth + '"x"' + "}]" * depth
        for depth in (5, 100, 430)
    ),
]
_EXTRAS = [
    *(b"\xef\xbb\xbf", b"\xff\xfe", b"\x00", b" ", b"\n", b"\x0b", b"\xa0", b"/**/", b"{}"),
    *(b",", b"null", b"\xc3", b"\xed\xa0\x80", b"\xc0\x80", b"\xf4\x90\x80\x80", b"#", b"\\"),
    *(b'"', b"}"),
]
_LINES = [
    *(b"x-sgl-ext-session-id: s1", b"session-id: s2", b"x-sgl-ext-session-final: true"),
    *(b"x-sgl-ext-priority: 9", b"X-SGL-EXT-Priority: -3", b"x-dynamo-request-priority: 4"),
    *(b"x-sgl-ext-priority: x", b"x-sgl-ext-priority:", b"x-sgl-ext-priority: +0_5"),
    *(b"x-tenant-id: t", b"x-tenant-id: u", b"x-tenant-id: \xe9", b"x-sgl-ext-cache-group: g"),
    *(b"x-sgl-ext-owner: o", b"connection: x-tenant-id"),
    *(b"connection: x-sgl-ext-priority, session-id", b"session_id: \xff"),
    *(b"x-sgl-ext-queued-s: 5", b"x-sgl-ext-window-s: 1e9", b"anthropic-version: 1"),
    b"content-type: application/json",
]
_SCALAR = re.compile(r'(?<=[\[:,]) ?(?:"[^"\\]*"|-?[0-9.]+|true|false|null)(?=[,}\]])')
_MEMBER = re.compile(r'"[a-z_]+": ')


def request(chance: Random) -> bytes:
    """One request with a body, most of them mutated."""
    path, body = chance.choice(tuple(_BODIES.items()))
    if chance.random() < 0.3:
        body = {**body, **chance.choice(_NAMING)}
    if chance.random() < 0.6:
        body = _altered(chance, body)
    data = json.dumps(body)
    for _ in range(chance.choice((0, 0, 1, 1, 2))):
        data = _mutated(chance, data)
    raw = data.encode("utf-8", "surrogatepass")
    if chance.random() < 0.2:
        at = chance.choice((0, len(raw), chance.randrange(len(raw) + 1)))
        raw = raw[:at] + chance.choice(_EXTRAS) + raw[at:]
    lines = chance.choices(_LINES, k=chance.randrange(4))
    head = [b"POST %b HTTP/1.1" % path.encode(), b"host: here", b"content-type: application/json"]
    return b"\r\n".join([*head, *lines, b"content-length: %d" % len(raw), b"", raw])


def _altered(chance: Random, value: Any) -> Any:
    """A copy with one value, somewhere, replaced or removed."""
    if not isinstance(value, dict | list) or not value or chance.random() < 0.1:
        return chance.choice(_VALUES)
    if isinstance(value, list):
        at = chance.randrange(len(value))
        return [*value[:at], _altered(chance, value[at]), *value[at + 1 :]]
    key = chance.choice(tuple(value))
    if chance.random() < 0.1:
        return {name: each for name, each in value.items() if name != key}
    return {**value, key: _altered(chance, value[key])}


def _mutated(chance: Random, data: str) -> str:
    """The text with a scalar replaced, or a member given twice."""
    spans = [match.span() for match in _SCALAR.finditer(data)]
    if not spans:
        return data
    start, end = chance.choice(spans)
    token = chance.choice(_TOKENS) if chance.random() < 0.6 else json.dumps(chance.choice(_VALUES))
    if chance.random() < 0.4 and (names := list(_MEMBER.finditer(data))):
        name = chance.choice(names)
        return f"{data[: name.start()]}{name[0]}{token}, {data[name.start() :]}"
    return data[:start] + token + data[end:]
