"""What pydantic and jsonschema found wrong with a body, as the field's path and one sentence.

    pydantic    messages.0.Union1.role       Input should be 'user'
                messages.0.Union2.content    Input should be a valid string
    here        messages.0.content           Input should be a valid string

A value that may have several types is tried as each of them, and each says what it misses. Those
count that come furthest: that took the `role` or `type`, or found the fault deeper inside. SGLang
answers some of these errors as text, with its own classes and the addresses of libraries.
"""

import re
from ast import literal_eval
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

_WORD = re.compile(r"[a-z_][a-z0-9_]*\Z")
_TYPES = frozenset({"body", "str", "list", "dict", "int", "float", "bool"})
_KINDS = ("role", "type")
_PYDANTIC = re.compile(r"\d+ validation errors? for [^\n]+\n")
# The same as SGLang writes it on its own paths.
_LISTED = re.compile(r"'loc': (\([^()]*\)), 'msg': ('(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")")
_DETAILS = re.compile(r" \[type=\w+, input_value=.*\Z", re.DOTALL)
_OF_LIBRARY = re.compile(r"\s*For further information visit \S+")
_SCHEMA = re.compile(r"Tool (\d+) function has invalid 'parameters' schema: (.*)", re.DOTALL)
_JSONSCHEMA = "\n\nFailed validating "
_VALUE_ERROR = re.compile(r"^(Value error|Assertion failed), ")
# SGLang's own sentences that name no field, or that of a class of its own.
_SENTENCES = {
    "schema_ is required for json_schema response format request.": (
        "response_format.json_schema: Field required"
    ),
    "Messages cannot be empty.": "messages: must not be empty",
    "Prompt cannot be empty": "prompt: must not be empty",
}
_ITEM_TYPES: Mapping[str, Any] = {
    "content": (str, list),
    "output": (str, list),
    "name": str,
    "arguments": str,
    "call_id": str,
    "role": str,
}


class Wrong(NamedTuple):
    """One wrong field. path: "" for the whole body."""

    path: str
    what: str


def fields_of(errors: Sequence[Any]) -> list[Wrong]:
    """The wrong fields in pydantic's list of errors, each once."""
    located = [(tuple(error.get("loc", ())), error) for error in errors]
    found: dict[str, str] = {}
    for location, error in _furthest(located):
        path = ".".join(str(step) for step in location if _is_field(step))
        what = str(error.get("msg", "")).strip()
        if error.get("type") == "json_invalid":  # then the place is a byte of the body
            path, what = "", f"{what}: {error.get('ctx', {}).get('error', '')}"
        found.setdefault(path, _VALUE_ERROR.sub("", what))
    return [Wrong(path, what) for path, what in found.items()]


def plain(message: str) -> str:
    """A message of SGLang's without what libraries say of themselves."""
    if (known := _SENTENCES.get(message)) is not None:
        return known
    errors = [
        {"loc": literal_eval(found[1]), "msg": literal_eval(found[2])}
        for found in _LISTED.finditer(message)
    ]
    if (found := _PYDANTIC.search(message)) is not None:
        errors = list(_read(message[found.end() :]))
    if errors:
        wrong = fields_of(errors)[0]
        return f"{wrong.path or 'body'}: {wrong.what}"
    if (tool := _SCHEMA.match(message)) is not None:
        what = tool[2].partition(_JSONSCHEMA)[0]
        return f"tools.{tool[1]}.function.parameters: {what}"
    return _OF_LIBRARY.sub("", message.partition(_JSONSCHEMA)[0])


def of_item(message: str, items: Any) -> Wrong | None:
    """What is wrong with an item of /v1/responses, of which SGLang made a message; None if the
    message says something else."""
    head, _, what = message.partition(": ")
    if not re.fullmatch(r"messages(\.\w+)*", head):
        return None
    for at, item in enumerate(items if isinstance(items, list) else ()):
        for name, types in _ITEM_TYPES.items() if isinstance(item, dict) else ():
            if item.get(name) is not None and not isinstance(item[name], types):
                return Wrong(f"input[{at}].{name}", what)
    return Wrong("input", what)


def _read(text: str) -> Iterator[dict[str, Any]]:
    """The errors in pydantic's text: a place, and below it what is wrong there."""
    place, said = "", list[str]()
    for line in [*text.splitlines(), "end"]:
        if line.startswith(" "):
            if not _OF_LIBRARY.match(line):
                said.append(line.strip())
            continue
        if said:
            yield {"loc": _steps(place), "msg": _DETAILS.sub("", "\n".join(said))}
        place, said = line, []


def _steps(place: str) -> tuple[Any, ...]:
    """A dotted place as steps. Types have dots and commas inside of brackets."""
    steps, depth = [""], 0
    for char in place:
        depth += (char in "[(") - (char in "])")
        if char == "." and not depth:
            steps.append("")
        else:
            steps[-1] += char
    return tuple(int(step) if step.isdecimal() else step for step in steps)


def _furthest(located: list[tuple[tuple[Any, ...], Any]]) -> list[tuple[tuple[Any, ...], Any]]:
    """Of each value that was tried as several types, the errors of those that come furthest."""
    branches: dict[tuple[Any, ...], dict[Any, list[tuple[Any, ...]]]] = {}
    for location, _ in located:
        at = next((i for i, step in enumerate(location) if i and not _is_field(step)), None)
        if at is not None:
            branches.setdefault(location[:at], {}).setdefault(location[at], []).append(location)
    left = set[tuple[Any, ...]]()
    for tried in branches.values():
        if len(tried) == 1:
            continue
        best = max(map(_distance, tried.values()))
        for locations in tried.values():
            if _distance(locations) < best:
                left.update(locations)
    return [each for each in located if each[0] not in left]


def _distance(locations: list[tuple[Any, ...]]) -> tuple[bool, int]:
    """How far one type came: whether it is the kind that is meant, and how deep its faults are."""
    return not any(each[-1] in _KINDS for each in locations), max(map(len, locations))


def _is_field(step: Any) -> bool:
    """Whether a step of pydantic's path to an error names a field, and not one of its types."""
    return isinstance(step, int) or (bool(_WORD.match(str(step))) and step not in _TYPES)
