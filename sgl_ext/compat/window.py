"""The window that clients are told: the smaller of the model's context and what KV memory holds.

SGLang announces the context alone, and refuses a prompt that memory does not hold in the scheduler.

    TokenizerManager._validate_one_request    `check_length`
"""

import logging
from typing import Any

from sgl_ext.compat.context_length import TooLong
from sgl_ext.engine.sglang_http_types import TokenizerManager

_logger = logging.getLogger(__name__)
# What a scheduler keeps free in its smaller limit: max_req_len of TpModelWorker.get_worker_info,
# and the five below it.
_KEPT_FREE = 6


def window_of(context_tokens: int, refused_from: int) -> int:
    """The window. refused_from: the length from which on the schedulers refuse a prompt."""
    return context_tokens if _fits(context_tokens, refused_from) else refused_from - 1


def check_length(manager: TokenizerManager, request: Any, input_ids: Any) -> None:
    """Before SGLang validates one tokenized prompt. Raises ValueError for one that the schedulers
    would refuse."""
    tokens = 0 if input_ids is None else len(input_ids)
    refused_from, context = manager.max_req_input_len, manager.model_config.context_len
    if tokens >= refused_from and not manager.allow_auto_truncate:
        raise ValueError(TooLong(tokens, context if tokens > context else refused_from - 1).openai)


def announce(manager: TokenizerManager) -> None:
    """Has SGLang announce the window on all its paths. Logs a smaller one for the operator.

    What SGLang checks has a number of its own, `TokenizerManager.context_len`.
    """
    config, refused_from = manager.model_config, manager.max_req_input_len
    context = config.context_len
    config.context_len = window_of(context, refused_from)
    if config.context_len != context:
        if manager.tokenizer is not None:  # `/tokenize` announces the tokenizer's
            manager.tokenizer.model_max_length = config.context_len
        holds = refused_from + _KEPT_FREE
        _logger.warning(
            "sgl-ext: KV memory holds %d tokens, less than one context of %d; clients are told %d. "
            "Make room (--mem-fraction-static, --kv-cache-dtype; sgl-ext size), or set "
            "--context-length %d",
            *(holds, context, config.context_len, holds),
        )


def _fits(context_tokens: int, refused_from: int) -> bool:
    return refused_from + _KEPT_FREE >= context_tokens
