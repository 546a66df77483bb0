"""What a template does is observed through SGLang's front end, once."""

from __future__ import annotations

import json
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import jinja2
import pytest
from sgl_ext_cpu.tokenizer import save
from tokenizers import Tokenizer, models

from sgl_ext.engine.core.request_context import current
from sgl_ext.engine.http.template_facts import drops_thinking, template_of
from sgl_ext.engine.http.template_folder import main
from sgl_ext.templates.model import Place

PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
THINKS = "{% for m in messages %}[{{ m.role }}]{{ m.reasoning_content }}{{ m.content }}{% endfor %}"
IN_LOOPS = """{% set ns = namespace(last=0) %}
{%- for m in messages if m.role == "user" %}{% set ns.last = messages.index(m) %}{% endfor %}
{%- for m in messages %}[{{ m.role }}]
{%- if loop.index0 > ns.last %}{{ m.reasoning_content }}{% endif %}{{ m.content }}{% endfor %}"""
REFUSES = "{{ nothing.at.all }}"


class Chat:
    """The part of SGLang's front end that is used."""

    tool_call_parser = None

    def __init__(self, template: str) -> None:
        self.template = jinja2.Template(template)

    def _process_messages(self, request: Any, _: bool) -> None:
        messages = [message.model_dump() for message in request.messages]
        context = current()
        assert context is not None
        assert context.renderings is not None
        context.renderings.append(self.template.render(messages=messages))


@pytest.mark.parametrize(
    ("template", "drops"), [(PLAIN, True), (THINKS, False), (IN_LOOPS, False), (REFUSES, False)]
)
def test_thinking_is_dropped_if_it_is_in_neither_kind_of_turn(template: str, drops: bool) -> None:
    with warnings.catch_warnings(action="ignore"):  # SGLang's, while it is imported
        import_module("sglang.srt.entrypoints.openai.protocol")
    chat: Any = Chat(template)
    assert drops_thinking(chat) is drops
    assert current() is None


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
