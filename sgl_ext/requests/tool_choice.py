"""How a client restricts the calls that a model may make."""

from typing import Any


def takes_one_call(body: Any) -> bool:
    """Whether an answer to this body may have one call at most, by the field of any protocol."""
    if not isinstance(body, dict):
        return False
    choice = body.get("tool_choice")
    is_disabled = isinstance(choice, dict) and choice.get("disable_parallel_tool_use") is True
    return is_disabled or body.get("parallel_tool_calls") is False
