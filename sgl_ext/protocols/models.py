"""The list of models, with the context window in the field that each client reads.

OpenAI's shape names no window. Clients read it from a field of the server that they were written
for: `max_model_len` (vLLM, SGLang), `context_length` (OpenRouter), `context_window` (Groq),
`max_input_tokens` (Anthropic), `meta.n_ctx_train` (llama.cpp). Anthropic's shape is another list.
Which one is meant, only the header `anthropic-version` says.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

PATH = "/v1/models"
TAGS_PATH = "/api/tags"
# Anthropic's default and highest number of models on a page.
_USUAL_PAGE, MOST_ON_A_PAGE = 20, 1000
ANTHROPIC_HEADER = "anthropic-version"
# What Anthropic answers where the day is not known.
_UNKNOWN_DAY = "1970-01-01T00:00:00Z"


class StatedModel(NamedTuple):
    """The model that an engine says it serves.

    name: "" if it does not say. window_tokens: prompt and answer together; None if it does not say.
    adapters: the names of the LoRA adapters that are loaded.
    """

    name: str = ""
    window_tokens: int | None = None
    adapters: tuple[str, ...] = ()


NOT_STATED = StatedModel()
MOST_ADAPTERS = 1024
"""Further adapters of an engine are not known by their names."""


def read_stated(document: Any) -> StatedModel:
    """What an engine's list of models says, in OpenAI's shape. Never raises."""
    try:
        cards = [card for card in document["data"] if isinstance(card["id"], str)]
        model = next(card for card in cards if not card.get("parent"))
    except (LookupError, TypeError, AttributeError, StopIteration):
        return NOT_STATED
    tokens = model.get("max_model_len")
    adapters = tuple(card["id"] for card in cards if card.get("parent"))[:MOST_ADAPTERS]
    return StatedModel(model["id"], tokens if isinstance(tokens, int) else None, adapters)


def openai_model(card: dict[str, Any], window_tokens: int | None) -> dict[str, Any]:
    """SGLang's card of a model, with the tokens of prompt and answer together if they are known."""
    if window_tokens is None:
        return card
    window = dict.fromkeys(
        ("max_model_len", "context_length", "context_window", "max_input_tokens"), window_tokens
    )
    return card | window | {"meta": {"n_ctx_train": window_tokens}}


def anthropic_model(card: dict[str, Any], window_tokens: int | None) -> dict[str, Any]:
    """The same in Anthropic's shape."""
    return {
        "type": "model",
        "id": card["id"],
        "display_name": card["id"],
        "created_at": _day(card.get("created")),
        "lifecycle": "active",
        "max_input_tokens": window_tokens,
        "max_tokens": window_tokens,
    }


def ollama_model(card: dict[str, Any]) -> dict[str, Any]:
    """The same in Ollama's shape, which names no window."""
    family = card["id"].rpartition("/")[2]
    details = {"format": "sglang", "family": family, "parameter_size": "unknown"}
    named = {"name": card["id"], "model": card["id"], "modified_at": _day(card.get("created"))}
    return named | {"size": 0, "digest": "", "details": details}


def page_limit(text: str | None) -> int | None:
    """How many models a page of Anthropic's has; None if `text` is no number that is allowed."""
    if text is None:
        return _USUAL_PAGE
    is_number = text.isascii() and text.isdigit()
    return int(text) if is_number and 1 <= int(text[:5]) <= MOST_ON_A_PAGE else None


def _day(created: Any) -> str:
    if type(created) is not int:
        return _UNKNOWN_DAY
    return datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def anthropic_page(
    models: Sequence[dict[str, Any]],
    *,
    after_id: str | None = None,
    before_id: str | None = None,
    limit: int,
) -> dict[str, Any]:
    """A page of Anthropic's list: the models behind `after_id`, or the last before `before_id`.

    An id that is not in the list leaves nothing.
    """
    names = [model["id"] for model in models]
    found = list(models)
    if after_id is not None:
        found = found[names.index(after_id) + 1 :] if after_id in names else []
    if before_id is not None:
        found = found[: names.index(before_id)] if before_id in names else []
    page = found[-limit:] if before_id is not None else found[:limit]
    return {
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(page) < len(found),
    }
