"""Requests for a real engine, with fields of every protocol in and out of their ranges.

A case is made of its number alone. Most of its fields are right, so that what is wrong gets as far
as it can. `tests/engine/http/test_field_ranges.py` sends them: whatever they are, the engine
answers each, and goes on.
"""

from __future__ import annotations

import json
from random import Random
from typing import Any

from sgl_ext.engine.fields.ranges import GENERATION, SAMPLING

MESSAGES = [{"role": "user", "content": "hi"}]
TOOL = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}
_EDGES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 7, 128, 129, 1000, 1001, 8191, 8192, -9),
    *(2**31 - 1, 2**31, 2**53, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 2**64, 10**18, 10**30),
    *(0.0, 0.5, 1.5, -0.1, 2.0, 2.1, 1e-7, 1e-30, 1e-300, 1e30, 1e300, -1e300),
    *(float("nan"), float("inf"), float("-inf")),
    *(
        "",
        "a",
        "\x00",
        "é\U0001f600",
        "x" * 70,
        "x" * 5000,
        "0",
        "auto",
        "([",
        "(a*)*$",
        "selected",
    ),
    *([], [0], [1, 2], [8192], [-1], [2**63], [True], ["a"], [None], [[1]], [[]], [1.5], [{}]),
    *({}, {"a": 1}, {"5": 100}, {"5": 1e300}, {"-1": 1}, {"8192": 1}, {"x": [[1]]}, {"id": "s"}),
    *({"id": 5}, {"n": 3}, {"thinking_budget": -1}, {"thinking_budget": "a"}, {"a": {"b": {}}}),
)
_PATTERNS = ("(a+)+$", "a|b", "(?=a)", "(a)\\1", "[", "\\d{1,1000}", "(.*)*(.*)*x", "$", "^", "")
_RIGHT: dict[str, tuple[Any, ...]] = {
    "return_logprob": (True,),
    "logprobs": (True, 1, 5),
    "stream": (True,),
    "temperature": (1, 0, 1e-5, 1000, 0.7),
    "top_p": (1e-30, 0.5, 1),
    "top_k": (1, 20, -1, 2**30),
    "min_p": (0, 1, 0.3),
    "repetition_penalty": (1e-6, 2, 1.1),
    "frequency_penalty": (-2, 2),
    "presence_penalty": (-2, 2),
    "logit_bias": ({"5": 1e6}, {"5": -1e6, "6": 100}, {str(i): -1e6 for i in range(9000)}),
    "n": (1, 2, 3),
    "min_new_tokens": (0, 1, 2),
    "min_tokens": (0, 1, 2),
    "stop": ("a", ["a", "b"], "", [""], ["x" * 1024] * 4),
    "stop_sequences": (["a"], [""]),
    "stop_regex": (*_PATTERNS, list(_PATTERNS)),
    "stop_token_ids": ([0], [8191], [1, 2, 3]),
    "token_ids_logprob": ([0], [8191], [1, 2, 3]),
    "logprob_start_len": (-1, 0, 1),
    "top_logprobs_num": (0, 1, 20, 1000),
    "top_logprobs": (0, 1, 20),
    "regex": (*_PATTERNS, "[a-z]{1,5}"),
    "ebnf": ('root ::= "a" | "b"', "root ::= root", "root ::= [a-z]{1,99}", "nothing"),
    "json_schema": (json.dumps(SCHEMA), "{}", "true", "[", '{"type": 5}', '{"$ref": "#/a"}'),
    "structural_tag": ('{"type": "structural_tag", "format": {"type": "any_text"}}', "{}", "5"),
    "response_format": (
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
        {"type": "structural_tag", "structures": [], "triggers": []},
    ),
    "tools": ([{"type": "function", "function": TOOL}],),
    "tool_choice": ("auto", "none", "required"),
    "custom_params": ({"thinking_budget": 5}, {"__sglang_reasoning_in_grammar": True}),
    "chat_template_kwargs": ({"messages": []}, {"tools": 1}, {"namespace": 1}, {"a": {}}),
    "session_params": ({"id": "none"}, {"id": "s", "rid": "r", "offset": 3, "replace": True}),
    "return_hidden_states": (True, "last"),
    "sampling_logprobs_mode": ("selected", "support"),
    "watermark": ({"enabled": True, "key": "k"}, {"enabled": False}),
    "input_embeds": ([[0.1] * 64], [[float("nan")] * 64], [[0.1]]),
}
_GENERATE, _SAMPLING_FIELDS = "/generate", tuple(SAMPLING)
_OPENAI = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty"),
    *("presence_penalty", "logit_bias", "n", "min_tokens", "stop", "stop_regex", "stop_token_ids"),
    *("regex", "ebnf", "response_format", "custom_params", "seed", "stream", "logprobs", "echo"),
    *("no_stop_trim", "ignore_eos", "skip_special_tokens", "session_params", "lora_path", "rid"),
    *("return_hidden_states", "custom_logit_processor", "extra_key", "cache_salt", "priority"),
    *("bootstrap_room", "bootstrap_port", "bootstrap_host", "routed_dp_rank", "watermark"),
    *("data_parallel_rank", "disagg_prefill_dp_rank", "custom_labels", "stream_options"),
    *("token_ids_logprob", "logprob_start_len", "return_routed_experts", "max_thinking_tokens"),
)
_CHAT = (
    *_OPENAI,
    *("top_logprobs", "tools", "tool_choice", "chat_template_kwargs", "reasoning_effort"),
    *("continue_final_message", "separate_reasoning", "stream_reasoning", "input_ids", "thinking"),
)
_LIMITED = ("max_new_tokens", "max_tokens", "max_completion_tokens", "max_output_tokens")
_BASES: tuple[tuple[str, dict[str, Any], tuple[str, ...], str], ...] = (
    (_GENERATE, {"text": "hi there all"}, tuple(GENERATION), ""),
    ("/v1/chat/completions", {"model": "tiny", "messages": MESSAGES}, _CHAT, "max_tokens"),
    ("/v1/completions", {"model": "tiny", "prompt": "hi there"}, _OPENAI, "max_tokens"),
    (
        "/v1/messages",
        {"model": "tiny", "messages": MESSAGES},
        ("temperature", "top_p", "top_k", "stop_sequences", "stream", "tool_choice", "thinking"),
        "max_tokens",
    ),
    (
        "/v1/responses",
        {"model": "tiny", "input": "hi"},
        (*_CHAT, "max_tool_calls", "text", "reasoning", "include"),
        "max_output_tokens",
    ),
    (
        "/api/generate",
        {"model": "tiny", "prompt": "hi", "stream": False},
        ("options",),
        "",
    ),
)
_WRITTEN = 3
"""Tokens of an answer, if the case does not change it."""


