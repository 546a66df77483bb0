"""Errors: each one has the shape of its protocol, the right status, and no internals of the server.

status >= 400       the body is collected, and sent in the protocol's shape
on a native path    likewise, in SGLang's own shape, if it exposes the server's internals
an error event      the event is sent in the protocol's shape
a stream            SGLang answers status 200 to a stream that fails before its first event with
                    content, for example because no grammar can be made of a schema. So the head
                    waits for that event, and becomes an error's head. Only the scheduler knows
                    whether a request can run, so nothing is known of it before

What pydantic and jsonschema found wrong with a body becomes the field's path and one sentence:

    pydantic    messages.0.Union1.role       Input should be 'user'
                messages.0.Union2.content    Input should be a valid string
    here        messages.0.content           must be a string

A value that may have several types is tried as each of them, and each says what it misses. Those
count that come furthest: that took the `role` or `type`, or found the fault deeper inside. If two
come as far, both are named: "must be a string or a list". SGLang answers some of these errors as
text, with its own classes and the addresses of libraries.

SGLang's own shapes differ by path and by the code that raised them, and some show a traceback or
the server's files. An error that a harness acts upon is worded as its vendor words it: Claude Code
and Codex compact the conversation when a prompt is too long.

On /v1/responses, SGLang answers 400 to a whole request that the scheduler aborted with another
status, or that failed in SGLang's own code; a stream tells no status at all. And to the text of an
error it adds that of its cause, which is "None" if there is none. So status and text are noted here
where SGLang has them, for the error middleware.

For some bodies that it rejects, SGLang logs a traceback as if it had failed. Such a record becomes
one line.

    fault     errors have shapes of SGLang's own, wrong statuses, several texts, and show server
              internals
    hooks     group "errors", and a middleware
    test      tests/compat/test_errors.py
    upstream  no patch yet
    ends with a version whose errors have the shapes of their protocols
"""

import logging
import re
import traceback
from ast import literal_eval
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from http import HTTPStatus
from itertools import dropwhile
from typing import Any, NamedTuple

import orjson
from starlette.datastructures import Headers, MutableHeaders

from sgl_ext.compat import window
from sgl_ext.compat.window import CODE as TOO_LONG
from sgl_ext.compat.window import too_long
from sgl_ext.engine import sglang_api
from sgl_ext.engine.core.request_context import RequestContext, context_in, current
from sgl_ext.engine.core.request_names import request_id_of
from sgl_ext.protocols.anthropic import ANTHROPIC, status_of_type
from sgl_ext.protocols.chat import OLLAMA_CHAT
from sgl_ext.protocols.errors import OPENAI_ERRORS
from sgl_ext.protocols.models import ANTHROPIC_HEADER
from sgl_ext.protocols.models import PATH as MODELS
from sgl_ext.protocols.registry import GENERATE, OLLAMA_GENERATE, errors_of, path_meant
from sgl_ext.protocols.responses import RESPONSES
from sgl_ext.protocols.routes import (
    EMBEDDING,
    PARSING,
    SYSTEM_ONE,
    is_beside_responses,
    is_service_beside_responses,
    not_found,
)
from sgl_ext.reading.places import value_at
from sgl_ext.reading.protocol import ErrorShape, Protocol

_WORD = re.compile(r"[a-z_][a-z0-9_]*\Z")
_TYPES = frozenset({"body", "str", "list", "dict", "int", "float", "bool"})
_KINDS = ("role", "type")
_PYDANTIC = re.compile(r"\d+ validation errors? for [^\n]+\n")
_TAG = re.compile(
    r"(?:Unable to extract tag using discriminator|Input tag '.*' found using) '(?P<field>\w+)'"
    r"(?: does not match any of the expected tags: (?P<tags>.*))?",
    re.DOTALL,
)
_DEEPER = re.compile(r"(\w+(?:\.\w+)+) (must .*)", re.DOTALL)
_ONE = re.compile(r"'[^']*'|an? \w+")
_ALTERNATIVES = re.compile(rf"must be ((?:{_ONE.pattern})(?:(?:, | or )(?:{_ONE.pattern}))*)")
_SHORT = frozenset({"a string", "an integer"})  # ahead of a list of them
# The same as SGLang writes it on its own paths.
_LISTED = re.compile(r"'loc': (\([^()]*\)), 'msg': ('(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")")
_DETAILS = re.compile(r" \[type=\w+, input_value=.*\Z", re.DOTALL)
_OF_LIBRARY = re.compile(r"\s*For further information visit \S+")
_SCHEMA = re.compile(r"Tool (\d+) function has invalid 'parameters' schema: (.*)", re.DOTALL)
_JSONSCHEMA = "\n\nFailed validating "
_VALUE_ERROR = re.compile(r"^(Value error|Assertion failed), ")
# What pydantic says, and the words of our other errors for it.
_PLAIN_WORDS = tuple(
    (re.compile(said), words)
    for said, words in (
        (r"Input should be a valid (?:dictionary|mapping).*", "must be an object"),
        (r"Input should be a valid integer.*", "must be an integer"),
        (r"Input should be a valid ([^,]+).*", r"must be a \1"),
        (r"Input should be (.+)", r"must be \1"),
        (
            r"'role' must be (?:a string|one of .*)",
            "must be system, developer, user, assistant or tool",
        ),
        (r"Unable to parse input string as an integer.*", "must be a smaller integer"),
    )
)
# SGLang's own sentences that name no field, or that of a class of its own.
_SENTENCES = {
    "schema_ is required for json_schema response format request.": (
        "response_format.json_schema: Field required"
    ),
    "Messages cannot be empty.": "messages: must not be empty",
    "Prompt cannot be empty": "prompt: must not be empty",
}
_NO_CONVERSATION = re.compile(r"Cannot apply chat template to an empty conversation.*")
_NO_TOOL = re.compile(r"(?:Tool|tool_choice references tool) ('[^']*').* (?:in|the) .*tools list.*")
_NO_ITEM = re.compile(r"Unsupported Responses API input item type: (.*)", re.DOTALL)
_TEXT, _LIST = "must be a string", "must be a list"
_TEXT_OR_LIST = "must be a string or a list"
_FORM_TYPES: Mapping[str, Any] = {_TEXT: str, _LIST: list, _TEXT_OR_LIST: (str, list)}
_PARTS = {"content": _TEXT_OR_LIST, "output": _TEXT_OR_LIST, "summary": _LIST}
_ITEM = dict.fromkeys(("type", "role", "name", "arguments", "call_id"), _TEXT) | _PARTS
_PART = dict.fromkeys(("type", "text", "refusal"), _TEXT)


