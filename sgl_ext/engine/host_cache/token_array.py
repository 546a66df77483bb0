"""Prompts whose tokens are one array from the token cache to the scheduler.

SGLang asks for a prompt's tokens as a list, and makes an array of it to send it on. Of a request
that is one text prompt it does nothing else with them: it counts them, looks at the first, cuts
off the end, and all that is the same for an array, which has no object for each token. Requests
of which more may be done (several answers, media, a prompt that is continued, dumps and logs of
requests) have their list.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from sgl_ext.engine import sglang_api

_asked: ContextVar[bool] = ContextVar("sgl_ext_packed", default=False)


def is_asked() -> bool:
    """Whether the prompt that is tokenized in this context may be an array."""
    return _asked.get()


@contextmanager
def packed(chat: Any, request: Any) -> Iterator[None]:
    """Meanwhile `request` is converted: its tokens may be an array of 8-byte integers."""
    token = _asked.set(_is_text_only(chat, request))
    try:
        yield
    finally:
        _asked.reset(token)


def settle(chat: Any, converted: Any) -> None:
    """Makes the tokens of what came of it a list if SGLang does more with them than send them."""
    if type(converted.input_ids) is array and not _is_only_sent(chat.tokenizer_manager, converted):
        converted.input_ids = converted.input_ids.tolist()


def _is_text_only(chat: Any, request: Any) -> bool:
    manager = chat.tokenizer_manager
    return not (
        manager.model_config.is_multimodal
        or manager.mm_processor is not None
        or request.continue_final_message  # an answer's beginning is added to the list
        or _is_decoded(chat)
    )


def _is_decoded(chat: Any) -> bool:
    """Whether one of the chat's parsers reads the prompt."""
    answers, calls = chat._reasoning_detector, chat.tool_call_parser
    parser = sglang_api.FunctionCallParser.ToolCallParserEnum.get(calls)
    return isinstance(answers, sglang_api.ResponseTemplateReasoningDetector) or (
        parser is not None and issubclass(parser, sglang_api.ResponseTemplateToolDetector)
    )


def _is_only_sent(manager: Any, converted: Any) -> bool:
    asked = converted.sampling_params
    return (
        isinstance(asked, dict)
        and asked.get("n", 1) == 1
        and (asked.get("beam_width") or 1) == 1
        and not manager.request_logger.log_requests
        and not manager.dump_requests_folder
        and not manager.crash_dump_folder
        and not manager.request_metrics_exporter_manager.exporter_enabled()
    )
