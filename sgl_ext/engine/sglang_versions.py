"""The versions of SGLang that the extension is tested with, and all that differs between them.

    TESTED       the versions, oldest first; the code is written for the last
    OFF          the groups of hooks that an older version cannot have
    WITHOUT_WORKERS  the versions that let nothing of ours into tokenizer workers
    STAND_INS    the symbols and attributes that an older version lacks, and what replaces them
    UNKNOWN      the fields of requests that an older version would ignore, so they are refused
    tested.json  signatures, and fingerprints of sources (`python -m sgl_ext.engine.hooks --tested`)

A start reads the table of the installed version. No other module asks for the version.
"""

import pkgutil
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import version
from typing import Any

TESTED = ("0.5.22", "0.5.23")
OFF: Mapping[str, frozenset[str]] = {
    "0.5.22": frozenset(("namespaces", "encoders", "items of responses")),
    "0.5.23": frozenset(),
}

WITHOUT_WORKERS = frozenset(("0.5.22",))


class Absent:
    """A class of SGLang's that a version lacks: nothing is an instance of it."""


def _strict_tools(parser: Any) -> Any:
    """The tools of a parser as grammars hold them, which SGLang 0.5.22 does in another function."""
    parameter = 2  # SGLang's ToolStrictLevel.PARAMETER
    if parser.tool_strict_level < parameter or not parser.tools:
        return parser.tools
    return [
        tool.model_copy(update={"function": tool.function.model_copy(update={"strict": True})})
        for tool in parser.tools
    ]


_OPENAI = "sglang.srt.entrypoints.openai"
STAND_INS: Mapping[str, Mapping[str, Any]] = {
    "0.5.22": {
        # No chat template says there how its answers are parsed.
        f"{_OPENAI}.serving_chat:ResponseTemplateReasoningDetector": Absent,
        f"{_OPENAI}.serving_chat:ResponseTemplateToolDetector": Absent,
        # Only the group "namespaces" makes one.
        f"{_OPENAI}.protocol:ResponseToolState": Absent,
        # No template is Python code there, and no encoder is an adapter.
        f"{_OPENAI}.serving_chat:OpenAIServingChat.encoding_adapter": None,
        "sglang.srt.parser.template_manager:TemplateManager.python_chat_template": None,
        "sglang.srt.function_call.function_call_parser:FunctionCallParser.structural_tag_tools": (
            _strict_tools
        ),
    },
}


# By protocol; "*" is each item of a list.
UNKNOWN: Mapping[str, Mapping[str, tuple[tuple[str, ...], ...]]] = {
    "0.5.22": {"messages": (("output_config", "format"), ("tools", "*", "strict"))},
}


@cache
def installed() -> str:
    """The installed version of SGLang."""
    return version("sglang")


def unknown_field(protocol: str, body: Any) -> str | None:
    """A field of a request whose meaning the installed SGLang would lose; None if there is none."""
    for path in UNKNOWN.get(installed(), {}).get(protocol, ()):
        for found, value in _values_at(path, body):
            if value not in (None, False):
                return found
    return None


def _values_at(path: tuple[str, ...], value: Any, above: str = "") -> Iterator[tuple[str, Any]]:
    if not path:
        yield above.lstrip("."), value
    elif path[0] == "*" and isinstance(value, list):
        for number, item in enumerate(value):
            yield from _values_at(path[1:], item, f"{above}.{number}")
    elif isinstance(value, dict) and path[0] in value:
        yield from _values_at(path[1:], value[path[0]], f"{above}.{path[0]}")


def is_tested(number: str) -> bool:
    """Whether tests of engines have passed with this version of SGLang."""
    return number in TESTED


def tested_text() -> str:
    """The tested versions, for a sentence."""
    return " and ".join(TESTED)


def put_stand_ins(number: str) -> None:
    """Gives SGLang's modules and classes what this version of them lacks."""
    for owner, name, value in _stand_ins(number):
        setattr(owner, name, value)


def _stand_ins(number: str) -> Iterator[tuple[Any, str, Any]]:
    for path, value in STAND_INS.get(number, {}).items():
        module, _, rest = path.partition(":")
        owners, _, name = rest.rpartition(".")
        owner = pkgutil.resolve_name(f"{module}:{owners}" if owners else module)
        yield owner, name, value