Steps = tuple[Any, ...]


class Wrong(NamedTuple):
    """One wrong field. path: "" for the whole body."""

    path: str
    what: str


def fields_of(errors: Sequence[Any], body: Any = None) -> list[Wrong]:
    """The wrong fields in pydantic's list of errors, each once. body: what it was made of."""
    located = [(tuple(error.get("loc", ())), error) for error in errors]
    found: dict[str, list[str]] = {}
    for location, error in _furthest(located):
        path = ".".join(map(str, _path(location, body)))
        what = _VALUE_ERROR.sub("", str(error.get("msg", "")).strip())
        if error.get("type") == "json_invalid":  # then the place is a byte of the body
            path, what = "", f"{what}: {error.get('ctx', {}).get('error', '')}"
        elif (tag := _TAG.fullmatch(what)) is not None:
            path, what = f"{path}.{tag['field']}", _of_tag(tag)
        elif (deeper := _DEEPER.fullmatch(what)) is not None and deeper[1].startswith(f"{path}."):
            path, what = deeper[1], deeper[2]
        found.setdefault(path, []).append(_in_plain_words(what, path))
    return [Wrong(path, _one_of(all)) for path, all in found.items()]


def _path(location: Steps, body: Any) -> Iterator[Any]:
    """The steps of pydantic's path to an error that are fields of the body. The others are types,
    also the `type` of an object: that of `{"type": "text", "text": 5}` is `text`, `text`."""
    steps = [*filter(_is_field, location)]
    here = body
    for at, step in enumerate(steps):
        after = steps[at + 1] if at + 1 < len(steps) else None
        if isinstance(here, dict):
            is_type = after is not None and (
                step not in here or (here.get("type") == step and after in here)
            )
        else:
            is_type = body is not None and isinstance(step, str)
        if not is_type:
            yield step
            here = value_at(here, (step,)) if here is not None else None


def _of_tag(tag: re.Match[str]) -> str:
    """What is wrong with the field that says which type an object has."""
    *others, last = (tag["tags"] or "").split(", ")
    return f"must be {', '.join(others)} or {last}" if others else "Field required"


def _one_of(whats: Sequence[str]) -> str:
    """What a field must be that may be one of several kinds, and is none of them."""
    found = [_ALTERNATIVES.fullmatch(what) for what in dict.fromkeys(whats)]
    if len(found) < 2 or None in found:
        return whats[0]
    each = dict.fromkeys(one for match in found if match for one in _ONE.findall(match[1]))
    *others, last = sorted(each, key=_SHORT.__contains__, reverse=True)
    return f"must be {', '.join(others)} or {last}"


def _in_plain_words(what: str, path: str) -> str:
    """What pydantic says of a field, as errors of the other fields say it."""
    field = path.rpartition(".")[2]
    what = re.sub(rf"^{re.escape(field)} must\b", "must", what) if field else what
    for pattern, words in _PLAIN_WORDS:
        if (found := pattern.fullmatch(what)) is not None:
            return found.expand(words)
    return what


