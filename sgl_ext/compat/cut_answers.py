"""Whether an answer was cut: by its limit of tokens, by a stop sequence, or by an error.

A call that is open at that point stays open. SGLang closes its arguments into valid JSON, and a
client then takes half a file for a whole one.
"""

from typing import Any

from sgl_ext.engine.core.request_context import current


def was_cut(reason: Any) -> bool:
    """Whether something else than the model ended an answer, by SGLang's reason of its end."""
    if not isinstance(reason, dict):
        return False
    kind, matched = reason.get("type"), reason.get("matched")
    return kind in ("length", "abort") or (kind == "stop" and isinstance(matched, str))


def note_end(reason: Any) -> None:
    """Notes whether the answer of the current request was cut. reason: None: it has no end yet."""
    context = current()
    if context is not None and reason is not None:
        context.is_cut = was_cut(reason)
