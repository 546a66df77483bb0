"""The description of a wire protocol: everything that the rest of the code needs to know of it.

Readers in this package take a `Protocol` and a parsed body. The instances are in
`sgl_ext/protocols/`, a file for each protocol, and `sgl_ext/protocols/registry.py` finds the
instance for a URL path. docs/how/architecture.md shows how to add one.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

Json = dict[str, Any]
Place = tuple[str | int, ...]
"""Where a block is in a body: ("tools", 2), ("system", 0), ("messages", 3, 1) with the index of
the message and of the block in it, or, without blocks, ("messages", 3) or ("system",). In the items
of a response it is a path: ("input", 3, "content", 1)."""

INSTRUCTION_ROLES = ("system", "developer")


class Part(Enum):
    """The kinds of body fields that reach the prompt."""

    TOOLS = "a list of tools"
    INSTRUCTIONS = "a system prompt: a text, or a list of blocks"
    MESSAGES = "a list of messages"
    ITEMS = "a list of messages and other items, or one user's text"
    TEXT = "a raw prompt: a text, token ids, or a batch of either"
    INSTANCES = "a batch of objects, each with a `text`"


class FoundMark(NamedTuple):
    """A cache mark as it stands in a body.

    field: the block that has it, for error messages; "" is the body itself.
    block: the marked block, whose type restricts marks; None if any mark is valid there.
    control: the value of its `cache_control`.
    """

    place: Place
    field: str
    block: Any
    control: Any


class MalformedMark(ValueError):
    """A mark that makes its request invalid; the text is for the client."""


class CacheFields(NamedTuple):
    """What a vendor's own fields about the prompt cache say.

    blocks: the places of the blocks at whose ends the prompt's prefixes are to be kept, in prompt
        order, and for how many seconds.
    whole_s: for how many seconds to keep the whole prompt; None for the server's default, 0 for
        not at all.
    is_least: the seconds of `whole_s` are the least that the client wants, and not the most.
    keep: False if the client asks to keep nothing.
    ignored: marks that cannot be used, and do not make the request invalid.
    """

    blocks: tuple[tuple[Place, float], ...] = ()
    whole_s: float | None = 0.0
    is_least: bool = True
    keep: bool = True
    ignored: int = 0


@dataclass(frozen=True, slots=True)
class MarkRules:
    """Which cache marks a protocol has.

    find: the marks on parts of a body, in prompt order; None if only whole prompts are marked.
    is_strict: marks are part of the protocol: a malformed one makes the request invalid. In other
        protocols a mark is a hint, and a malformed one is ignored and counted.
    root_is_whole: `cache_control` at the root marks the whole prompt.
    read_fields: what other fields of the protocol's vendor say. Raises MalformedMark.
    """

    find: Callable[[Json], Iterator[FoundMark]] | None = None
    is_strict: bool = False
    root_is_whole: bool = False
    read_fields: Callable[[Json], CacheFields] = lambda body: CacheFields()


class Result(NamedTuple):
    """A made-up result of a tool call; `kind` is the type of the call's item, or ""."""

    call_id: str
    kind: str
    text: str


