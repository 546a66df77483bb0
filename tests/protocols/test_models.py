"""The list of models: the window where each client reads it, and Anthropic's pages."""

from __future__ import annotations

from anthropic.types import ModelInfo
from openai.types import Model

from sgl_ext.protocols.models import anthropic_model, anthropic_page, openai_model

CARD = {"id": "m", "object": "model", "created": 1, "owned_by": "sglang", "max_model_len": None}
NAMES = ["a", "b", "c", "d"]


def page(**wanted: object) -> tuple[list[str], bool]:
    models = [{"id": name} for name in NAMES]
    found = anthropic_page(models, **{"limit": 20, **wanted})
    names = [model["id"] for model in found["data"]]
    assert found["first_id"] == (names[0] if names else None)
    assert found["last_id"] == (names[-1] if names else None)
    return names, found["has_more"]


def test_each_client_finds_the_window_in_its_own_field() -> None:
    model = openai_model(CARD, 4096)
    assert Model.model_validate(model, strict=True).id == "m"
    for field in ("max_model_len", "context_length", "context_window", "max_input_tokens"):
        assert model[field] == 4096
    assert model["meta"] == {"n_ctx_train": 4096}
    assert CARD["max_model_len"] is None


def test_anthropic_s_model_is_what_its_sdk_reads() -> None:
    model = ModelInfo.model_validate(anthropic_model(CARD, 4096))
    assert (model.id, model.max_input_tokens, model.max_tokens) == ("m", 4096, 4096)
    assert model.lifecycle == "active"


def test_pages_go_on_where_they_ended() -> None:
    assert page() == (NAMES, False)
    assert page(limit=3) == (["a", "b", "c"], True)
    assert page(after_id="c", limit=3) == (["d"], False)
    assert page(before_id="d", limit=2) == (["b", "c"], True)
    assert page(after_id="none") == page(before_id="none") == page(after_id="d") == ([], False)
