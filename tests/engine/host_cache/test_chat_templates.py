"""Chat templates render the same with quick code, and the sandbox holds."""

from functools import cache
from inspect import unwrap
from pathlib import Path
from typing import Any

import pytest
import sgl_ext_cpu
from hypothesis import given
from hypothesis import strategies as st

from sgl_ext.engine.host_cache.chat_templates import compile_template

json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=12,
)


TEMPLATE = """
{%- set seen = namespace(count=0, text='', flags=[1]) -%}
{%- macro named(one) -%}
  {{- one.role.upper() }}{{ one.first }}{{ one.content.find('-') -}}
{%- endmacro -%}
{%- for message in messages -%}
  {%- set seen.count = seen.count + 1 -%}
  {{- loop.index0 }}:{{ loop.first }}:{{ loop.last }}:{{ loop.length }}:{{ message.role -}}
  {%- if loop.previtem is defined %}:{{ loop.previtem.role }}{% endif -%}
  {%- if message.content is string and message.content.startswith('a') -%}
    {{- message.content.upper() + message.content.split('-')[-1].strip() -}}
  {%- endif -%}
  {{- message.absent }}{{ message.absent is defined }}{{ message.get('role') }}{{ seen.nothing -}}
  {%- set found = message.content.split('-')[0].strip('a').replace(message.role, '+') -%}
  {{- found }}{{ message.text.strip() if message.text }}{{ loop.cycle(1, 2) -}}
  {{- named(message) }}{{ ' -a'.strip() }}{{ message.content.split('-', maxsplit=1) -}}
  {%- for key, value in message.items() -%}{{- key }}={{ value | tojson -}}{%- endfor -%}
  {{- message.content.format('x') if message.content is string -}}
  {{- '{}'.format(seen.count) }}{{ seen.flags[0] }}{{ message.content.__class__ is defined -}}
{%- endfor -%}
"""


def compiled(source: str, *, quick: bool) -> Any:
    """As transformers compiles chat templates."""
    from transformers.utils.chat_template_utils import _cached_compile_jinja_template

    made = unwrap(_cached_compile_jinja_template)
    return compile_template(made, source) if quick else made(source)


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
            rendered.append(compiled_once(quick).render(messages=messages))
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
    for length in range(2, len(chat) + 1):  # some need a user's message
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