COMMENT = b": waiting\n\n"
"""A comment in a stream of events, which clients ignore."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """How an answer becomes part of the next request.

    join: makes a whole answer of a stream's events; raises an error if the stream was cut.
    read: what the client of a whole answer appends to the conversation: one message, or the items
        of a response. Raises ValueError or LookupError if it is not certain that it continues.
    add_results: a conversation's items with results of tool calls added.
    required: fields that a request must have, with a value for a request without them.
    overrides: fields of a request that is converted but not answered.
    stored: fields that refer to earlier turns which are not in the request.
    """

    join: Callable[[Iterable[bytes]], Json]
    read: Callable[[Json], list[Json]]
    add_results: Callable[[list[Json], list[Result]], list[Json]]
    required: Mapping[str, Any] = field(default_factory=dict)
    overrides: Mapping[str, Any] = field(default_factory=dict)
    stored: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolForm:
    """How a protocol writes a function that the model may call.

    matches: whether a tool has this form.
    write: a tool, from a function's name, description and strictness, and the JSON schema of its
        input (None if there is none).
    """

    matches: Callable[[Json], bool]
    write: Callable[[Json, Any], Json]


@dataclass(frozen=True, slots=True)
class ErrorShape:
    """How a protocol words errors.

    body: the JSON body for a status, message, request id, code and field name.
    event: the event that ends a stream which cannot continue, from a message, the number of
        events sent so far, and the request id.
    late: the same, from the parsed body of an error, and the number of events sent so far.
    request_id_header: the header in which clients look for the request's id.
    overloaded: the status and reason phrase of an overload. no_budget: those of a budget that is
        used up.
    """

    body: Callable[[int, str, str, str | None, str | None], bytes]
    event: Callable[[str, int, str], bytes]
    late: Callable[[Json, int], bytes]
    request_id_header: str = "x-request-id"
    overloaded: tuple[int, bytes] = (503, b"Service Unavailable")
    no_budget: tuple[int, bytes] = (429, b"Too Many Requests")


@dataclass(frozen=True, slots=True)
class Model:
    """What the model that an engine serves can take.

    thinks: it can think before it answers: the engine has a reasoning parser.
    sees: it takes images, or other media.
    takes_namespaces: the engine renders tools that are grouped in a namespace.
    runs_tools: the engine has a server for OpenAI's built-in tools.
    keeps_tools: its prompts have tools that a request does not allow, too; a grammar excludes them.
    has_phases: it distinguishes commentary from a final answer.
    defers_tools: its template leaves deferred tools out, and shows those that a result refers to.
    """

    thinks: bool = True
    sees: bool = True
    takes_namespaces: bool = False
    runs_tools: bool = False
    keeps_tools: bool = True
    has_phases: bool = False
    defers_tools: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Protocol:
    """One protocol.

    name: its name in `nvext.protocol` and ?protocol=; "" if clients cannot name it.
    paths: the URL paths that speak it; the first is the path of its conversations.
    errors: how it words errors.
    beat: what a stream of events says while its answer is awaited; b"" if it streams otherwise.
    prompt: the body fields that reach the prompt, in the order in which templates render them.
    generates: False if its paths only count or check a prompt.
    marks: its cache marks; None if it has none.
    conversation: how an answer becomes part of the next request; None if it has no turns.
    tool_form: how it writes a tool.
    add_texts: puts text blocks ahead of a body's own instructions, in place; None if a request
        cannot name a stored context.
    translate: rewrites a body that harnesses send into one that SGLang accepts, and counts what
        it changed; None if nothing needs it.
    refused: fields that no engine acts on and that change what an answer means, each with what to
        use in its place.
    formats: fields, as dotted paths, that can hold a schema for the whole answer.
    recognizes: whether a body, with its request's headers, speaks this protocol.
    """

    name: str = ""
    paths: tuple[str, ...]
    errors: ErrorShape
    beat: bytes = b""
    prompt: tuple[tuple[Part, str], ...] = ()
    generates: bool = True
    marks: MarkRules | None = None
    conversation: Conversation | None = None
    tool_form: ToolForm | None = None
    add_texts: Callable[[Json, list[Json]], None] | None = None
    translate: Callable[[Json, Model, Counter[str]], Json] | None = None
    refused: Mapping[str, str] = field(default_factory=dict)
    formats: tuple[str, ...] = ()
    recognizes: Callable[[Mapping[str, str], Json], bool] = lambda headers, body: False

    @property
    def turns_field(self) -> str | None:
        """The field that holds the conversation's messages or items; None if there is none."""
        kinds = (Part.MESSAGES, Part.ITEMS)
        return next((name for part, name in self.prompt if part in kinds), None)

    @property
    def instruction_fields(self) -> tuple[str, ...]:
        """The fields with a system prompt."""
        return tuple(name for part, name in self.prompt if part is Part.INSTRUCTIONS)


def objects(value: Any) -> list[Json]:
    """The objects in a list; none if it is no list."""
    return [each for each in listed(value) if isinstance(each, dict)]


def listed(value: Any) -> list[Any]:
    """A list as it is; an empty one for anything else."""
    return value if isinstance(value, list) else []
