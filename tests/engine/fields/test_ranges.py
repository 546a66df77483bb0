"""The table of fields has every field of SGLang, and says what is out of range."""

from __future__ import annotations

import dataclasses
import pkgutil
import warnings
from typing import Any

import orjson
import pytest

from docs import field_ranges
from sgl_ext.engine.fields import ranges
from sgl_ext.engine.fields.patterns import Grammar, Schema
from sgl_ext.engine.fields.ranges import EMBEDDING, GENERATION, INT64, SAMPLING, Check, Model, Whole
from sgl_ext.engine.sglang_versions import TESTED, installed

MODEL = Model(vocab_size=100, context_tokens=1_000, hidden_size=2, prompt_tokens=10)
RIGHT: dict[str, list[Any]] = {
    "max_new_tokens": [0, INT64],
    "stop": ["a", ["a"] * 32, ["x" * 1024] * 4, []],
    "stop_token_ids": [[0, 99], []],
    "stop_regex": ["(a+)+$", ["a", "b"]],
    "temperature": [0, 0.7, 1000],
    "top_p": [1e-30, 1],
    "top_k": [-1, 1, 1 << 30],
    "repetition_penalty": [1e-6, 2],
    "n": [1, 128],
    "stream_interval": [1],
    "logit_bias": [{"0": 1, "99": -1e6}, {5: 1}],
    "sampling_seed": [-(2**63), INT64],
    "custom_params": [{"a": [1, "x", None]}, {"thinking_budget": 0}, {"a": {"b": 1.5}}],
    "json_schema": ["{}", "not JSON"],
}
WRONG: dict[str, list[Any]] = {
    "max_new_tokens": [-1, 1.5, "1", True, INT64 + 1],
    "stop": [5, [5], ["a"] * 33, "x" * 1025, ["x" * 1024] * 5],
    "stop_token_ids": [[-1], [100], [1.0], [True], 5, "1", [0] * 1001],
    "stop_regex": [5, "(?=a)b", "(a)\\1", "(", "x" * 257, ["a"] * 33],
    "temperature": [-0.1, 1001, "1", float("nan"), float("inf"), True],
    "top_p": [0, 1e-300, 1.1, float("nan")],
    "top_k": [0, -2, 10**18, 1.0, True],
    "repetition_penalty": [0, 1e-300, 2.1],
    "n": [0, -1, 129, 10**9],
    "stream_interval": [0, -1, 2**31],
    "logit_bias": [{"-1": 1}, {"100": 1}, {"a": 1}, {"5": 1e300}, {"5": float("nan")}, [1]],
    "sampling_seed": [2**63, 1.0, True],
    "custom_params": [{"a": {"b": {}}}, {"thinking_budget": "a"}, {"a": 2**64}, [], {"a": [[1]]}],
    "json_schema": [{}, "x" * (1 << 20) + "x"],
}


@pytest.mark.parametrize(
    ("table", "path"),
    [
        (SAMPLING, "sglang.srt.sampling.sampling_params:SamplingParams"),
        (GENERATION, "sglang.srt.managers.io_struct:GenerateReqInput"),
        (EMBEDDING, "sglang.srt.managers.io_struct:EmbeddingReqInput"),
    ],
    ids=["sampling", "generation", "embedding"],
)
def test_every_field_of_sglang_is_in_the_table_and_no_other(
    table: dict[str, Check], path: str
) -> None:
    with warnings.catch_warnings(action="ignore"):  # SGLang's, while it is imported
        described = pkgutil.resolve_name(path)
    if dataclasses.is_dataclass(described):
        fields = {field.name for field in dataclasses.fields(described)}
    else:
        fields = set(described.__struct_fields__)
    # An older version has fewer.
    assert set(table) == fields if installed() == TESTED[-1] else set(table) >= fields


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_in_range_is_right(name: str) -> None:
    for value in RIGHT[name]:
        assert ranges.wrong_sampling({name: value}, MODEL) is None
    assert ranges.wrong_sampling({name: None}, MODEL) is None


@pytest.mark.parametrize("name", WRONG)
def test_what_is_out_of_range_is_named(name: str) -> None:
    for value in WRONG[name]:
        found = ranges.wrong_sampling({name: value}, MODEL)
        assert found is not None, value
        assert found.field == name
        assert found.message


def test_a_field_that_is_no_parameter_is_named() -> None:
    assert ranges.wrong_sampling({"seed": 1}, MODEL) == ("seed", "is no sampling parameter")


