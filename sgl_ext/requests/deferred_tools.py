"""Tools that a client declares, and that the prompt does not show at its head.

A client defers a tool (`defer_loading`) so that it can offer it later without changing the head of
the prompt: a message that refers to the tool shows it. If a vendor's server should search the
deferred tools, all are at the head, because no server here does.
"""

from typing import Any

_SEARCHES = ("tool_search_tool", "tool_search")


def tools_at_head(tools: list[Any]) -> list[Any]:
    """The tools that the prompt shows at its head; the same list if none is deferred."""
    if not any(map(is_deferred, tools)) or are_searched(tools):
        return tools
    return [tool for tool in tools if not is_deferred(tool)]


def is_deferred(tool: Any) -> bool:
    """Whether a tool, of any protocol, says that it is shown later."""
    if not isinstance(tool, dict):
        return False
    function = tool.get("function")
    return tool.get("defer_loading") is True or (
        isinstance(function, dict) and function.get("defer_loading") is True
    )


def are_searched(tools: list[Any]) -> bool:
    """Whether a vendor's server should search these tools for those that the model needs."""
    kinds = (tool.get("type") for tool in tools if isinstance(tool, dict))
    return any(isinstance(kind, str) and kind.startswith(_SEARCHES) for kind in kinds)
