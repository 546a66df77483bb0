"""Token ids reach SGLang as an array only where it treats an array like a list."""

from __future__ import annotations

import warnings
from array import array
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
from sgl_ext_cpu.node import Node

from sgl_ext.engine.host_cache.token_cache import TokenCache, is_array_allowed, restore_list
from sgl_ext.engine.http import pin_placement
from sgl_ext.engine.http.cache_hooks import encode_prompt
from sgl_ext.engine.http.extension import HttpExtension
from tests.sglang_versions import needs_newest

IDS = list(range(40, 60))
SAMPLING = {"max_new_tokens": 1, "n": 1}


@pytest.fixture(autouse=True, scope="module")
def _imported() -> None:
    with warnings.catch_warnings(action="ignore"):  # SGLang's, while it is imported
        import_module("sglang.srt.entrypoints.openai.serving_chat")


def chat_of(**changed: Any) -> Any:
    """A chat of a text model with the usual parsers."""
    manager = SimpleNamespace(
        model_config=SimpleNamespace(is_multimodal=False),
        mm_processor=None,
        request_logger=SimpleNamespace(log_requests=False),
        dump_requests_folder="",
        crash_dump_folder=None,
        request_metrics_exporter_manager=SimpleNamespace(exporter_enabled=lambda: False),
    )
    for name in [name for name in changed if hasattr(manager, name)]:
        setattr(manager, name, changed.pop(name))
    parsers = {"_reasoning_detector": None, "tool_call_parser": "qwen25"}
    return SimpleNamespace(tokenizer_manager=manager, **{**parsers, **changed})


def request_of(**changed: Any) -> Any:
    return SimpleNamespace(**{"continue_final_message": False, **changed})


def converted(chat: Any, request: Any, ids: Any, sampling: Any = SAMPLING) -> Any:
    """The ids that SGLang gets."""
    made = SimpleNamespace(input_ids=ids, sampling_params=sampling, require_reasoning=False)
    restore_list(chat, made)
    return made.input_ids


def template_detector() -> Any:
    from sglang.srt.entrypoints.openai.serving_chat import ResponseTemplateReasoningDetector

    return object.__new__(ResponseTemplateReasoningDetector)


def test_the_ids_of_a_text_prompt_may_be_an_array() -> None:
    assert is_array_allowed(chat_of(), request_of())


@pytest.mark.parametrize(
    ("chat", "request_"),
    [
        ({"model_config": SimpleNamespace(is_multimodal=True)}, {}),
        ({"mm_processor": object()}, {}),
        ({}, {"continue_final_message": True}),
        pytest.param(
            {"tool_call_parser": "response_template"}, {}, marks=needs_newest("no such parser")
        ),
    ],
)
def test_a_prompt_that_sglang_may_change_is_a_list(
    chat: dict[str, Any], request_: dict[str, Any]
) -> None:
    assert not is_array_allowed(chat_of(**chat), request_of(**request_))


def test_a_prompt_that_a_parser_decodes_is_a_list() -> None:
    assert not is_array_allowed(chat_of(_reasoning_detector=template_detector()), request_of())


def test_an_array_is_passed_on_uncopied() -> None:
    ids = array("q", IDS)
    assert converted(chat_of(), request_of(), ids) is ids


@pytest.mark.parametrize(
    ("chat", "sampling"),
    [
        ({}, {"n": 2}),
        ({}, {"n": None}),
        ({}, {"beam_width": 4}),
        ({}, [SAMPLING]),
        ({}, None),
        ({"request_logger": SimpleNamespace(log_requests=True)}, SAMPLING),
        ({"dump_requests_folder": "/tmp/dumps"}, SAMPLING),
        ({"crash_dump_folder": "/tmp/dumps"}, SAMPLING),
        (
            {"request_metrics_exporter_manager": SimpleNamespace(exporter_enabled=lambda: True)},
            SAMPLING,
        ),
    ],
)
def test_ids_that_are_not_only_sent_become_a_list(chat: dict[str, Any], sampling: Any) -> None:
    ids = converted(chat_of(**chat), request_of(), array("q", IDS), sampling)
    assert type(ids) is list
    assert ids == IDS


@pytest.mark.parametrize("ids", [IDS, None, [IDS], "text"])
def test_ids_that_are_no_array_are_left_alone(ids: Any) -> None:
    assert converted(chat_of(), request_of(), ids, {"n": 2}) is ids


def test_sglang_makes_the_same_request_from_an_array() -> None:
    from sglang.srt.managers.io_struct import GenerateReqInput

    made = []
    for ids in (IDS, array("q", IDS)):
        request = GenerateReqInput(rid="one", input_ids=ids, sampling_params=dict(SAMPLING))
        request.normalize_batch_and_arguments()
        assert array("q", request.input_ids) == array("q", IDS)
        request.input_ids = None
        made.append(request)
    assert made[0] == made[1]


def test_a_converted_prompt_is_the_cache_s_own_array(
    tiny_model: Any, extension: HttpExtension
) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)

    def whole(tokenizer: Any, text: str, sampling: Any = None) -> list[int]:
        return list(tokenizer.encode(text, **(sampling or {})))

    text = "<|im_start|>user\nHello there<|im_end|>\n" * 100
    extension.token_cache = TokenCache(tokenizer, whole, 1 << 20)

    def convert(chat: Any, request: Any) -> tuple[Any, Any]:
        ids = encode_prompt(whole, tokenizer, text)
        sampling = {"n": request.n}
        made = SimpleNamespace(input_ids=ids, sampling_params=sampling, require_reasoning=False)
        return made, request

    right = whole(tokenizer, text)
    for n, kind in ((1, array), (2, list), (1, array)):
        found = pin_placement.place_pins(convert, chat_of(), request_of(n=n))[0].input_ids
        assert type(found) is kind
        assert list(found) == right
        del found[7:]  # as SGLang cuts off what is too long
        found[0] += 1
    assert type(encode_prompt(whole, tokenizer, text)) is list


def test_one_answer_several_and_a_continued_one_have_the_same_prompt(node: Node) -> None:
    said = [{"role": "user", "content": "Say where it is. " * 20}]
    body = {"model": "m", "max_tokens": 2, "temperature": 0, "messages": said}

    def ids(**sampling: Any) -> list[list[int]]:
        answer = node.post(
            "/v1/chat/completions", {**body, "return_prompt_token_ids": True, **sampling}
        )
        assert answer.status_code == 200, answer.text
        return [choice["prompt_token_ids"] for choice in answer.json()["choices"]]

    (one,) = ids()
    assert len(one) > 40
    assert ids(n=2) == [one, one]
    assert ids(n=2) == [one, one]
    assert ids() == [one]
    begun = {"role": "assistant", "content": "It is"}
    (continued,) = ids(messages=[*said, begun], continue_final_message=True)
    assert continued[: len(one)] == one
    assert len(continued) > len(one)
    counted = node.post("/v1/messages/count_tokens", {"model": "m", "messages": said})
    assert counted.json()["input_tokens"] == len(one)
