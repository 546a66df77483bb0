"""Tells in a stream that a call is complete as soon as it is, before the next token.

    chunk       "arguments": {"path": "a"}}     </tool_call>   <tool_call> ...
    client      delta, and: complete            -              next call

SGLang tells it when something else begins: the next call, a text, or the end of the answer. Then a
client that runs tools at once waits for words that no longer matter. A call is complete when the
JSON object of its arguments is, in every format.

    /v1/messages            `content_block_stop` (anthropic.py)
    /v1/responses           the `.done` events, by SGLang's own function
    /v1/chat/completions    `complete: true` in the call's last delta, for clients that ask for it
                            in `nvext.agent_hints.mark_complete_calls`: the protocol has no event
"""

from collections.abc import AsyncIterator
from typing import Any

import orjson

from sgl_ext.compat import response_pieces
from sgl_ext.engine.sglang_http_types import ServingResponses
from sgl_ext.engine.sglang_types import Original
from sgl_ext.reading.places import value_at

_ITEM = "event: response.output_item."
_DELTAS = (
    "event: response.function_call_arguments.delta\n",
    "event: response.custom_tool_call_input.delta\n",
)
_PHASE, _NO_PHASE = '"phase":"final_answer"', '"phase":null'
_CALLS = '"tool_calls":[{'


# The generator's state of its calls, and its function that ends one.
_CALL_STATES, _END_CALL = "tool_call_states", "_close_tool_call_state"
_GENERATOR = (
    "sglang.srt.entrypoints.openai.serving_responses:OpenAIServingResponses"
    "._responses_stream_generator_non_harmony"
)
VARIABLES = ((_GENERATOR, _CALL_STATES), (_GENERATOR, _END_CALL))
"""Local variables of SGLang's that are read here, each with the path of its function."""


class ObjectEnd:
    """Finds the end of a JSON object that arrives in pieces. read: its characters so far."""

    def __init__(self) -> None:
        self.is_complete = False
        self.read = 0
        self._depth = 0
        self._in_text = self._is_escaped = False

    def completed_by(self, piece: str) -> bool:
        """Whether the object is complete with this piece, and was not before."""
        if self.is_complete:
            return False
        self.read += len(piece)
        for char in piece:
            if self._in_text:
                if self._is_escaped:
                    self._is_escaped = False
                elif char == "\\":
                    self._is_escaped = True
                elif char == '"':
                    self._in_text = False
            elif char == '"':
                self._in_text = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                self.is_complete |= self._depth == 0
        return self.is_complete


def stream_response(original: Original, serving: ServingResponses, *args: Any, **kw: Any) -> Any:
    """Around `OpenAIServingResponses.responses_stream_generator_non_harmony`.

    SGLang holds a text back until it knows whether a call follows, and the text is commentary. For
    a model without phases each event is sent at once, and the last one has the phases.
    """
    if serving.tool_call_parser == "muse":
        return original(serving, *args, **kw)
    return _with_ends(serving, *args, **kw)


async def _with_ends(
    serving: ServingResponses, request: Any, params: Any, results: Any, *args: Any, **kw: Any
) -> AsyncIterator[str]:
    results = response_pieces.in_order(results, serving.tool_call_parser)
    stream = serving._responses_stream_generator_non_harmony(request, params, results, *args, **kw)
    ends: dict[str, ObjectEnd] = {}
    async for event in response_pieces.with_open_end(stream):
        if event.startswith(_ITEM):
            yield event.replace(_PHASE, _NO_PHASE)
        elif event:
            yield event
        if event.startswith(_DELTAS):
            item = orjson.loads(event.partition("data: ")[2])["item_id"]
            for end in _ends_of(stream, item, ends.setdefault(item, ObjectEnd())):
                yield end


def _ends_of(stream: Any, item: str, end: ObjectEnd) -> list[str]:
    """The events that end an item if it is complete, from the generator that would send them later.

    That one then knows that they are sent.
    """
    variables = stream.ag_frame.f_locals
    for number, state in variables[_CALL_STATES].items():
        if state["item_id"] == item and end.completed_by(state["arguments"][end.read :]):
            return list(variables[_END_CALL](number))
    return []


def marks_ends(body: Any) -> bool:
    """Whether the client of a chat completion asks for a mark at the end of each call."""
    return value_at(body, ("nvext", "agent_hints", "mark_complete_calls")) is True


async def with_marks(stream: AsyncIterator[str]) -> AsyncIterator[str]:
    """A stream of chat completions in which the last delta of each call says so."""
    ends: dict[tuple[int, int], ObjectEnd] = {}
    async for line in stream:
        if _CALLS in line:
            chunk = orjson.loads(line[6:])
            for choice in chunk["choices"]:
                for call in choice["delta"].get("tool_calls") or ():
                    end = ends.setdefault((choice["index"], call["index"]), ObjectEnd())
                    if end.completed_by(call["function"].get("arguments") or ""):
                        call["complete"] = True
            line = f"data: {orjson.dumps(chunk).decode()}\n\n"
        yield line


def without_tails(parser: Any, calls: list[Any]) -> list[Any]:
    """Parts of calls without white space after the end of their arguments.

    SGLang would begin a call for it, because the call that it belongs to is closed.
    """
    ends = vars(parser).setdefault("sgl_ext_ends", {})
    return [call for call in calls if not _is_tail(ends, call)]


def _is_tail(ends: dict[int, ObjectEnd], call: Any) -> bool:
    if call.name:
        ends[call.tool_index] = ObjectEnd()
    end, part = ends.setdefault(call.tool_index, ObjectEnd()), call.parameters or ""
    was_complete = end.is_complete
    end.completed_by(part)
    return was_complete and not part.strip()
