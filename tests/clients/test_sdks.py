"""The Python SDKs of Anthropic and OpenAI against the balancer."""

from __future__ import annotations

import anthropic
import openai
import pytest

_TOKENS = 8
_MESSAGES = [{"role": "user", "content": "Say hello."}]


def test_messages(claude: anthropic.Anthropic) -> None:
    answer = claude.messages.create(
        model="tiny", max_tokens=_TOKENS, messages=_MESSAGES, thinking={"type": "disabled"}
    )
    (block,) = answer.content
    assert block.type == "text"
    assert block.text
    assert answer.stop_reason == "max_tokens"
    assert answer.usage.output_tokens == _TOKENS


def test_messages_streamed(claude: anthropic.Anthropic) -> None:
    with claude.messages.stream(
        model="tiny", max_tokens=_TOKENS, messages=_MESSAGES, thinking={"type": "disabled"}
    ) as stream:
        text = "".join(stream.text_stream)
        answer = stream.get_final_message()
    (block,) = answer.content
    assert block.text == text
    assert text
    assert answer.stop_reason == "max_tokens"
    assert answer.usage.output_tokens == _TOKENS


def test_a_malformed_message_is_anthropics_bad_request(claude: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match="max_tokens: must be positive") as raised:
        claude.messages.create(model="tiny", max_tokens=-1, messages=_MESSAGES)
    assert raised.value.type == "invalid_request_error"


def test_an_unknown_path_is_anthropics_not_found(claude: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="GET /v1/files: Not Found"):
        claude.beta.files.list()


def test_chat_completion(gpt: openai.OpenAI) -> None:
    answer = gpt.chat.completions.create(
        model="tiny", max_tokens=_TOKENS, messages=_MESSAGES, reasoning_effort="none"
    )
    (choice,) = answer.choices
    assert choice.message.content
    assert choice.finish_reason == "length"
    assert answer.usage.completion_tokens == _TOKENS


def test_chat_completion_streamed(gpt: openai.OpenAI) -> None:
    stream = gpt.chat.completions.create(
        model="tiny",
        max_tokens=_TOKENS,
        messages=_MESSAGES,
        reasoning_effort="none",
        stream=True,
        stream_options={"include_usage": True},
    )
    *chunks, last = stream
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == "length"
    assert last.usage.completion_tokens == _TOKENS


def test_a_malformed_chat_is_openais_bad_request(gpt: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature: must be a number from 0"):
        gpt.chat.completions.create(model="tiny", messages=_MESSAGES, temperature=-1)


def test_response(gpt: openai.OpenAI, served_model: str) -> None:
    answer = gpt.responses.create(
        model=served_model,
        input="Say hello.",
        max_output_tokens=_TOKENS,
        reasoning={"effort": "none"},
    )
    assert answer.output_text
    assert answer.status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens"


def test_response_streamed(gpt: openai.OpenAI, served_model: str) -> None:
    stream = gpt.responses.create(
        model=served_model,
        input="Say hello.",
        max_output_tokens=_TOKENS,
        reasoning={"effort": "none"},
        stream=True,
    )
    events = list(stream)
    assert events[0].type == "response.created"
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert events[-1].type == "response.incomplete"


def test_an_unknown_model_is_openais_not_found(gpt: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="The model 'nobody' does not exist") as raised:
        gpt.responses.create(model="nobody", input="Say hello.")
    assert raised.value.param == "model"


def test_an_unknown_path_is_openais_not_found(gpt: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="POST /v1/images/generations: Not Found"):
        gpt.images.generate(prompt="a tree")


def test_both_sdks_list_the_models_with_their_window(
    claude: anthropic.Anthropic, gpt: openai.OpenAI
) -> None:
    (model,) = list(claude.models.list())
    assert claude.models.retrieve(model.id) == model
    (card,) = list(gpt.models.list())
    assert card.id == gpt.models.retrieve(card.id).id == model.id
    assert model.max_input_tokens == card.to_dict()["context_length"] > 0
    with pytest.raises(anthropic.NotFoundError):
        claude.models.retrieve("none")
    with pytest.raises(openai.NotFoundError):
        gpt.models.retrieve("none")