def plain(message: str) -> str:
    """A message of SGLang's without what libraries say of themselves."""
    if (known := _SENTENCES.get(message)) is not None:
        return known
    if (tool := _NO_TOOL.fullmatch(message)) is not None:
        return f"tool_choice: {tool[1]} is not among the tools"
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
    """What is wrong with an item of /v1/responses, where SGLang's error names no field of the
    client's; None if the error says something else."""
    head, _, what = message.partition(": ")
    is_of_message = re.fullmatch(r"messages(\.\w+)*", head) is not None
    if _PATH.fullmatch(head) is not None and not is_of_message:
        return None
    listed = items if isinstance(items, list) else []
    for at, item in enumerate(listed):
        if (found := _of_forms(item, _ITEM, f"input[{at}]")) is not None:
            return found
        for name in _PARTS:
            parts = item.get(name)
            for k, part in enumerate(parts if isinstance(parts, list) else ()):
                if (found := _of_forms(part, _PART, f"input[{at}].{name}[{k}]")) is not None:
                    return found
    if (kind := _NO_ITEM.fullmatch(message)) is not None:
        at = next((at for at, item in enumerate(listed) if item.get("type") == kind[1]), 0)
        return Wrong(f"input[{at}].type", f"{kind[1]!r} is not supported")
    return Wrong("input", what) if is_of_message else None


def _of_forms(value: Any, forms: Mapping[str, str], path: str) -> Wrong | None:
    """The first field of an item, or of a part of one, that has another type than it may have."""
    if not isinstance(value, dict):
        return Wrong(path, "must be an object")
    for name, form in forms.items():
        if value.get(name) is not None and not isinstance(value[name], _FORM_TYPES[form]):
            return Wrong(f"{path}.{name}", form)
    return None


_MOST_SEARCHED = 1_000
_EXPECTED = re.compile(r"invalid (?:type|value): .*, expected (.*)", re.DOTALL)
_UNKNOWN = re.compile(r"unknown field `(.*?)`, expected .*", re.DOTALL)
_FORMS = (
    (re.compile("u64"), "an integer of at least 0"),
    (re.compile("i64"), "an integer"),
    (re.compile("f64"), "a number"),
    (re.compile("a boolean"), "true or false"),
    (re.compile("a string"), "a string"),
    (re.compile("a sequence"), "a list"),
    (re.compile("a map"), "an object"),
    (re.compile(".* for StringOrList"), "a string or a list of strings"),
    (re.compile(".* for (?:Optional)?Int64OrList"), "an integer or a list of integers"),
    # What SGLang's own validators raise that take a type for granted.
    (re.compile(".* object has no attribute '(?:get|items|pop)'"), "an object"),
    (re.compile(".* object has no attribute '(?:lower|split|startswith|strip)'"), "a string"),
)


def of_contract(value: Any, check: Callable[[Any], str | None], path: str = "") -> Wrong | None:
    """What is wrong with a body where SGLang names no field; None if nothing is.

    check: what SGLang says of a body that has this value, and nothing else, at this path.
    """
    said = check(value)
    if said is None:
        return None
    is_searched = isinstance(value, dict | list) and len(value) <= _MOST_SEARCHED
    is_searched = is_searched and not said.startswith(f"'{type(value).__name__}' object")
    if is_searched and check(type(value)()) is None:  # it may be one
        is_list = isinstance(value, list)
        for key, inner in enumerate(value) if is_list else value.items():
            inside = partial(_of_entry, check, None if is_list else key)
            found = of_contract(inner, inside, f"{path}.{key}" if path else str(key))
            if found is not None:
                return found
    if _UNKNOWN.fullmatch(said) is not None:
        return Wrong(path, "is no field")
    expected = _EXPECTED.fullmatch(said)
    form = said if expected is None else expected[1]
    known = next((words for pattern, words in _FORMS if pattern.fullmatch(form)), None)
    return Wrong(path, said if known is None else f"must be {known}")


def _of_entry(check: Callable[[Any], str | None], key: Any, value: Any) -> str | None:
    return check([value] if key is None else {key: value})


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


def _furthest(located: list[tuple[Steps, Any]]) -> list[tuple[Steps, Any]]:
    """Of each value that was tried as several types, the errors of those that come furthest."""
    left = located
    for at in range(1, max((len(location) for location, _ in located), default=0)):
        left = _furthest_at(left, at)
    return left


def _furthest_at(located: list[tuple[Steps, Any]], at: int) -> list[tuple[Steps, Any]]:
    """The same of values whose types are this step of the path to an error."""
    branches: dict[Steps, dict[Any, list[tuple[Steps, Any]]]] = {}
    for each in located:
        location = each[0]
        if at < len(location) and not _is_field(location[at]):
            branches.setdefault(location[:at], {}).setdefault(location[at], []).append(each)
    left = set[int]()
    for tried in branches.values():
        distances = {step: _distance([each[0] for each in of], at) for step, of in tried.items()}
        best = max(distances.values())
        kept = [step for step in tried if distances[step] == best]
        if len(tried) > 1 and all(_is_missing(error) for of in tried.values() for _, error in of):
            kept = [*tried][:1]  # nothing says which of them is meant
        for step, of in tried.items():
            # If no type takes the kind of a value, what else it misses as one of them says nothing.
            is_other = len(tried) > 1 and best.is_inside and not best.is_of_kind
            for each in of:
                if step not in kept or (is_other and each[0][-1] not in _KINDS):
                    left.add(id(each))
    return [each for each in located if id(each) not in left]


