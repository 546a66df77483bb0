"""The words in which an engine refuses what is longer than its window, and SGLang's for the same.

    SGLang    several texts, by the check that found it; few have OpenAI's code
    OpenAI    This model's maximum context length is N tokens. ..., code `context_length_exceeded`
    Anthropic prompt is too long: X tokens > N maximum

Clients compact a conversation on the vendors' words alone. On any other error they send it again,
and the session is stuck. A version of SGLang that has OpenAI's words everywhere makes the table
of its texts needless: 0.5.23 has not.
"""

import re
from typing import NamedTuple

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