def test_a_minimum_is_not_above_the_maximum() -> None:
    found = ranges.wrong_sampling({"min_new_tokens": 5, "max_new_tokens": 4}, MODEL)
    assert found is not None
    assert found.field == "min_new_tokens"


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("logprob_start_len", [-1, 0, 10], [-2, 11, True, 1.0]),
        ("top_logprobs_num", [0, 100], [-1, 101, 10**9]),
        ("token_ids_logprob", [[0, 99]], [[100], [-1], 5, [0] * 1001]),
        ("input_embeds", [[[0.5, 1]]], [[[1.0]], [[float("nan"), 1.0]], [1.0], "x"]),
        ("session_params", [{"id": "a", "offset": 3}], [{"id": 5}, {"x": 1}, 5, {"replace": True}]),
        ("bootstrap_port", [1, 65_535], [0, 65_536, "1"]),
        ("priority", [-(2**63)], [2**63, "5"]),
        ("rid", ["a"], ["a" * 1025, 5]),
    ],
)
def test_fields_of_one_prompt_have_ranges(name: str, right: list[Any], wrong: list[Any]) -> None:
    for value in right:
        assert ranges.wrong_fields({name: value}, GENERATION, MODEL) is None
    for value in wrong:
        found = ranges.wrong_fields({name: value}, GENERATION, MODEL)
        assert found is not None, value
        assert found.field == name


def test_internal_fields_are_refused_from_clients_alone() -> None:
    for value in ("x", 0, 0.0, False, []):
        fields = {"lora_id": value}
        assert ranges.wrong_internal(fields, GENERATION) is not None
    assert ranges.wrong_internal({}, GENERATION) is None
    assert ranges.wrong_fields(fields, GENERATION, MODEL) is None  # SGLang sets it by then
    assert ranges.wrong_sampling({"stop_str_max_len": 0}, MODEL._replace(is_native=True)) is None
    params = {"is_normalized": True}
    assert ranges.wrong_sampling(params, MODEL) is None
    assert ranges.wrong_sampling(params, MODEL._replace(is_native=True)) is not None


def asked(**fields: Any) -> dict[str, Any]:
    return {"return_logprob": True, **fields}


def test_the_log_probabilities_of_a_prompt_have_a_bound() -> None:
    model = MODEL._replace(prompt_tokens=5_000, context_tokens=200_000)
    whole = asked(logprob_start_len=0, top_logprobs_num=40)
    assert ranges.wrong_product(whole, {"max_new_tokens": 1}, model) is None
    beyond = asked(logprob_start_len=0, top_logprobs_num=41)
    assert ranges.wrong_product(asked(logprob_start_len=0), {}, model) is None
    found = ranges.wrong_product(beyond, {"max_new_tokens": 1}, model)
    assert found is not None
    assert found.field == "top_logprobs_num"
    assert ranges.wrong_product({**beyond, "return_logprob": False}, {}, model) is None
    late = asked(logprob_start_len=4_800, top_logprobs_num=1000)
    assert ranges.wrong_product(late, {"max_new_tokens": 1}, model) is None
    of_samples = ranges.wrong_product(whole, {"max_new_tokens": 1, "n": 2}, model)
    assert of_samples is not None


def test_the_log_probabilities_of_an_answer_have_a_bound_above_what_vendors_allow() -> None:
    model = MODEL._replace(context_tokens=200_000)
    assert ranges.wrong_product(asked(top_logprobs_num=20), {}, model) is None
    found = ranges.wrong_product(asked(top_logprobs_num=21), {}, model)
    assert found is not None
    few = {"max_new_tokens": 1_000}
    assert ranges.wrong_product(asked(top_logprobs_num=1_000), few, model) is None
    ids = asked(token_ids_logprob=[1] * 21)
    found = ranges.wrong_product(ids, {}, model)
    assert found is not None
    assert found.field == "token_ids_logprob"


@pytest.mark.parametrize(
    ("text", "input_ids", "embeds", "found"),
    [
        ("a", None, None, (1, True)),
        (["a", "b"], None, None, (2, False)),
        ([], None, None, (0, False)),
        (None, [1, 2], None, (1, True)),
        (None, [[1], [2]], None, (2, False)),
        (None, None, [[0.1]], (1, True)),
        (None, None, [[[0.1]], [[0.2]]], (2, False)),
        (None, None, None, (1, True)),
    ],
)
def test_prompts_are_counted(text: Any, input_ids: Any, embeds: Any, found: Any) -> None:
    assert ranges.prompts_of(text, input_ids, embeds) == found


