"""Tool calls in a stream: nothing that a model said is lost, however the stream is cut.

SGLang's parser of calls drops the text before a call that comes in one piece with it, and of
two calls in a piece hands on the first alone. So it is given a piece in two, and asked again
for as long as it finds more.

A call of a tool that nobody declared is a call, in a stream as in a whole answer: the client can
say so, and the model do better. SGLang drops it, and in a stream makes a text of its second half.

White space right before a call is the format's and not the model's words, which is how whole
answers have it; in a stream it waits until it is known what follows.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from sgl_ext.engine import sglang_api

_UNKNOWN_TOOLS = "SGLANG_FORWARD_UNKNOWN_TOOLS"


class _AnyTool(dict[str, int]):
    """The tools by name, of which a parser asks whether one was declared."""

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str)


def forward_unknown_tools() -> None:
    """Has SGLang hand on calls of tools that were not declared, unless its operator said."""
    os.environ.setdefault(_UNKNOWN_TOOLS, "1")


def parse_piece(original: Callable[..., Any], detector: Any, text: str, tools: Any) -> Any:
    """Around `BaseFormatDetector.parse_streaming_increment`, which its subclasses call."""
    forwards = sglang_api.envs.SGLANG_FORWARD_UNKNOWN_TOOLS.get
    if not hasattr(detector, "_tool_indices") and forwards():
        detector._tool_indices = _AnyTool(detector._get_tool_indices(tools))
    said = ""
    begin, held = detector.bot_token, detector._buffer
    # Where a call is JSON and nothing else, what begins one may stand in its arguments.
    splits = len(begin) > 1 and not _is_in_call(detector)
    at = (held + text).find(begin) if splits else -1
    if at > 0:
        said = (held + text)[:at]
        if detector.eot_token:
            said = said.replace(detector.eot_token, "")
        detector._buffer, text = "", (held + text)[at:]
    found = original(detector, text, tools)
    more = found
    while detector._buffer and any(call.name or call.parameters for call in more.calls):
        more = original(detector, "", tools)
        found.calls = [*found.calls, *more.calls]
        found.normal_text += more.normal_text
    found.normal_text = said + (found.normal_text or "")
    return found


def _is_in_call(detector: Any) -> bool:
    """Whether a call has begun: what looks like another one may be in its arguments."""
    return bool(detector.current_tool_name_sent or detector.current_tool_id > 0)


def hold_space(original: Callable[..., Any], parser: Any, chunk: str) -> Any:
    """Around `FunctionCallParser.parse_stream_chunk`."""
    text, calls = original(parser, chunk)
    begins = any(call.name for call in calls)
    text = getattr(parser, "sgl_ext_space", "") + text
    said = text.rstrip()
    parser.sgl_ext_space = "" if begins else text[len(said) :]
    parser.sgl_ext_called = begins or getattr(parser, "sgl_ext_called", False)
    return said, calls


def release_space(original: Callable[..., Any], parser: Any) -> Any:
    """Around `FunctionCallParser.parse_stream_end`: no call follows any more."""
    text, calls = original(parser)
    if calls or getattr(parser, "sgl_ext_called", False):
        return text, calls
    return getattr(parser, "sgl_ext_space", "") + text, calls
