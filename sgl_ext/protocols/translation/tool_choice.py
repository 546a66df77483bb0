"""Lists of allowed tools in `tool_choice`, as OpenAI's protocols have them.

SGLang knows no such list. Its `mode` says whether a tool must be called. The rest goes into the
answer's grammar, or into the prompt, if that has only tools that may be called.
"""

from typing import Any

from sgl_ext.protocols.translation.response_tools import flat_name
from sgl_ext.requests.protocol import Json, Model
from sgl_ext.requests.rewriting import Counts, edited


def with_allowed_tools(body: Json, model: Model, counts: Counts) -> Json:
    """A request whose choice is the mode of its list of allowed tools.

    It has only the allowed tools if the model keeps no others, or if the list has none of them.
    """
    allowed, tools = _list(body["tool_choice"]), body.get("tools")
    counts["allowed_tools"] += 1
    edits: Json = {"tool_choice": "required" if allowed.get("mode") == "required" else "auto"}
    names = allowed_names(body, model)
    if names is not None and isinstance(tools, list):
        left = [tool for tool in tools if called_name(tool, model) in names]
        if not left or not model.keeps_tools:
            edits["tools"] = left
    return edited(body, edits)


def allowed_names(body: Any, model: Model) -> frozenset[Any] | None:
    """The names of the tools that a request allows, as the model calls them; None: any tool."""
    choice = body.get("tool_choice") if isinstance(body, dict) else None
    if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
        return None
    listed = _list(choice).get("tools")
    if not isinstance(listed, list):
        return None
    names = (called_name(tool, model) for tool in listed)
    return frozenset(name for name in names if isinstance(name, str))


def called_name(tool: Any, model: Model) -> Any:
    """The name by which the model calls a tool that the client names, or declares."""
    if not isinstance(tool, dict):
        return None
    tool = tool["function"] if isinstance(tool.get("function"), dict) else tool
    name, namespace = tool.get("name"), tool.get("namespace")
    if model.takes_namespaces or not (isinstance(name, str) and isinstance(namespace, str)):
        return name
    return flat_name(namespace, name)


def _list(choice: Json) -> Json:
    """Chat completions nest the list, responses do not."""
    inner = choice.get("allowed_tools")
    return inner if isinstance(inner, dict) else choice
