"""What a request allows its answer to hold is a matter of grammar, and not of the prompt.

SGLang renders no tools for `tool_choice: none` and only one for a named choice, so each change of
the choice is another prompt, and the cache holds nothing after its first tool. Here all tools
stay in the prompt, and a grammar excludes the calls that are not allowed. A JSON schema for the
answer means a call or an answer of the schema; SGLang's grammar would have no call.

    conversion            `hold_choice`        begins to note what was found about the request
      parser's grammar    `constrain_calls`    makes the grammar of the calls
      template            `keep_tools`         renders all tools if the grammar binds the choice
    sampling parameters   `join_schema`        joins the grammar of the calls and of the answer

Where no grammar can hold the choice (`STARTS`, another grammar backend), the prompt
has the allowed tools only, as in SGLang, and the request is counted.

The grammars are structural tags of xgrammar: calls of some tools, no call, or JSON.

A call begins with the same text in every answer of a model: `STARTS` names it for each of SGLang's
tool-call parsers. Without that text no parser finds a call, so text that excludes it holds none.
Parsers that are missing there find calls in other text, too, or frame all of an answer; for them
no such tag can be written.

Where SGLang has a grammar for the calls of a parser, it is used here: xgrammar's for the model, or
SGLang's older one, which this module widens to the white space that models are trained on. For
other parsers a call is its start and any text after it, and a grammar cannot limit the names.

    fault     a choice of tools changes the prompt; a schema and calls exclude each other
    hooks     group "tool choice"
    test      tests/compat/test_tool_choice.py, test_call_formats.py
    upstream  no patch yet
    ends with a version that leaves the choice to grammars, and joins both grammars
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sgl_ext.compat.held_schemas import BACKEND, checked_tools, held_answer
from sgl_ext.engine import sglang_api
from sgl_ext.engine.arguments import in_effect
from sgl_ext.engine.core.counters import counter
from sgl_ext.engine.core.request_context import RequestContext, current
from sgl_ext.engine.sglang_http_types import FunctionCallParser, ServingChat
from sgl_ext.engine.sglang_types import Original

_CALL = "<tool_call>"
_DEEPSEEK = "<\uff5ctool▁calls▁begin\uff5c>"
STARTS: dict[str, tuple[str, ...]] = {
    "apertus2509": ("<|tools_prefix|>",),
    "cohere_command4": ("<|START_ACTION|>",),
    "deepseekv3": (_DEEPSEEK,),
    "deepseekv31": (_DEEPSEEK,),
    "deepseekv32": ("<\uff5cDSML\uff5cfunction_calls>", "<\uff5cDSML\uff5cinvoke"),
    "deepseekv4": ("<\uff5cDSML\uff5ctool_calls>", "<\uff5cDSML\uff5cinvoke"),
    "deepseekv41": ("<\uff5cDSML\uff5c calls>", "<\uff5cDSML\uff5c invoke"),
    "dots": ("<dots_function_call>",),
    "gemma4": ("<|tool_call>",),
    "gigachat3": ("<|function_call|>", "function call<|role_sep|>\n"),
    "gigachat35": ("<\uff5cGCML\uff5ctool_calls>",),
    "hunyuan": ("<tool_calls>",),
    "interns1": ("<|action_start|> <|plugin|>",),
    "iquest_q1": ("<iquest_tool_call>",),
    "k2_horizon": ("<ifm|tool_call>",),
    "kimi_k2": ("<|tool_calls_section_begin|>",),
    "lfm2": ("<|tool_call_start|>",),
    "minicpm5": ("<function",),
    "minimax-m2": ("<minimax:tool_call>",),
    "minimax-m3": ("]<]minimax[>[<tool_call>",),
    "mistral": ("[TOOL_CALLS",),
    "step3": ("<\uff5ctool_calls_begin\uff5c>",),
    **dict.fromkeys(("glm", "glm45", "glm47", "hermes", "ling3", "mimo", "nanbeige"), (_CALL,)),
    **dict.fromkeys(("poolside_v1", "qwen", "qwen25", "qwen3_coder"), (_CALL,)),
    **dict.fromkeys(("spark25", "step3p5", "trinity"), (_CALL,)),
}
"""The texts with which calls begin, by SGLang's name of the parser."""

Format = dict[str, Any]


def tag(form: Format) -> tuple[str, Any]:
    """A constraint on an answer, as SGLang hands it on."""
    return "structural_tag", sglang_api.StructuralTag(format=form)


def no_call(name: str) -> Format:
    """Any text without a call."""
    return {"type": "any_text", "excludes": list(STARTS[name])}


def json_or(schema: str, calls: Any) -> tuple[str, Any]:
    """JSON of a schema, or the calls of a constraint that `tag` made.

    Raises ValueError, as for a schema alone, if a grammar would ignore a part of it.
    """
    document = held_answer(json.loads(schema))
    answer = {"type": "json_schema", "json_schema": document}
    either = {"type": "or", "elements": [answer, calls.format]}
    return tag(after_thinking(either))


def after_thinking(form: Format) -> Format:
    """A format behind the line breaks that models write after their thinking."""
    breaks: Format = {"type": "regex", "pattern": r"\n{0,2}"}
    return {"type": "sequence", "elements": [breaks, form]}