def _is_missing(error: Any) -> bool:
    return str(error.get("msg")) == "Field required"


class _Distance(NamedTuple):
    """How far a type came with a value: whether it found faults inside only, whether the value is
    of the kind that is meant, how many entries of a list it takes, and how deep its faults are."""

    is_inside: bool
    is_of_kind: bool = False
    entries: int = 0
    depth: int = 0


def _distance(locations: list[Steps], at: int) -> _Distance:
    """How far the type at this step came."""
    inside = [[*dropwhile(lambda step: not _is_field(step), each[at:])] for each in locations]
    if not all(inside):
        return _Distance(is_inside=False)
    if any(len(each) == 1 and each[0] in _KINDS for each in inside):
        return _Distance(is_inside=True)
    entries = [each[at + 1] if len(each) > at + 1 else -1 for each in locations]
    taken = min(entry if isinstance(entry, int) else 0 for entry in entries)
    return _Distance(True, True, taken, max(map(len, locations)))


def _is_field(step: Any) -> bool:
    """Whether a step of pydantic's path to an error names a field, and not one of its types."""
    return isinstance(step, int) or (bool(_WORD.match(str(step))) and step not in _TYPES)


_LIMIT_CHARS = 1000
_SHOWN = 3
_INTERNALS = re.compile(
    r'Traceback|File \\?"|(/[\w.+@-]+){2,}\.(py\b|(cc|cpp|cu|h):\d)|\d validation errors?'
)
_TRACE = re.compile(r'^(Traceback\b|\s+File "|\s+POST /)')
_PLACE = re.compile(r"(\[\d\d:\d\d:\d\d\] )?(/[\w.+@-]+)+\.\w+:\d+:?\s*")
_FILE = re.compile(
    r"(?<![\w/:])(/[\w.+@-]+){2,}\.(py|pyc|so|cc|cpp|cu|h|rs|json|jinja|safetensors)\b"
)
_NO_GRAMMAR = re.compile(r"^Failed to compile (\w+) grammar: ")
_PATH = re.compile(r"(messages|prompt|tools|tool_choice|response_format)(\.[a-z0-9_]+)*")
_NAME = re.compile(r"\w+")
_FIELDS_SAID = {
    "LoRA adapter": "lora_path",
    "request watermark": "watermark",
    "return hidden states": "return_hidden_states",
    "routed_dp_rank": "data_parallel_rank",
}
_OWN_FIELDS = ("regex", "ebnf")
INTERNAL = "Internal server error"


class EngineError(NamedTuple):
    """An error that the engine answers. The message exposes nothing of the server."""

    status: int
    message: str
    param: str | None = None

    @property
    def code(self) -> str | None:
        """OpenAI's name for it, if it has one."""
        if too_long(self.message) is not None:
            return window.CODE
        return "model_not_found" if self.status == 404 and self.param == "model" else None


def read_error(status: int, body: bytes) -> EngineError:
    """The error in a body that has one of SGLang's shapes."""
    try:
        document: Any = orjson.loads(body)
    except orjson.JSONDecodeError:
        document = body.decode("utf-8", "replace")
    if isinstance(document, dict):
        document = document.get("error", document.get("detail", document))
    param = document.get("param") if isinstance(document, dict) else None
    message = document.get("message") if isinstance(document, dict) else document
    text = message if isinstance(message, str) else ""
    return EngineError(status, scrubbed(status, text), param if isinstance(param, str) else None)


def scrubbed(status: int, message: str) -> str:
    """A message without traces and files of the server. For status 500 it is INTERNAL, except where
    it says that an answer was aborted."""
    if status == 500 and not message.startswith("The answer was"):
        return INTERNAL
    lines = [line for line in plain(message).splitlines() if not _TRACE.match(line)]
    text = _FILE.sub("a file of the server", _PLACE.sub("", "\n".join(lines))).strip()
    return text[:_LIMIT_CHARS] or "The request failed."


def native_body(error: EngineError) -> bytes:
    """The JSON body of an error on a native path."""
    return orjson.dumps({"error": {"message": error.message}})


def exposes_internals(body: bytes) -> bool:
    """Whether an error's body exposes the server's internals."""
    return _INTERNALS.search(body.decode("utf-8", "replace")) is not None


def shaped(shape: ErrorShape, error: EngineError, request_id: str) -> bytes:
    """The JSON body of an error in a protocol's shape."""
    message = error.message
    if (found := too_long(message)) is not None:
        message = found.anthropic if shape is ANTHROPIC.errors else found.openai
    return shape.body(error.status, message, request_id, error.code, error.param)