def case(source: Random, vocab_size: int = 8192) -> tuple[str, bytes]:
    """The path and the body of one request."""
    path, base, fields, limit = source.choices(_BASES, weights=(10, 5, 4, 2, 3, 1))[0]
    body = dict(base)
    if path == _GENERATE:
        params: Any = {"max_new_tokens": _WRITTEN}
        for name in source.sample(_SAMPLING_FIELDS, source.choice((0, 1, 1, 2, 3))):
            params[name] = _value(source, name)
        _bound(params)
        body["sampling_params"] = params
        if source.random() < 0.05:
            body["sampling_params"] = source.choice(([params], [params, {}], 5, [], [5], None))
        if source.random() < 0.4:
            del body["text"]
            body["input_ids"] = _ids(source, vocab_size)
        if source.random() < 0.1:
            body.pop("input_ids", None)
            body["text"] = source.choice((["a", "b"], [], [""], "", ["a"] * 129, [5], [["a"]]))
    elif path == "/api/generate":
        names = source.sample(("temperature", "top_k", "top_p", "stop", "seed", "num_predict"), 2)
        body["options"] = {"num_predict": _WRITTEN} | {n: _value(source, n) for n in names}
        if body["options"]["num_predict"] not in (0, 1, 2, 3):
            # Not -1 and -2: they ask for an answer without a limit.
            body["options"]["num_predict"] = source.choice((-3, -9, 1.5, "a", []))
        return path, json.dumps(body).encode()
    else:
        body[limit] = _WRITTEN
        if path == "/v1/completions" and source.random() < 0.5:
            body["prompt"] = _ids(source, vocab_size)
    for name in source.sample(fields, source.choice((0, 1, 1, 2, 3))):
        if name not in ("text", "input_ids", "sampling_params"):
            body[name] = _value(source, name)
    _bound(body)
    return path, json.dumps(body).encode()


def _value(source: Random, name: str) -> Any:
    if name in _RIGHT and source.random() < 0.75:
        return source.choice(_RIGHT[name])
    return source.choice(_EDGES)


def _bound(fields: dict[str, Any]) -> None:
    """Lets no answer be long: an engine would write it for minutes."""
    for name in _LIMITED:
        value = fields.get(name, _WRITTEN)
        is_long = type(value) in (int, float) and _WRITTEN < value < 2**64
        if value is None or is_long:
            fields[name] = _WRITTEN


def _ids(source: Random, vocab_size: int) -> Any:
    edges = (0, 1, vocab_size - 1, vocab_size, -1, 2**31, 2**63 - 1, 2**63, 1.5, "a", None, True)
    kind = source.random()
    if kind < 0.6:
        return [source.randrange(vocab_size) for _ in range(source.choice((1, 2, 30)))]
    if kind < 0.8:
        return [1, 2, source.choice(edges)]
    if kind < 0.9:
        return [[1, 2], [source.choice(edges)]]
    return source.choice(([], [[]], [[1], []], [[[1]]], [[1]] * 129, 5, {}, [source.choice(edges)]))