def calls_of(
    parser: FunctionCallParser, name: str, *, must_call: bool, one: bool, thinks: bool
) -> Format | None:
    """Calls of the parser's tools and no others; None if SGLang has no grammar for them.

    name: SGLang's name of the parser.
    must_call: the answer begins with a call. Otherwise text may come before it, or no call.
    one: at most one call. thinks: the answer begins with thinking, which no other grammar covers.
    """
    detector, choice = parser.detector, "required" if must_call else "auto"
    tools = parser.structural_tag_tools()
    native = detector.get_structural_tag(
        tools=tools, tool_choice=choice, thinking_mode=thinks, parallel_tool_calls=not one
    )
    if native is not None:
        form: Format = native.model_dump()["format"]
        return form
    if not detector.supports_structural_tag() or detector.parses_required_natively():
        return None
    legacy = parser.get_legacy_structural_tag()
    if not all(found.begin.startswith(STARTS[name]) for found in legacy.structures):
        return None
    tags = [
        {"type": "tag", "begin": begin, "content": content, "end": ends}
        for found in legacy.structures
        for content in [{"type": "json_schema", "json_schema": found.schema_ or {}}]
        for ends in [_read(_spaced_ends(found.end), found.end, detector.eot_token)]
        for begin in _read(_spaced_begins(found.begin), found.begin, detector.bot_token)
    ]
    limits = {"at_least_one": must_call, "stop_after_first": one}
    return {"type": "triggered_tags", "triggers": legacy.triggers, "tags": tags, **limits}


def any_call(name: str) -> Format:
    """An answer that begins with a call of any tool, with any arguments."""
    starts = [{"type": "const_string", "value": start} for start in STARTS[name]]
    begin = starts[0] if len(starts) == 1 else {"type": "or", "elements": starts}
    return {"type": "sequence", "elements": [begin, {"type": "any_text"}]}


def _read(texts: Sequence[str], own: str, token: str) -> list[str]:
    """Those of the texts that a parser with this token reads: `qwen25` wants the line breaks."""
    return [text for text in texts if text == own or text.startswith(token) or text.endswith(token)]


def _spaced_begins(begin: str) -> Sequence[str]:
    spaced = begin.replace('":"', '": "')
    spaced = spaced + " " if spaced != begin and spaced.endswith(":") else spaced
    found = [begin, spaced]
    if begin.startswith(_CALL):
        inner = [text.removeprefix(_CALL).lstrip("\n") for text in found]
        found = [_CALL + space + text for text in inner for space in ("", "\n")]
    return list(dict.fromkeys(found))


def _spaced_ends(end: str) -> list[str]:
    close = "</tool_call>"
    if not end.endswith(close):
        return [end]
    inner = end.removesuffix(close).rstrip("\n")
    return [f"{inner}{close}", f"{inner}\n{close}"]


_FORMS = {"json_schema", "json_object"}


@dataclass(slots=True)
class Calls:
    """What is known of the calls of an answer that is being prepared.

    parser: SGLang's name of the tool-call parser, if a grammar can describe its calls, else None.
    keeps_tools: whether tools that may not be called stay in the prompt.
    has_schema: the answer has a JSON schema, or is any JSON object.
    separates_thinking: SGLang leaves thinking out of grammars.
    allowed: the names of the tools that may be called; None: all.
    is_bound: no tool can be called that the choice excludes.
    holds_schemas: a schema is held, or refused.
    or_answer: the grammar of the calls, for an answer of a schema or calls.
    """

    parser: str | None
    keeps_tools: bool
    has_schema: bool
    separates_thinking: bool
    allowed: frozenset[str] | None
    is_bound: bool = True
    holds_schemas: bool = False
    or_answer: Any = field(default=None)


def hold_choice(
    original: Original, serving: ServingChat, request: Any, *args: Any, **kw: Any
) -> Any:
    """Around `OpenAIServingChat._process_messages`, which renders all protocols' prompts."""
    context = current()
    if context is None:
        return original(serving, request, *args, **kw)
    context.calls = None
    if not request.tools:
        return original(serving, request, *args, **kw)
    name = serving.tool_call_parser
    holds_schemas = name is not None and in_effect().grammar_backend == BACKEND
    described = name in STARTS and holds_schemas
    calls = context.calls = Calls(
        name if described else None,
        context.keeps_tools,
        kw.get("output_constrained", False)
        or getattr(request.response_format, "type", None) in _FORMS,
        bool(serving.reasoning_parser),
        context.allowed_tools,
        holds_schemas=holds_schemas,
    )
    if calls.parser is None and calls.allowed is not None and calls.keeps_tools:
        _leave_out_tools(context, request, calls.allowed)
    processed = original(serving, request, *args, **kw)
    if request.tool_choice == "none" and calls.keeps_tools and calls.parser:
        processed.tool_call_constraint = tag(no_call(calls.parser))
    elif request.tool_choice == "auto" and calls.has_schema and calls.or_answer is None and name:
        _count(context, "answer_schema")
    return processed


