"""The shortcuts in the HTTP process have the results of the originals."""

from __future__ import annotations

import copy
from functools import cache
from inspect import unwrap
from pathlib import Path
from typing import Any

import pytest
import sgl_ext_cpu
from hypothesis import given
from hypothesis import strategies as st

from sgl_ext.engine.host_cache import shortcuts
from sgl_ext.engine.host_cache.shortcuts import Message, SchemaCache

SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}
BROKEN = {"type": "object", "properties": {"path": {"type": 7}}}


class Validation:
    """Validates schemas, and counts them."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self, schema: Any) -> None:
        from jsonschema import Draft202012Validator

        self.times += 1
        Draft202012Validator.check_schema(schema)


def test_a_valid_schema_is_checked_once() -> None:
    schemas, validate = SchemaCache(), Validation()
    for _ in range(3):
        schemas.check(copy.deepcopy(SCHEMA), validate)
    assert validate.times == 1
    schemas.check({**SCHEMA, "required": ["path"]}, validate)
    assert validate.times == 2


def test_an_invalid_schema_is_rejected_each_time() -> None:
    from jsonschema import SchemaError

    schemas, validate = SchemaCache(), Validation()
    for _ in range(2):
        with pytest.raises(SchemaError):
            schemas.check(BROKEN, validate)
    assert validate.times == 2


def test_the_number_of_schemas_is_bounded() -> None:
    schemas, validate = SchemaCache(max_schemas=2), Validation()
    for n in range(5):
        schemas.check({"maxLength": n}, validate)
    assert len(schemas) == 2


json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=12,
)


def emptied(value: Any) -> None:
    """Empties every list and dict in it."""
    for inner in value.values() if isinstance(value, dict) else value:
        if isinstance(inner, dict | list):
            emptied(inner)
    value.clear()


@given(st.dictionaries(st.text(max_size=3), json, max_size=4))
def test_a_copy_of_a_message_is_deep(value: dict[str, Any]) -> None:
    message, original = Message(copy.deepcopy(value)), copy.deepcopy(value)
    copied = copy.deepcopy([message])[0]
    assert copied == original
    emptied(copied)
    assert message == original


TEMPLATE = """
{%- set seen = namespace(count=0, text='', flags=[1]) -%}
{%- for message in messages -%}
  {%- set seen.count = seen.count + 1 -%}
  {{- loop.index0 }}:{{ loop.first }}:{{ loop.last }}:{{ loop.length }}:{{ message.role -}}
  {%- if loop.previtem is defined %}:{{ loop.previtem.role }}{% endif -%}
  {%- if message.content is string and message.content.startswith('a') -%}
    {{- message.content.upper() + message.content.split('-')[-1].strip() -}}
  {%- endif -%}
  {{- message.absent }}{{ message.absent is defined }}{{ message.get('role') }}{{ seen.nothing -}}
  {%- for key, value in message.items() -%}{{- key }}={{ value | tojson -}}{%- endfor -%}
  {{- message.content.format('x') if message.content is string -}}
  {{- '{}'.format(seen.count) }}{{ seen.flags[0] }}{{ message.content.__class__ is defined -}}
{%- endfor -%}
"""


def compiled(source: str, *, quick: bool) -> Any:
    """As transformers compiles chat templates."""
    from transformers.utils.chat_template_utils import _cached_compile_jinja_template

    made = unwrap(_cached_compile_jinja_template)
    return shortcuts.compile_template(made, source) if quick else made(source)


@cache
def compiled_once(quick: bool) -> Any:
    return compiled(TEMPLATE, quick=quick)


@given(
    st.lists(
        st.fixed_dictionaries(
            {"role": st.sampled_from(["user", "tool"]), "content": st.text("a-b {}0", max_size=5)},
            optional={"items": st.text(max_size=2), "tool_calls": json},
        ),
        max_size=4,
    )
)
def test_a_template_renders_the_same(messages: list[dict[str, Any]]) -> None:
    rendered = []
    for quick in (False, True):
        try:
            given_ones = [Message(one) for one in messages] if quick else messages
            rendered.append(compiled_once(quick).render(messages=given_ones))
        except Exception as error:
            rendered.append(repr(error))
    assert rendered[0] == rendered[1]


CPU_MODELS = Path(sgl_ext_cpu.__file__).parent
REAL = [CPU_MODELS / "chat.jinja", *sorted((CPU_MODELS / "templates").glob("*.jinja"))]


@pytest.mark.parametrize("file", REAL, ids=lambda file: file.stem)
def test_templates_of_real_models_structure_render_the_same(file: Path) -> None:
    call = {"name": "Edit", "arguments": {"path": "a.py", "line": 1}}
    calls = [{"id": "call_1", "type": "function", "function": call}]
    parameters = {"type": "object", "properties": {"path": {"type": "string"}, "line": {}}}
    edit = {"name": "Edit", "description": "Edits a file", "parameters": parameters}
    chat = [
        {"role": "system", "content": "You edit files."},
        {"role": "user", "content": "Tidy up."},
        {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": calls},
        {"role": "tool", "content": "done", "tool_call_id": "call_1"},
        {"role": "assistant", "content": "It is tidy."},
        {"role": "user", "content": "Thanks."},
    ]
    tools = [{"type": "function", "function": edit}]
    for length in range(1, len(chat) + 1):
        values = {"tools": tools, "add_generation_prompt": True, "messages": chat[:length]}
        plain, quick = (compiled(file.read_text(), quick=q).render(values) for q in (False, True))
        assert plain == quick
    assert "a.py" in quick


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__ }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages[0].__init__ }}",
        "{{ messages[0].pop('role') }}",
        "{% set ns = namespace() %}{{ ns.__class__ }}{{ ns._Namespace__attrs }}",
        "{% for m in messages %}{{ loop.__init__ }}{{ loop._iterator }}{% endfor %}",
        "{{ '{0.__class__}'.format(messages) }}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    messages: list[dict[str, str]] = [{"role": "user"}]
    rendered = []
    for quick in (False, True):
        try:
            rendered.append(compiled(source, quick=quick).render(messages=messages))
        except Exception as error:
            rendered.append(repr(error))
    assert rendered[0] == rendered[1]
    assert "_Namespace__attrs" not in rendered[1]
