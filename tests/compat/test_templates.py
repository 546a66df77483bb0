"""What a template does is observed through SGLang's front end, once."""

from __future__ import annotations

import json
import warnings
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jinja2
import pytest
from sgl_ext_cpu.tokenizer import save
from starlette.applications import Starlette
from starlette.testclient import TestClient
from tokenizers import Tokenizer, models

from sgl_ext.compat.template_folder import main
from sgl_ext.compat.template_model import Place
from sgl_ext.compat.templates import (
    check_template,
    drops_thinking,
    make_plan,
    place_instructions,
    template_of,
    template_route,
)
from sgl_ext.engine.core.request_context import current
from sgl_ext.protocols.routes import TEMPLATE

PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
THINKS = "{% for m in messages %}[{{ m.role }}]{{ m.reasoning_content }}{{ m.content }}{% endfor %}"
IN_LOOPS = """{% set ns = namespace(last=0) %}
{%- for m in messages if m.role == "user" %}{% set ns.last = messages.index(m) %}{% endfor %}
{%- for m in messages %}[{{ m.role }}]
{%- if loop.index0 > ns.last %}{{ m.reasoning_content }}{% endif %}{{ m.content }}{% endfor %}"""
REFUSES = "{{ nothing.at.all }}"


class Chat:
    """The part of SGLang's front end that is used."""

    tool_call_parser = chat_encoding_spec = None
    template_manager = SimpleNamespace(chat_template_name=None)

    def __init__(self, template: str) -> None:
        self.template = jinja2.Template(template)

    def apply_reasoning_enabled(self, request: Any, enabled: bool) -> None:
        request.chat_template_kwargs = {"thinking": enabled}

    def _resolve_inline_system_support(self) -> bool:
        return False

    def _process_messages(self, request: Any, _: bool) -> None:
        messages = [message.model_dump() for message in request.messages]
        context = current()
        assert context is not None
        assert context.renderings is not None
        context.renderings.append(
            self.template.render(messages=messages, **(request.chat_template_kwargs or {}))
        )


@pytest.mark.parametrize(
    ("template", "drops"), [(PLAIN, True), (THINKS, False), (IN_LOOPS, False), (REFUSES, False)]
)
def test_thinking_is_dropped_if_it_is_in_neither_kind_of_turn(template: str, drops: bool) -> None:
    with warnings.catch_warnings(action="ignore"):  # SGLang's, while it is imported
        import_module("sglang.srt.entrypoints.openai.protocol")
    chat: Any = Chat(template)
    assert drops_thinking(chat) is drops
    assert current() is None


def test_thinking_is_observed_where_a_request_turns_it_on() -> None:
    on = "{% for m in messages %}{{ m.reasoning_content if thinking }}{{ m.content }}{% endfor %}"
    model = template_of(Chat(on))  # type: ignore[arg-type]
    assert model is not None
    assert model.thinking == Place.IN_PLACE


def test_calls_in_another_form_than_the_parser_s_are_shown() -> None:
    with warnings.catch_warnings(action="ignore"):  # SGLang's, while it is imported
        import_module("sglang.srt.entrypoints.openai.serving_chat")
    loop = "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    call = "{% for c in m.tool_calls or [] %}CALL{{ c.function.arguments }}{% endfor %}"
    for begin, form in (("<tool_call>\n", "as generated"), ("<call>", "not as generated")):
        chat: Any = Chat(loop + call.replace("CALL", begin) + "{% endfor %}")
        chat.tool_call_parser = "qwen25"
        app = Starlette(routes=[template_route()])
        app.state.openai_serving_chat = chat
        found = TestClient(app).get(TEMPLATE).json()["template"]
        assert found["form of calls"] == form


def test_forms_that_sglang_has_itself_get_reminders() -> None:
    chat: Any = Chat(REFUSES)
    chat.template_manager = SimpleNamespace(chat_template_name="chatml")
    assert make_plan(chat) is None
    said = [("developer", "Be brief."), ("user", "Go."), ("system", "Now.")]
    messages = [{"role": role, "content": text} for role, text in said]
    protocol = import_module("sglang.srt.entrypoints.openai.protocol")
    request = protocol.ChatCompletionRequest(model="", messages=messages)
    user = request.messages[1]
    place_instructions(lambda *_: None, chat, request, False)
    assert [message.role for message in request.messages] == ["system", "user"]
    assert request.messages[1].content == "Go.\n\n<system-reminder>\nNow.\n</system-reminder>"
    whole = [*request.messages]
    place_instructions(lambda *_: None, chat, request, False)
    assert request.messages == whole
    assert user.content == "Go."


def test_a_front_end_is_observed_once() -> None:
    chat: Any = Chat(PLAIN)
    model = template_of(chat)
    assert model is not None
    assert model.later["developer"] == Place.IN_PLACE
    chat.template = None
    assert template_of(chat) is model
    assert template_of(Chat(REFUSES)) is None  # type: ignore[arg-type]


def test_a_folder_s_template_is_shown_without_an_engine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(
        Tokenizer(models.BPE()),
        tmp_path,
        THINKS.replace("reasoning_content", "reasoning_content or ''"),
        64,
    )
    with warnings.catch_warnings(action="ignore"):
        assert main(str(tmp_path)) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["thinking in a loop of tools"] == "in place"
    assert facts["tools"] == "nowhere"
    assert main(str(tmp_path / "none")) == 1
    assert "has no tokenizer that can be read" in capsys.readouterr().err


def test_a_template_that_is_none_ends_the_start() -> None:
    manager = SimpleNamespace(
        tokenizer=SimpleNamespace(chat_template="{% for m in messages %}\n{{")
    )
    templates = SimpleNamespace(chat_template_name=None)
    with pytest.raises(ValueError, match=r"^the model's chat template cannot be read: line 2: "):
        check_template(manager, templates)
    check_template(manager, SimpleNamespace(chat_template_name="chatml"))
    manager.tokenizer.chat_template = "{{ messages }}"
    check_template(manager, templates)
