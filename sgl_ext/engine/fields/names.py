"""What clients call the fields of a scheduler, by path.

A field that is not here has the same name. The first name that the body has is the client's.

And values that are in the vendors' ranges and not in SGLang's, with what means the same there. A
client's file of settings often states them. SGLang refuses them. On its own paths they stay out of
range.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from sgl_ext.protocols.anthropic import ANTHROPIC
from sgl_ext.protocols.chat import CHAT, OLLAMA_CHAT
from sgl_ext.protocols.registry import COMPLETIONS, GENERATE, OLLAMA_GENERATE, VERTEX, of_path
from sgl_ext.protocols.responses import RESPONSES
from sgl_ext.protocols.routes import EMBEDDING
from sgl_ext.reading.places import value_at
from sgl_ext.reading.protocol import Protocol

_GRAMMARS = ("json_schema", "structural_tag")
_PROMPTS = ("text", "input_ids")
_OPENAI = {"min_new_tokens": ("min_tokens",), "sampling_seed": ("seed",)}
_OLLAMA = {
    "max_new_tokens": ("options.num_predict",),
    **{
        name: (f"options.{name}",)
        for name in (
            "temperature",
            "top_p",
            "top_k",
            "stop",
            "presence_penalty",
            "frequency_penalty",
            "seed",
        )
    },
}
_NAMES: Mapping[Protocol, Mapping[str, tuple[str, ...]]] = {
    CHAT: {
        **_OPENAI,
        "max_new_tokens": ("max_completion_tokens", "max_tokens"),
        "top_logprobs_num": ("top_logprobs",),
    },
    COMPLETIONS: {
        **_OPENAI,
        "max_new_tokens": ("max_tokens",),
        "top_logprobs_num": ("logprobs",),
    },
    RESPONSES: {
        **_OPENAI,
        "max_new_tokens": ("max_output_tokens",),
        "top_logprobs_num": ("top_logprobs",),
    },
    ANTHROPIC: {"max_new_tokens": ("max_tokens",), "stop": ("stop_sequences",)},
    OLLAMA_CHAT: _OLLAMA,
    OLLAMA_GENERATE: _OLLAMA,
}
_NATIVE = (*GENERATE.paths, *VERTEX.paths, *(path for path in EMBEDDING if "/v1/" not in path))
_IN_VERTEX = "parameters"


TEMPLATE_FIELD = "chat_template_kwargs"
_OF_THE_CALL = frozenset(
    {
        "add_generation_prompt",
        "continue_final_message",
        "conversation",
        "conversations",
        "image_prompts",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)
"""What SGLang passes to a chat template itself, or to what renders it."""


def taken_variable(variables: Mapping[str, Any]) -> str | None:
    """A variable for the chat template whose name is not the client's; None if there is none."""
    return next((name for name in variables if name in _OF_THE_CALL), None)


def is_native(path: str) -> bool:
    """Whether clients write SGLang's own fields on a path."""
    return path in _NATIVE


def name_of(field: str, path: str, body: Any, *, of_sampling: bool) -> str:
    """The client's name of a field, as a dotted path.

    of_sampling: the field is one of the sampling parameters.
    """
    if path in VERTEX.paths:
        inner = f"{_IN_VERTEX}.sampling_params" if of_sampling else _IN_VERTEX
        return f"{inner}.{field}"
    if is_native(path):
        return f"sampling_params.{field}" if of_sampling else field
    protocol = of_path(path)
    names = _NAMES.get(protocol, {}).get(field, (field,))
    if field in _GRAMMARS:
        names = (*protocol.formats, "tools", field)
    elif field in _PROMPTS:
        names = (
            *(name for _, name in reversed(protocol.prompt)),
            "input",
            "items",
            "documents",
            field,
        )
    found = (name for name in names if value_at(body, tuple(name.split("."))) is not None)
    return next(found, names[0])


_ALL_TOKENS = -1
LEAST_TOP_P = 1e-30
"""It leaves the one most probable token, as 0 does."""


def in_sglangs_words(params: Mapping[str, Any], body: Any) -> Iterator[tuple[str, Any]]:
    """The sampling parameters that SGLang writes in another way, each with that value.

    top_k 0         no limit: Anthropic's and Ollama's ranges begin there
    top_p 0         the most probable token alone: OpenAI's and Anthropic's ranges begin there
    max_tokens 0    the prompt alone, which fills the cache. SGLang's own bodies have 1 at least
    num_predict     of Ollama; -1 and -2: no limit
    """
    if _is(params.get("top_k"), 0):
        yield "top_k", _ALL_TOKENS
    if _is(params.get("top_p"), 0):
        yield "top_p", LEAST_TOP_P
    if _is(params.get("max_new_tokens"), -1, -2):
        yield "max_new_tokens", None
    elif isinstance(body, Mapping) and _is(body.get("max_tokens"), 0):
        yield "max_new_tokens", 0


def _is(value: Any, *numbers: int) -> bool:
    """Whether a value is one of these numbers. JSON has no other type for them."""
    return type(value) in (int, float) and value in numbers
