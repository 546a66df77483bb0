"""What a request allows its answer to hold is a matter of grammar, and not of the prompt.

SGLang renders no tools for `tool_choice: none` and only one for a named choice, so each change of
the choice is another prompt, and the cache has nothing behind its first tool. Here all tools
stay in the prompt, and a grammar excludes the calls that are not allowed. A JSON schema for the
answer means a call or an answer of the schema; SGLang's grammar would have no call.

    conversion            `hold_choice`        begins to note what was found about the request
      parser's grammar    `constrain_calls`    makes the grammar of the calls
      template            `keep_tools`         renders all tools if the grammar binds the choice
    sampling parameters   `join_schema`        joins the grammar of the calls and of the answer

Where no grammar can hold the choice (`call_formats.STARTS`, another grammar backend), the prompt
has the allowed tools only, as in SGLang, and the request is counted.
"""

from dataclasses import dataclass, field
from typing import Any

from sgl_ext.compat import call_formats
from sgl_ext.compat.held_schemas import BACKEND, checked_tools
from sgl_ext.engine.arguments import in_effect
from sgl_ext.engine.core.counters import counter
from sgl_ext.engine.core.request_context import RequestContext, current
from sgl_ext.engine.sglang_http_types import FunctionCallParser, ServingChat
from sgl_ext.engine.sglang_types import Original

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
    described = name in call_formats.STARTS and holds_schemas
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
        processed.tool_call_constraint = call_formats.tag(call_formats.no_call(calls.parser))
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
            form = call_formats.calls_of(
                parser, calls.parser, must_call=must_call, one=one, thinks=False
            )
            if form is not None:
                found = call_formats.tag(call_formats.after_thinking(form) if must_call else form)
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
    form = call_formats.calls_of(parser, calls.parser, must_call=must_call, one=one, thinks=thinks)
    calls.is_bound = form is not None or calls.allowed is None
    if form is None and must_call:
        form = call_formats.any_call(calls.parser)
    if form is None:
        return None
    constraint = call_formats.tag(form)
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
            tool_call_constraint = call_formats.json_or(schema, calls.or_answer)
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
