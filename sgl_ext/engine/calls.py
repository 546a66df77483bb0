"""Tool calls in a stream: nothing that a model said is lost, however the stream is cut.

SGLang's parser of calls drops the text before a call that comes in one piece with it, and of
two calls in a piece hands on the first alone. So it is given a piece in two, and asked again
for as long as it finds more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def parse_piece(original: Callable[..., Any], detector: Any, text: str, tools: Any) -> Any:
    """Around `BaseFormatDetector.parse_streaming_increment`, which its subclasses call."""
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
