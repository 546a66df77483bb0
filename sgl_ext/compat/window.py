"""The window that `/v1/models` states: the smaller of the model's context and what KV memory holds.

SGLang announces the context alone, and refuses a prompt that memory does not hold in the scheduler.

    TokenizerManager._validate_one_request    `check_length`

What is longer than the window is refused in the words of the vendors:

    SGLang    several texts, by the check that found it; few have OpenAI's code
    OpenAI    This model's maximum context length is N tokens. ..., code `context_length_exceeded`
    Anthropic prompt is too long: X tokens > N maximum

Clients compact a conversation on the vendors' words alone. On any other error they send it again,
and the session is stuck.

    fault     SGLang announces a window that memory does not hold, and refuses longer prompts in
              its own words
    hooks     group "window"
    test      tests/compat/test_window.py
    upstream  no patch yet
    ends with a version that announces what it takes, in OpenAI's words everywhere
"""

import logging
import re
from typing import Any, NamedTuple

from sgl_ext.engine.sglang_http_types import TokenizerManager

CODE = "context_length_exceeded"
"""OpenAI's code of such an error."""
# Of each text of SGLang's: the prompt's tokens, then the limit, and whether a prompt of just the
# limit is refused.
_TEXTS = (
    # TokenizerManager._validate_one_request
    (
        r"The input \((\d+) tokens\) is longer than the model's context length \((\d+) tokens\)",
        False,
    ),
    # managers.utils.validate_input_length
    (
        r"Input length \((\d+) tokens\) exceeds the maximum allowed length \((\d+) tokens\)",
        True,
    ),
    # Scheduler.handle_generate_request, handle_embedding_request
    (r"too long after expanding multimodal tokens\..*?=> (\d+) >= (\d+)", True),
    # multimodal.processors
    (r"expanded prompt is too long: (\d+) > (\d+)", False),
    # disaggregation.prefill and .decode
    (r"exceeds the maximum number of tokens: (\d+) > (\d+)", False),
    (r"requires too many SWA KV tokens for decode preallocation: (\d+) > (\d+)", False),
    # openai.serving_decisions
    (r"the prompt has (\d+) tokens, which does not fit the context length of (\d+) tokens", False),
)
_LONG = tuple((re.compile(text, re.DOTALL), is_refused) for text, is_refused in _TEXTS)
_OURS = re.compile(
    r"maximum context length is (\d+) tokens\. However, your messages resulted in (\d+) tokens"
)
# TokenizerManager._validate_one_request: prompt and answer together.
_TOO_MUCH = re.compile(
    r"maximum context length of (\d+) tokens\. You requested a total of (\d+) tokens: "
    r"(\d+) tokens from the input messages and (\d+) tokens"
)
# Scheduler.init_req_max_new_tokens; BeamCoordinator. They do not say what fits.
_NO_MEMORY = re.compile(
    r"exceeds the (?:KV memory budget|unified FULL/SWA KV byte)"
    r"|needs at least 1 generated token within the context budget"
)


class TooLong(NamedTuple):
    """What is longer than the window. most_tokens: the window; None if it is not known.

    answer_tokens: None if the prompt alone is too long.
    """

    prompt_tokens: int
    most_tokens: int | None
    answer_tokens: int | None = None
    text: str = ""

    @property
    def openai(self) -> str:
        """OpenAI's words."""
        if self.most_tokens is None:
            return f"The prompt exceeds this model's maximum context length: {self.text}"
        head = f"This model's maximum context length is {self.most_tokens} tokens. However, "
        if self.answer_tokens is None:
            return (
                f"{head}your messages resulted in {self.prompt_tokens} tokens. "
                "Please reduce the length of the messages."
            )
        total = self.prompt_tokens + self.answer_tokens
        return (
            f"{head}you requested {total} tokens ({self.prompt_tokens} in the messages, "
            f"{self.answer_tokens} in the completion). "
            "Please reduce the length of the messages or completion."
        )

    @property
    def anthropic(self) -> str:
        """Anthropic's words."""
        if self.most_tokens is None:
            return f"prompt is too long: {self.text}"
        if self.answer_tokens is None:
            return f"prompt is too long: {self.prompt_tokens} tokens > {self.most_tokens} maximum"
        return (
            f"input length and `max_tokens` exceed context limit: {self.prompt_tokens} + "
            f"{self.answer_tokens} > {self.most_tokens}, decrease input length or `max_tokens` "
            "and try again"
        )


def too_long(message: str) -> TooLong | None:
    """What a message of SGLang's or of ours says is too long; None if it says something else."""
    if found := _OURS.search(message):
        return TooLong(int(found[2]), int(found[1]))
    for text, is_limit_refused in _LONG:
        if found := text.search(message):
            return TooLong(int(found[1]), int(found[2]) - is_limit_refused)
    if found := _TOO_MUCH.search(message):
        return TooLong(int(found[3]), int(found[1]), int(found[4]))
    if _NO_MEMORY.search(message):
        return TooLong(0, None, text=message)
    return None


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