def error_of_validation(errors: Sequence[Any], body: Any = None) -> EngineError:
    """What pydantic found wrong with a body: the first fields, and what they should be."""
    found = fields_of(errors, body)
    shown = [f"{path or 'body'}: {what}" for path, what in found[:_SHOWN]]
    if len(found) > _SHOWN:
        shown.append(f"and {len(found) - _SHOWN} more")
    param = found[0].path if found else ""
    return EngineError(400, scrubbed(400, "; ".join(shown)), param or None)


def with_field(error: EngineError, protocol: Protocol, body: Any) -> EngineError:
    """An error that says which field no prompt or no grammar can be made of.

    A grammar with a structural tag is made of the tools, and of the answer's schema if there is
    one.
    """
    if _NO_CONVERSATION.match(error.message):
        field = protocol.turns_field or "body"
        return error._replace(message=f"{field}: must not be empty", param=field)
    found = _NO_GRAMMAR.match(error.message)
    if found is None or error.param is not None:
        return error
    own = "json_schema" if found[1] == "json" else found[1]
    formats = (*(() if own in _OWN_FIELDS else protocol.formats), own, f"sampling_params.{own}")
    fields = [path for path in formats if value_at(body, tuple(path.split(".")))]
    if found[1] == "structural_tag" and value_at(body, ("tools",)):
        fields.append("tools")
    if not fields:
        return error
    reason = error.message[found.end() :]
    message = f"{' or '.join(fields)}: no grammar can be made of it: {reason}"
    return error._replace(message=message, param=fields[0])


def with_item(error: EngineError, body: Any) -> EngineError:
    """An error of /v1/responses that names the client's item, and not the message that SGLang has
    made of it."""
    found = of_item(error.message, body.get("input") if isinstance(body, dict) else None)
    if found is None or error.param is not None:
        return error
    return error._replace(message=f"{found.path}: {found.what}", param=found.path)


def with_path(error: EngineError, body: Any = None) -> EngineError:
    """An error whose field is the one that its message begins with, if it begins with one, or the
    one of the body that it names."""
    if error.param is not None or error.status != HTTPStatus.BAD_REQUEST or error.code is not None:
        return error
    path = error.message.partition(": ")[0]
    if _PATH.fullmatch(path):
        return error._replace(param=path)
    first, *words = _NAME.findall(error.message) or [""]
    # Other words of a sentence may be names of fields by chance.
    names = [first, *(word for word in words if "_" in word), *_named_otherwise(error.message)]
    found = next((name for name in names if isinstance(body, dict) and name in body), None)
    return error if found is None else error._replace(param=found)


def _named_otherwise(message: str) -> Iterator[str]:
    return (field for said, field in _FIELDS_SAID.items() if said in message)


def read_failed_event(data: bytes) -> EngineError:
    """The error in the last event of a failed response on /v1/responses."""
    response = orjson.loads(data.partition(b"\ndata: ")[2])["response"]
    message = (response.get("error") or {}).get("message") or ""
    return EngineError(400, scrubbed(400, str(message)))


def failed_event(data: bytes) -> bytes:
    """The last event of a failed response on /v1/responses, with the most telling code."""
    head, _, text = data.partition(b"\ndata: ")
    document = orjson.loads(text)
    error = document["response"].get("error")
    if not isinstance(error, dict):
        return data
    found = EngineError(400, scrubbed(400, str(error.get("message") or "")))
    code = found.code or error.get("code") or "server_error"
    long = too_long(found.message)
    message = found.message if long is None else long.openai
    document["response"]["error"] = {"code": code, "message": message}
    return b"%b\ndata: %b\n\n" % (head, orjson.dumps(document))


_ENTRY = "sglang.srt.entrypoints"
# For each logger, how a record begins that says what was wrong with a body.
_RECORDS = {
    f"{_ENTRY}.openai.serving_responses": (
        "Error in preprocessing prompt inputs",
        "Error while streaming /v1/responses",
    ),
    f"{_ENTRY}.openai.serving_tokenize": ("Error during detokenization",),
    f"{_ENTRY}.anthropic.serving": (
        "Error converting Anthropic request",
        "Error converting count_tokens request",
    ),
}


async def note_abort(
    original: Callable[..., Awaitable[Any]], manager: Any, out: Any, *args: Any, **kw: Any
) -> Any:
    """Around `TokenizerManager._handle_abort_finish_reason`: notes the status of an abort.

    On /generate its text is a part of the answer, so it is worded here.
    """
    finish, context = out["meta_info"]["finish_reason"], current()
    if context is not None and finish.get("type") == "abort":
        context.failed_status = finish.get("status_code") or HTTPStatus.INTERNAL_SERVER_ERROR
        longer = too_long(str(finish.get("message")))
        if longer is not None and longer.most_tokens and context.path in GENERATE.paths:
            finish["message"] = longer.openai
    return await original(manager, out, *args, **kw)


async def note_failure(original: Callable[..., Awaitable[Any]], *args: Any, **kw: Any) -> Any:
    """Around `OpenAIServingResponses.responses_full_generator`: notes that SGLang's code failed."""
    try:
        return await original(*args, **kw)
    except Exception as error:
        _note(error)
        raise


