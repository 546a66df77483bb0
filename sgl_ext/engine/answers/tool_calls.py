"""Tool calls in a stream: no words of the model are lost, wherever the stream is cut into chunks.

SGLang's parser drops text that comes in one chunk with the call after it, and returns only the
first of two calls in a chunk. So a chunk is split before its first call, and the parser runs again
as long as it finds calls.

A call of an undeclared tool is forwarded, in a stream as in a whole answer: the client can answer
that there is no such tool. SGLang drops the call, and in a stream makes text of its second half.

White space right before a call belongs to the format and not to the model's words; SGLang's whole
answers leave it out. In a stream it is held back until the next chunk shows what follows.

SGLang holds back the beginning of a marker until the next chunk, too. Without a next chunk it is
text; between two calls it belongs to the format.

What a client allows holds for every format: one call only, where most formats have no grammar for
it, and only tools of its list, where no grammar holds the model to them (`tool_choice`). Other
calls are left out of the answer.
"""

import os
from typing import Any

from sgl_ext.engine import sglang_api
from sgl_ext.engine.answers.early_calls import without_tails
from sgl_ext.engine.core.counters import counter
from sgl_ext.engine.core.request_context import current
from sgl_ext.engine.sglang_http_types import FormatDetector
from sgl_ext.engine.sglang_types import Original

_UNKNOWN_TOOLS = "SGLANG_FORWARD_UNKNOWN_TOOLS"
_END_BUFFER = "_normal_text_buffer"  # where some parsers hold the beginning of an end marker


class _AnyTool(dict[str, int]):
    """Tools by name. A parser looks up in it whether a tool was declared."""

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str)


def forward_unknown_tools() -> None:
    """Makes SGLang forward calls of undeclared tools, unless the operator set its variable."""
    os.environ.setdefault(_UNKNOWN_TOOLS, "1")


def parse_chunk(original: Original, detector: FormatDetector, text: str, tools: Any) -> Any:
    """Around `BaseFormatDetector.parse_streaming_increment`, which its subclasses call."""
    forwards = sglang_api.envs.SGLANG_FORWARD_UNKNOWN_TOOLS.get
    if not hasattr(detector, "_tool_indices") and forwards():
        detector._tool_indices = _AnyTool(detector._get_tool_indices(tools))
    words = ""
    begin, buffer = detector.bot_token, detector._buffer
    parser: Any = detector
    parser.sgl_ext_uses_base = True
    is_in_call = bool(detector.current_tool_name_sent or detector.current_tool_id > 0)
    # Arguments may contain what begins a call: in a call, and in a format without an opening token.
    splits = len(begin) > 1 and not is_in_call
    at = (buffer + text).find(begin) if splits else -1
    if at > 0:
        words = (buffer + text)[:at]
        if detector.eot_token:
            words = words.replace(detector.eot_token, "")
        detector._buffer, text = "", (buffer + text)[at:]
    found = original(detector, text, tools)
    more = found
    while detector._buffer and any(call.name or call.parameters for call in more.calls):
        more = original(detector, "", tools)
        found.calls = [*found.calls, *more.calls]
        found.normal_text += more.normal_text
    if found.calls and is_in_call and hasattr(detector, _END_BUFFER):
        setattr(detector, _END_BUFFER, "")
    found.normal_text = words + (found.normal_text or "")
    return found


def hold_space(original: Original, parser: Any, chunk: str) -> Any:
    """Around `FunctionCallParser.parse_stream_chunk`."""
    text, calls = _parsed(original, parser, chunk)
    calls = _allowed_parts(parser, without_tails(parser, calls))
    begins = any(call.name for call in calls)
    text = getattr(parser, "sgl_ext_space", "") + text
    words = text.rstrip()
    parser.sgl_ext_space = "" if begins else text[len(words) :]
    parser.sgl_ext_called = begins or getattr(parser, "sgl_ext_called", False)
    return words, calls


def _parsed(original: Original, parser: Any, chunk: str) -> tuple[str, list[Any]]:
    """A chunk's text and calls. Formats with a parser of their own, too, get the words before the
    first call apart from it."""
    begin = getattr(parser.detector, "bot_token", None) or ""
    splits = len(begin) > 1 and not getattr(parser, "sgl_ext_called", False)
    at = chunk.find(begin) if splits else -1
    if at <= 0:
        text, calls = original(parser, chunk)
        if text == chunk and hasattr(parser.detector, "harmony_parser"):
            # It has not noticed that the text is passed on, and would return it with the call.
            parser.detector.harmony_parser = type(parser.detector.harmony_parser)()
        return text, calls
    words, before = original(parser, chunk[:at])
    text, calls = original(parser, chunk[at:])
    return words + text, [*before, *calls]


def release_space(original: Original, parser: Any) -> Any:
    """Around `FunctionCallParser.parse_stream_end`: no call follows any more."""
    text, calls = original(parser)
    calls = _allowed_parts(parser, without_tails(parser, calls))
    if calls or getattr(parser, "sgl_ext_called", False):
        return text, calls
    detector = parser.detector
    if not text and hasattr(detector, "sgl_ext_uses_base"):  # what it holds back is no marker
        is_marker = detector._ends_with_partial_token(detector._buffer, detector.bot_token)
        text = getattr(detector, _END_BUFFER, "") + (detector._buffer if is_marker else "")
    return getattr(parser, "sgl_ext_space", "") + text, calls


def parse_whole(original: Original, parser: Any, *args: Any, **kw: Any) -> Any:
    """Around `FunctionCallParser.parse_non_stream`."""
    text, calls = original(parser, *args, **kw)
    context = current()
    if context is not None and context.allowed_tools is not None:
        left = [call for call in calls if call.name in context.allowed_tools]
        counter("forbidden_calls_left_out").inc(len(calls) - len(left))
        calls = left
    return text, _allowed(calls, [index > 0 for index in range(len(calls))])


def _allowed_parts(parser: Any, calls: list[Any]) -> list[Any]:
    """The parts of calls in a stream that the client takes."""
    calls = _allowed(calls, [call.tool_index > 0 for call in calls])
    context = current()
    if not calls or context is None or context.allowed_tools is None:
        return calls
    forbidden = parser.__dict__.setdefault("sgl_ext_forbidden", set())
    for call in calls:
        if call.name and call.name not in context.allowed_tools:
            forbidden.add(call.tool_index)
            counter("forbidden_calls_left_out").inc()
    return [call for call in calls if call.tool_index not in forbidden]


def _allowed(calls: list[Any], are_further: list[bool]) -> list[Any]:
    """The parts of calls that the client takes. A call's first part has its name."""
    context = current()
    if not any(are_further) or context is None or not _takes_one(context.body):
        return calls
    further = [call for call, is_further in zip(calls, are_further, strict=True) if is_further]
    counter("parallel_calls_left_out").inc(sum(bool(call.name) for call in further))
    return [call for call, is_further in zip(calls, are_further, strict=True) if not is_further]


def _takes_one(body: Any) -> bool:
    """Whether an answer may have one call at most, by the field of any protocol."""
    choice = body.get("tool_choice") if isinstance(body, dict) else None
    if isinstance(choice, dict) and choice.get("disable_parallel_tool_use") is True:
        return True
    return isinstance(body, dict) and body.get("parallel_tool_calls") is False
