"""Finds out whether a template drops thinking, with templates that do and do not."""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import Any

import jinja2
import pytest

from sgl_ext.engine.core.request_context import RequestContext, current, entered
from sgl_ext.engine.http.rendering import drops_thinking

PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
THINKS = "{% for m in messages %}[{{ m.role }}]{{ m.reasoning_content }}{{ m.content }}{% endfor %}"
IN_LOOPS = """{% set ns = namespace(last=0) %}
{%- for m in messages if m.role == "user" %}{% set ns.last = messages.index(m) %}{% endfor %}
{%- for m in messages %}[{{ m.role }}]
{%- if loop.index0 > ns.last %}{{ m.reasoning_content }}{% endif %}{{ m.content }}{% endfor %}"""
REFUSES = "{{ nothing.at.all }}"


class Chat:
    """The part of SGLang's front end that is used."""

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
    with entered(RequestContext()):
        assert drops_thinking(chat) is drops
