"""Token ids as one array from the token cache to the scheduler, instead of a list.

SGLang expects a prompt's token ids as a list and converts it into an array to send it to the
scheduler. For a request of one text prompt it only counts the ids, looks at the first and cuts
off the end, and all of this works on an array, which has no Python object for each id. Requests
for which SGLang may do more (several answers, media, an answer to continue, dumps and logs of
requests) get a list.
"""

from __future__ import annotations

from array import array
from typing import Any

from sgl_ext.engine import sglang_api
from sgl_ext.engine.sglang_http_types import GenerateReqInput, ServingChat, TokenizerManager


def is_array_allowed(chat: ServingChat, request: Any) -> bool:
    """Whether the ids may be an array while SGLang converts a request: it is one text prompt."""
    manager, calls = chat.tokenizer_manager, chat.tool_call_parser
    call_parser = sglang_api.FunctionCallParser.ToolCallParserEnum.get(calls)
    return not (
        manager.model_config.is_multimodal
        or manager.mm_processor is not None
        # SGLang adds the answer's beginning to the list.
        or getattr(request, "continue_final_message", False)
        # These parsers decode the prompt's ids.
        or isinstance(chat._reasoning_detector, sglang_api.ResponseTemplateReasoningDetector)
        or issubclass(call_parser or object, sglang_api.ResponseTemplateToolDetector)
    )


def restore_list(chat: ServingChat, converted: GenerateReqInput) -> None:
    """Makes the converted request's ids a list if SGLang does more with them than send them."""
    sampling = converted.sampling_params
    is_one = (
        isinstance(sampling, dict)
        and sampling.get("n", 1) == 1
        and (sampling.get("beam_width") or 1) == 1
    )
    if type(converted.input_ids) is array and not (is_one and is_only_sent(chat.tokenizer_manager)):
        converted.input_ids = converted.input_ids.tolist()


def is_only_sent(manager: TokenizerManager) -> bool:
    """Whether SGLang only sends the ids of a request to the scheduler, and logs or dumps none."""
    return not (
        manager.request_logger.log_requests
        or manager.dump_requests_folder
        or manager.crash_dump_folder
        or manager.request_metrics_exporter_manager.exporter_enabled()
    )