@pytest.mark.parametrize(
    ("fields", "prompts", "field"),
    [
        ({"sampling_params": 5}, 1, "sampling_params"),
        ({"sampling_params": [{}, 5]}, 2, "sampling_params"),
        ({"sampling_params": [{}]}, 2, "sampling_params"),
        ({"sampling_params": []}, 1, "sampling_params"),
        ({"sampling_params": {"n": 0}}, 1, "n"),
        ({"sampling_params": {"n": "2"}}, 1, "n"),
        ({"sampling_params": {"n": 3}, "text": ["a"] * 50}, 50, "text"),
        ({"text": ["a"] * 129}, 129, "text"),
        ({"input_ids": [[1]] * 129}, 129, "input_ids"),
        ({"text": []}, 0, "text"),
        ({"text": ["a", "b"], "top_logprobs_num": [1]}, 2, "top_logprobs_num"),
        ({"text": ["a", "b"], "token_ids_logprob": [[1]]}, 2, "token_ids_logprob"),
    ],
)
def test_a_request_of_several_prompts_is_checked_before_it_is_cut(
    fields: dict[str, Any], prompts: int, field: str
) -> None:
    found = ranges.wrong_batch(fields, prompts, is_single=False)
    assert found is not None
    assert found.field == field


def test_more_prompts_may_be_read_than_written_for() -> None:
    texts = ["a"] * 2_048
    scored = {"text": texts, "sampling_params": {"max_new_tokens": 0}}
    assert ranges.wrong_batch(scored, 2_048, is_single=False) is None
    assert ranges.wrong_batch({"text": texts}, 2_048, is_single=False) is not None
    of_embeddings = ranges.wrong_batch({}, 2_048, is_single=False, is_generation=False)
    assert of_embeddings is None
    assert ranges.wrong_batch({}, 2_049, is_single=False, is_generation=False) is not None


def test_right_requests_of_several_prompts_pass() -> None:
    fields = {
        "text": ["a", "b"],
        "sampling_params": [{"n": 2}, {"n": 2}],
        "top_logprobs_num": [1, 2],
        "token_ids_logprob": [1, 2, 3],
        "rid": ["a", "b"],
    }
    assert ranges.wrong_batch(fields, 2, is_single=False) is None
    assert ranges.wrong_batch({"sampling_params": None}, 1, is_single=True) is None


@pytest.mark.parametrize(
    "fields", [{"rid": ["a"]}, {"sampling_params": [{}]}, {"lora_path": ["a"]}]
)
def test_one_prompt_has_no_lists(fields: dict[str, Any]) -> None:
    found = ranges.wrong_batch(fields, 1, is_single=True)
    assert found is not None
    assert found.field in fields
    assert ranges.wrong_batch(fields, 1, is_single=False) is None


def test_token_ids_are_in_the_vocabulary() -> None:
    assert ranges.wrong_ids(0, 99, 100) is None
    assert "got -1" in str(ranges.wrong_ids(-1, 99, 100))
    assert "got 100" in str(ranges.wrong_ids(0, 100, 100))


def test_no_internal_field_is_in_a_checked_range() -> None:
    assert Whole(0, 5).wrong(False, MODEL)
    assert str(SAMPLING["top_k"]) == "-1, or an integer from 1 to 2^30"


CLASS = "[a-z]"


@pytest.mark.parametrize(
    ("schema", "part"),
    [
        ({"enum": list(range(2_001))}, "enum"),
        ({"anyOf": [{"type": "string"}] * 501}, "anyOf"),
        ({"items": {"oneOf": [{}] * 501}}, "oneOf"),
        ({"properties": {str(i): {} for i in range(501)}}, "properties"),
        ({"items": [{} for _ in range(20_001)]}, "objects"),
        ({"pattern": "x" * 2_049}, "pattern"),
        ({"patternProperties": {CLASS * 200 + "x" * n: {} for n in range(2)}}, "pattern"),
        ({"prefixItems": [{"maxLength": n} for n in range(1, 18)]}, "maxLength"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_schema_that_takes_long_to_compile_is_named(schema: dict[str, Any], part: str) -> None:
    found = Schema().wrong(orjson.dumps(schema).decode(), MODEL)
    assert found is not None
    assert part in found


def test_schemas_of_agents_are_right() -> None:
    properties = {f"p{i}": {"type": "string", "maxLength": 99, "enum": ["a"]} for i in range(50)}
    tools = [{"schema": {"type": "object", "properties": properties}} for _ in range(30)]
    assert Schema().wrong(orjson.dumps({"structures": tools}).decode(), MODEL) is None


def test_a_grammar_has_few_classes_of_characters() -> None:
    assert Grammar(2_048).wrong(CLASS * 256, MODEL) is None
    assert Grammar(2_048).wrong(CLASS * 257, MODEL) is not None
    assert Grammar(2_048).wrong("x" * 2_049, MODEL) is not None


def test_the_page_of_ranges_is_what_the_code_says() -> None:
    text = field_ranges.PAGE.read_text()
    assert field_ranges.page(text) == text, "run python -m docs.field_ranges"