def constrain_calls(
    original: Original,
    parser: FunctionCallParser,
    choice: Any,
    parallel_tool_calls: bool = True,
    thinking_mode: bool = False,
) -> Any:
    """Around `FunctionCallParser.get_structure_constraint`: only allowed tools can be called."""
    context = current()
    calls: Calls | None = None if context is None else context.calls
    name = getattr(getattr(choice, "function", None), "name", None)
    allowed = None if calls is None else calls.allowed
    names = {name} if name else allowed
    tools = parser.tools
    if names is not None:
        parser.tools = [tool for tool in tools if tool.function.name in names] or tools
    try:
        limits = calls is not None and calls.parser and (calls.has_schema or allowed is not None)
        constrained = parser.structural_tag_tools() or []
        is_bound = choice != "auto" or limits or any(tool.function.strict for tool in constrained)
        if calls is not None and calls.holds_schemas and is_bound:
            parser.tools = checked_tools(parser.tools, constrained)
        if calls is not None and limits and choice == "auto":
            thinks = thinking_mode and not calls.separates_thinking
            return _auto(calls, parser, one=not parallel_tool_calls, thinks=thinks)
        found = original(parser, choice, parallel_tool_calls, thinking_mode)
        if calls is not None and calls.parser and found and hasattr(found[1], "structures"):
            # SGLang's older grammar, which leaves out white space that models write.
            must_call, one = choice != "auto", not parallel_tool_calls
            form = calls_of(parser, calls.parser, must_call=must_call, one=one, thinks=False)
            if form is not None:
                found = tag(after_thinking(form) if must_call else form)
    finally:
        parser.tools = tools
    if calls is not None and names is not None:
        # Without a grammar of the parser, SGLang has the named call as JSON.
        is_json = name is not None and not parser.detector.parses_required_natively()
        calls.is_bound = found is not None or is_json
    return found


def _auto(calls: Calls, parser: FunctionCallParser, *, one: bool, thinks: bool) -> Any:
    """The constraint of an answer that may call, if its schema or its choice needs one."""
    assert calls.parser is not None
    must_call = calls.has_schema
    form = calls_of(parser, calls.parser, must_call=must_call, one=one, thinks=thinks)
    calls.is_bound = form is not None or calls.allowed is None
    if form is None and must_call:
        form = any_call(calls.parser)
    if form is None:
        return None
    constraint = tag(form)
    calls.or_answer = constraint[1] if must_call else None
    return constraint


def keep_tools(
    original: Original, serving: ServingChat, request: Any, tools: Any, *args: Any, **kw: Any
) -> Any:
    """Around `OpenAIServingChat._apply_jinja_template`: the tools that the prompt shows."""
    context = current()
    calls: Calls | None = None if context is None else context.calls
    if context is None or calls is None or not calls.keeps_tools or not request.tools:
        return original(serving, request, tools, *args, **kw)
    choice = request.tool_choice
    is_named = not isinstance(choice, str)
    is_bound = calls.parser is not None if choice == "none" else calls.is_bound
    if is_bound and (is_named or choice == "none"):
        tools = [tool.model_dump() for tool in request.tools]
    elif not is_bound and calls.allowed is not None:
        _leave_out_tools(context, request, calls.allowed)
        tools = [tool.model_dump() for tool in request.tools]
    elif not is_bound:
        _count(context, "tool_choice")
    return original(serving, request, tools, *args, **kw)


def join_schema(
    original: Original, request: Any, *args: Any, tool_call_constraint: Any = None, **kw: Any
) -> Any:
    """Around `to_sampling_params` of chat completions and responses: the grammar of the answer.

    SGLang takes one grammar and leaves the other out, or rejects the request.
    """
    context = current()
    calls: Calls | None = None if context is None else context.calls
    if tool_call_constraint is None or calls is None:
        return original(request, *args, tool_call_constraint=tool_call_constraint, **kw)
    free = original(request, *args, **kw)
    schema = free.get("json_schema")
    effective = getattr(request, "effective_tool_choice", None)  # of responses
    choice = effective() if effective else request.tool_choice
    if choice == "none":
        if any(free.get(field) for field in ("json_schema", "regex", "ebnf", "structural_tag")):
            return free  # no call is read from it
    elif schema is not None and (choice != "auto" or calls.or_answer is not None):
        if choice == "auto":
            tool_call_constraint = json_or(schema, calls.or_answer)
        request = request.model_copy(update={_FIELDS[type(request).__name__]: None})
    return original(request, *args, tool_call_constraint=tool_call_constraint, **kw)


_FIELDS = {"ChatCompletionRequest": "response_format", "ResponsesRequest": "text"}


def _leave_out_tools(context: RequestContext, request: Any, allowed: frozenset[str]) -> None:
    kept = allowed | context.withdrawn_tools  # of these, the prompt says that they are gone
    left = [tool for tool in request.tools if tool.function.name in kept]
    if left != request.tools:
        request.tools = left
        _count(context, "tool_choice")


def _count(context: RequestContext, what: str) -> None:
    if context.renderings is None:  # a copy of a request is no request
        counter("choices_without_grammar").labels(context.path, what).inc()
