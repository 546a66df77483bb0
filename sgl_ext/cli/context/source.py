"""A block of a context as it is built, with what a person compares."""

import json
from typing import Any, NamedTuple


class Source(NamedTuple):
    """A block to register.

    where: what a person looks at when it changed: a path, or words.
    lines: its content in the units that a person counts.
    unit: what these are: "line", "tool" or "message".
    """

    id: str
    kind: str
    layer: str
    content: Any
    where: str
    lines: list[str]
    unit: str = "line"


def text_source(id: str, kind: str, layer: str, text: str, *, path: str | None = None) -> Source:
    """A text; if it is a file's, a frame names its path."""
    content = text if path is None else f'<file path="{path}">\n{text}\n</file>'
    return Source(id, kind, layer, content, path or id, text.splitlines())


def tools_source(id: str, layer: str, tools: list[Any], where: str) -> Source:
    """A list of tools."""
    return Source(id, "tools", layer, tools, where, [json.dumps(tool) for tool in tools], "tool")