class ClientFaults(logging.Filter):
    """Notes the errors of rejected bodies, and logs them without a traceback."""

    def __init__(self, beginnings: tuple[str, ...]) -> None:
        super().__init__()
        self._beginnings = beginnings

    def filter(self, record: logging.LogRecord) -> bool:
        """Passes every record."""
        error = record.exc_info[1] if record.exc_info else None
        if error is None or not str(record.msg).startswith(self._beginnings):
            return True
        _note(error)
        if is_clients(error):
            record.msg, record.args = f"{record.getMessage()}: {error!r}", ()
            record.exc_info = record.exc_text = None
            record.levelno, record.levelname = logging.WARNING, "WARNING"
        return True


def is_clients(error: BaseException) -> bool:
    """Whether an error, raised while a body was read, can be the fault of that body."""
    from jinja2 import TemplateError

    return isinstance(error, (ValueError, TypeError, LookupError, OverflowError, TemplateError))


def _note(error: BaseException) -> None:
    context = current()
    if context is None or context.failed_status is not None:
        return
    if not is_clients(error):
        context.failed_status = HTTPStatus.INTERNAL_SERVER_ERROR
    if error.__cause__ is None:
        context.fault = str(error)


def corrected(error: EngineError, context: RequestContext) -> EngineError:
    """An error of /v1/responses with the status and the text that were noted."""
    status = error.status
    if status == HTTPStatus.BAD_REQUEST and context.failed_status is not None:
        status = int(context.failed_status)
    message = context.fault or error.message.removeprefix(f"{status}: ")
    return EngineError(status, scrubbed(status, message), error.param)


def quiet_client_faults() -> None:
    """Puts the filters into SGLang's loggers."""
    for name, beginnings in _RECORDS.items():
        logging.getLogger(name).addFilter(ClientFaults(beginnings))


_WRONG_TYPE = "body: a field has a value of a type that it cannot have"
_WRONG_TYPE_OF_FIELD = "has a value of a type that it cannot have"
_WRONG_VALUE = "body: a field has a value that nothing can be made of"
_GENERATES = "This model generates text. It neither embeds nor classifies."
# Their answers depend on the body alone, so what raises an error is in the body.
_OF_BODY = frozenset((*PARSING, *GENERATE.paths, *OLLAMA_CHAT.paths, *OLLAMA_GENERATE.paths))
_FAILED = b"event: response.failed"
_ERROR_EVENTS = (b"event: error", b'data: {"error"', _FAILED)
# Events that say nothing of the answer.
_FIRST_EVENTS = (
    b"event: message_start",
    b"event: response.created",
    b"event: response.queued",
    b"event: response.in_progress",
)
# SGLang streams lines of JSON there, and ends a stream without one if it fails.
_LINES = frozenset((*OLLAMA_CHAT.paths, *OLLAMA_GENERATE.paths))
# What the framework says of a path or a method that it does not have.
_NO_PATH, _WRONG_METHOD = "Not Found", "Method Not Allowed"
_DETOKENIZE = "/detokenize"  # with any prefix; SGLang answers 500 for tokens that do not exist


def is_shaped(path: str) -> bool:
    """Whether errors on a path have the shape of a protocol; native ones keep SGLang's."""
    # SGLang documents a shape of its own for SYSTEM_ONE.
    return path_meant(path).startswith("/v1/") and not path.startswith(SYSTEM_ONE)


def shape_of(scope: Any) -> ErrorShape:
    """The shape of errors of an ASGI scope: its path's, or its client's where a path has two."""
    path = scope["path"]
    if path.startswith(MODELS) and ANTHROPIC_HEADER.encode() in dict(scope["headers"]):
        return ANTHROPIC.errors
    return errors_of(path)


