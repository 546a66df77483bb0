"""What an answer may hold, as xgrammar's structural tags: calls of some tools, no call, or JSON.

A call begins with the same text in every answer of a model: `STARTS` names it for each of SGLang's
tool-call parsers. Without that text no parser finds a call, so text that excludes it holds none.
Parsers that are missing there find calls in other text, too, or frame all of an answer; for them
no such tag can be written.

Where SGLang has a grammar for the calls of a parser, it is used here: xgrammar's for the model, or
SGLang's older one, which this module widens to the white space that models are trained on. For
other parsers a call is its start and any text after it, and a grammar cannot limit the names.
"""

import json
from collections.abc import Sequence
from typing import Any

from sgl_ext.compat.held_schemas import refuse_answer
from sgl_ext.engine import sglang_api
from sgl_ext.engine.sglang_http_types import FunctionCallParser

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
    document = json.loads(schema)
    refuse_answer(document)
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