class ErrorMiddleware:
    """An ASGI application around another."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path = scope["path"]
        answer = _Answer(scope, send)
        if path in EMBEDDING and _generates(scope["app"]):
            await answer.reject(EngineError(400, _GENERATES))
            return
        try:
            await self.app(scope, receive, answer.take)
        except Exception as error:
            found = None if answer.is_begun else _fault_of_body(scope, error)
            if found is None:
                raise
            await answer.reject(found)


class _Answer:
    """One answer on its way out."""

    def __init__(self, scope: Any, send: Any) -> None:
        self._scope = scope
        self._path = path = scope["path"]
        self._send = send
        self._shape = shape_of(scope) if is_shaped(path) else None
        self._start: Any = None  # the head of an error, or of a stream, that waits
        self._parts: list[bytes] = []
        self._is_stream = False
        self._is_over = False
        self.is_begun = False  # whether its head is sent

    async def take(self, message: Any) -> None:
        """Takes its next ASGI message."""
        if self._is_over:
            return
        if message["type"] == "http.response.start":
            kind = Headers(raw=message.get("headers", ())).get("content-type", "")
            self._is_stream = "event-stream" in kind
            waits = self._is_stream and (self._shape is not None or self._path in GENERATE.paths)
            if waits or message["status"] >= 400 or self._path in _LINES:
                self._start = message
                return
        elif message["type"] == "http.response.body":
            if self._start is not None:
                await self._take_waiting(message)
                return
            data = message.get("body", b"")
            if self._is_stream and data.startswith(_ERROR_EVENTS):
                message = {**message, "body": self._reshaped(data)}
        self.is_begun = True
        await self._send(message)

    async def reject(self, error: EngineError, start: Any = None) -> None:
        """Answers an error, in place of the answer with the head `start`."""
        self._is_over = self.is_begun = True
        start = start or {"type": "http.response.start"}
        headers = MutableHeaders(raw=list(start.get("headers", ())))
        if self._shape is None:
            body = native_body(error)
        else:
            name, value, body = _shaped_with_id(self._scope, error)
            headers.append(name, value)
        headers["content-type"] = "application/json"
        headers["content-length"] = str(len(body))
        del headers["transfer-encoding"]
        await self._send({**start, "status": error.status, "headers": headers.raw})
        await self._send({"type": "http.response.body", "body": body})

    async def _take_waiting(self, message: Any) -> None:
        """Takes a part of the body while the head waits."""
        start, data, more = self._start, message.get("body", b""), message.get("more_body", False)
        status = start["status"]
        if status < 400 and data.startswith(_ERROR_EVENTS) and self._is_answered():
            error = self._by_context(_error_in(data))
            # Codex compacts a conversation that is too long if an event says so, and on no status.
            if error.code != TOO_LONG or not data.startswith(_FAILED):
                await self.reject(error, start)
                return
            data = self._reshaped(data)
        self._parts.append(data)
        if more and (status >= 400 or self._says_nothing(data)):
            return
        self._start = None
        body = b"".join(self._parts)
        if status == 500 and self._path.endswith(_DETOKENIZE):
            await self.reject(EngineError(400, _WRONG_VALUE, "tokens"))
        elif status == 400 and self._path in GENERATE.paths and (wrong := self._unnamed(body)):
            field = wrong.path or "body"
            await self.reject(EngineError(400, f"{field}: {wrong.what}", field), start)
        elif status >= 400 and (self._shape is not None or exposes_internals(body)):
            error = self._of_path(read_error(status, body))
            await self.reject(self._by_context(error), {**start, "status": error.status})
        else:
            self.is_begun = True
            await self._send(start)
            await self._send({**message, "body": body})

    def _unnamed(self, body: bytes) -> Wrong | None:
        """What is wrong with the request of an error that names no field, which is a mere text."""
        context = context_in(self._scope)
        try:
            is_text = isinstance(orjson.loads(body).get("error"), str)
        except (orjson.JSONDecodeError, AttributeError):
            return None
        if not is_text or context is None:
            return None
        named = with_field(read_error(HTTPStatus.BAD_REQUEST, body), context.protocol, context.body)
        if named.param is not None:
            return Wrong(named.param, named.message.partition(": ")[2])
        return of_contract(context.body, sglang_api.generate_contract_error)

    def _of_path(self, error: EngineError) -> EngineError:
        """An error that names the path, if it is one of the path: the framework names none, and
        takes a service beside stored responses for the id of one."""
        phrase = error.message if error.param is None else ""
        is_beside = phrase == _WRONG_METHOD and is_beside_responses(self._path)
        is_id = error.param == "response_id" and is_service_beside_responses(self._path)
        if phrase == _NO_PATH or is_beside or is_id:
            return EngineError(404, not_found(self._scope["method"], self._path))
        if phrase == _WRONG_METHOD:
            return error._replace(message=f"{self._scope['method']} {self._path}: {phrase}")
        return error

    def _is_answered(self) -> bool:
        """Whether an error in a stream's first event is answered in place of the stream. SGLang's
        own streams keep their errors, but for a field that is out of its range."""
        context = context_in(self._scope)
        return self._shape is not None or (context is not None and bool(context.wrong_field))

    def _says_nothing(self, event: bytes) -> bool:
        """Whether a stream can still fail without content: this event has none, or it is what
        SGLang sends of a request that the scheduler has aborted."""
        context = context_in(self._scope)
        is_failed = context is not None and context.failed_status is not None
        return is_failed or not event or event.startswith(_FIRST_EVENTS)

    def _by_context(self, error: EngineError) -> EngineError:
        """An error with what is known of it beside its answer."""
        context = context_in(self._scope)
        if context is None:
            return error
        if context.path in RESPONSES.paths:
            error = with_item(corrected(error, context), context.body)
        if context.wrong_field is not None and error.param is None:
            error = error._replace(param=context.wrong_field)
        return with_path(with_field(error, context.protocol, context.body), context.body)

    def _reshaped(self, data: bytes) -> bytes:
        """An event that says that a stream failed, in the protocol's shape."""
        if self._shape is not None and data.startswith(_FAILED):
            return failed_event(data)
        if self._shape is ANTHROPIC.errors and data.startswith(b"event: error"):
            return b"event: error\ndata: %b\n\n" % shaped(self._shape, _error_in(data), "")
        if self._shape is OPENAI_ERRORS and data.startswith(b"data: "):
            return b"data: %b\n\n" % shaped(self._shape, _error_in(data), "")
        return data


async def send_error(
    scope: Any, error: EngineError, send: Any, *headers: tuple[bytes, bytes]
) -> None:
    """Answers an ASGI scope's request with an error in its protocol's shape, and these headers."""
    start = {"type": "http.response.start", "headers": headers}
    await _Answer(scope, send).reject(error, start)


def _shaped_with_id(scope: Any, error: EngineError) -> tuple[str, str, bytes]:
    """The name and value of the header with the request's id, and the error's body with it."""
    shape, request_id = shape_of(scope), request_id_of(scope)
    return shape.request_id_header, request_id, shaped(shape, error, request_id)


def _error_in(data: bytes) -> EngineError:
    """The error in an event that says that a stream failed."""
    if data.startswith(_FAILED):
        return read_failed_event(data)
    if data.startswith(b"data: "):
        text = data.removeprefix(b"data: ")
        code = orjson.loads(text)["error"].get("code")
        status = code if isinstance(code, int) and 400 <= code < 600 else 500
        return read_error(status, text)
    error = orjson.loads(data.partition(b"\ndata: ")[2])["error"]
    status = status_of_type(error["type"])
    return EngineError(status, scrubbed(status, error["message"]))


def _generates(app: Any) -> bool:
    chat = getattr(app.state, "openai_serving_chat", None)
    return chat is not None and bool(chat.tokenizer_manager.is_generation)


def _fault_of_body(scope: Any, error: Exception) -> EngineError | None:
    """What is wrong with a body for which SGLang raised this; None if the body may be right."""
    context = context_in(scope)
    if context is not None and context.wrong_field and isinstance(error, ValueError):
        return EngineError(400, str(error), context.wrong_field)
    message = _fault(scope["path"], error)
    if message == _WRONG_TYPE and context is not None:
        wrong = of_contract(context.body, _check_of(scope))
        if wrong is not None and wrong.path:
            what = wrong.what if wrong.what.startswith("must be ") else _WRONG_TYPE_OF_FIELD
            return EngineError(400, f"{wrong.path}: {what}", wrong.path)
    return EngineError(400, message) if message else None


def _check_of(scope: Any) -> Callable[[Any], str | None]:
    """What a route's model raises of a body in place of saying what is wrong; None if nothing."""
    from pydantic import TypeAdapter, ValidationError

    model = scope["route"].body_field.field_info.annotation

    def check(body: Any) -> str | None:
        try:
            TypeAdapter(model).validate_python(body)
        except ValidationError:
            return None
        except Exception as error:
            return str(error)
        return None

    return check


def _fault(path: str, error: Exception) -> str:
    from jinja2 import TemplateError

    if is_shaped(path):
        # Some of SGLang's validators take a field's type for granted.
        steps = traceback.walk_tb(error.__traceback__)
        is_validation = any(f.f_code.co_name == "solve_dependencies" for f, _ in steps)
        return _WRONG_TYPE if is_validation else ""
    if isinstance(error, ValueError) and (long := too_long(str(error))) is not None:
        return long.openai
    of_values = (ValueError, TypeError, LookupError, OverflowError, TemplateError)
    return _WRONG_VALUE if path in _OF_BODY and isinstance(error, of_values) else ""


def install(app: Any) -> None:
    """Puts all errors of SGLang's application into shape. Call it before the application serves."""
    from fastapi import HTTPException
    from fastapi.exceptions import RequestValidationError
    from starlette.responses import JSONResponse, Response

    quiet_client_faults()
    app.add_middleware(ErrorMiddleware)
    sglangs_handler = app.exception_handlers[RequestValidationError]
    sglangs_other_handler = app.exception_handlers[HTTPException]

    async def reject(request: Any, error: Any) -> Any:
        """Answers what is wrong with a body, which the middleware then shapes."""
        if not is_shaped(request.url.path):
            return await sglangs_handler(request, error)
        found = error_of_validation(error.errors(), error.body)
        document = {"error": {"message": found.message, "param": found.param}}
        return JSONResponse(document, found.status)

    async def reject_field(request: Any, error: Any) -> Any:
        """Answers an error of ours that names its field, which the middleware then shapes."""
        if isinstance(error.detail, dict):
            return JSONResponse({"error": error.detail}, error.status_code)
        return await sglangs_other_handler(request, error)

    async def fail(request: Any, error: Exception) -> Any:
        """Answers errors that the application did not catch. Starlette calls it outside of the
        middleware."""
        name, value, body = _shaped_with_id(request.scope, EngineError(500, INTERNAL))
        return Response(body, 500, headers={name: value}, media_type="application/json")

    app.add_exception_handler(RequestValidationError, reject)
    app.add_exception_handler(HTTPException, reject_field)
    app.add_exception_handler(Exception, fail)
