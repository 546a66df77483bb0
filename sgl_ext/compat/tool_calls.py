"""Tool calls: no words of the model are lost, wherever a stream is cut into chunks; a call that was
cut off stays open; and a complete one is reported at once.

An answer is read by `call_blocks`, whole and streamed alike, if the blocks of its format have an
end. For the other formats, SGLang's parser runs: it drops text that comes in one chunk with the
call after it, and returns only the first of two calls in a chunk. So a chunk is split before its
first call, and the parser runs again as long as it finds calls.

    parse_stream_chunk, parse_stream_end, parse_non_stream    the reading
    _process_tool_call_stream                                 words and calls of a chunk, in order
    _process_tool_calls, _make_response_output_items          whole answers: what was cut, in order

A call of an undeclared tool is forwarded, in a stream as in a whole answer: the client can answer
that there is no such tool. SGLang drops the call, and in a stream makes text of its second half.

White space right before a call belongs to the format and not to the model's words; SGLang's whole
answers leave it out. In a stream it is held back until the next chunk shows what follows.

SGLang holds back the beginning of a marker until the next chunk, too. Without a next chunk it is
text; between two calls it belongs to the format.

What a client allows holds for every format: one call only, where most formats have no grammar for
it, and only tools of its list, where no grammar holds the model to them (`tool_choice`). Other
calls are left out of the answer.

A call that is open where an answer was cut, by its limit of tokens, a stop sequence or an error,
stays open. SGLang closes its arguments into valid JSON, and a client then takes half a file for a
whole one. It also calls the last item of each answer completed; after `length` it is incomplete.

A call is complete when the JSON object of its arguments is, in every format. Clients hear of it
before the next token. SGLang reports it when something else begins: the next call, a text, or the
end of the answer, so that a client that runs tools at once waits for words that no longer matter.

    chunk       "arguments": {"path": "a"}}     </tool_call>   <tool_call> ...
    client      delta, and: complete            -              next call

    /v1/messages            `content_block_stop` (anthropic_answers.py)
    /v1/responses           the `.done` events, by SGLang's own function
    /v1/chat/completions    `complete: true` in the call's last delta, for clients that ask for it
                            in `nvext.agent_hints.mark_complete_calls`: the protocol has no event

    fault     words beside calls are lost, calls that were cut off get an end, and the end of a
              call comes late
    hooks     group "tool calls"
    test      tests/compat/test_tool_calls.py, test_early_calls.py, test_response_pieces.py
    upstream  docs/upstream/leave-cut-calls-open.patch, for cut calls; none for the rest
    ends with a version that streams words and calls as the model wrote them
"""

import os
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

import orjson

from sgl_ext.compat.call_blocks import BLOCKS, Block, Cutter, Foreign, Reader, Said, Value
from sgl_ext.engine import sglang_api
from sgl_ext.engine.arguments import in_effect
from sgl_ext.engine.core.counters import counter
from sgl_ext.engine.core.request_context import current
from sgl_ext.engine.sglang_http_types import FormatDetector, ServingResponses
from sgl_ext.engine.sglang_types import Original
from sgl_ext.reading.places import value_at


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


_DONE = "event: response.output_item.done\n"
_INCOMPLETE = "event: response.incomplete\n"
_OPEN = ("reasoning", "message")


async def in_order(results: AsyncIterator[Any], parser: str | None) -> AsyncIterator[Any]:
    """The results of a generation, each with words or a part of a call. Notes why it ends."""
    cutter = Cutter(BLOCKS.get(parser or "", ()))
    is_whole, known = not in_effect().incremental_streaming_output, 0
    async for result in results:
        chunk = result if isinstance(result, dict) else getattr(result, "last_output", None)
        if not isinstance(chunk, dict) or not isinstance(chunk.get("text"), str):
            yield result
            continue
        text, meta = chunk["text"], chunk.get("meta_info") or {}
        *before, last = cutter.pieces(text[known:])
        going_on = {**chunk, "meta_info": {**meta, "finish_reason": None}}
        for piece in before:
            known += len(piece)
            yield {**going_on, "text": text[:known] if is_whole else piece}
        known = len(text) if is_whole else 0
        note_end(meta.get("finish_reason"))
        yield {**chunk, "text": last} if before and not is_whole else result


async def with_open_end(events: AsyncIterator[str]) -> AsyncIterator[str]:
    """The events of a stream, whose last item is incomplete if the response is."""
    held = ""
    async for event in events:
        if held:
            if event.startswith(_INCOMPLETE):
                held = _changed(held, lambda document: [document["item"]])
            yield held
            held = ""
        if event.startswith(_DONE):
            held = event
            continue
        if event.startswith(_INCOMPLETE):
            event = _changed(event, lambda document: document["response"]["output"][-1:])
        yield event
    if held:
        yield held


def _changed(event: str, items: Callable[[Any], list[Any]]) -> str:
    """An event whose items, if they are words, are incomplete."""
    head, _, data = event.partition("data: ")
    document = orjson.loads(data)
    for item in items(document):
        if item["type"] in _OPEN:
            item["status"] = "incomplete"
    return f"{head}data: {orjson.dumps(document).decode()}\n\n"


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
        self._value = Value("")
        self._opening = ""

    def completed_by(self, piece: str) -> bool:
        """Whether the object is complete with this piece, and was not before."""
        if self.is_complete:
            return False
        self.read += len(piece)
        self._opening = self._opening or piece.lstrip()[:1]
        if self._opening in ("{", "["):
            _, self.is_complete = self._value.read(piece)
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
    results = in_order(results, serving.tool_call_parser)
    stream = serving._responses_stream_generator_non_harmony(request, params, results, *args, **kw)
    ends: dict[str, ObjectEnd] = {}
    async for event in with_open_end(stream):
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


_UNKNOWN_TOOLS = "SGLANG_FORWARD_UNKNOWN_TOOLS"
_END_BUFFER = "_normal_text_buffer"  # where some parsers hold the beginning of an end marker


class _AnyTool(dict[str, int]):
    """Tools by name. A parser looks up in it whether a tool was declared."""

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str)


def forward_unknown_tools() -> None:
    """Makes SGLang forward calls of undeclared tools, unless the operator set its variable."""
    os.environ.setdefault(_UNKNOWN_TOOLS, "1")


def parse_chunk(original: Original, detector: FormatDetector, new_text: str, tools: Any) -> Any:
    """Around `BaseFormatDetector.parse_streaming_increment`, which its subclasses call."""
    text = new_text  # SGLang's parsers name it
    forwards = sglang_api.envs.SGLANG_FORWARD_UNKNOWN_TOOLS.get
    if not hasattr(detector, "_tool_indices") and forwards():
        detector._tool_indices = _AnyTool(detector._get_tool_indices(tools))
    words = ""
    begin, buffer = detector.bot_token, detector._buffer
    parser: Any = detector
    parser.sgl_ext_uses_base = True
    is_in_call = bool(detector.current_tool_name_sent or detector.current_tool_id > 0)
    # Arguments may contain what begins a call: in a call, and in a format without an opening token.
    splits = len(begin) > 1 and not is_in_call
    at = (buffer + text).find(begin) if splits else -1
    if at > 0:
        words = (buffer + text)[:at]
        if detector.eot_token:
            words = words.replace(detector.eot_token, "")
        detector._buffer, text = "", (buffer + text)[at:]
    found = original(detector, text, tools)
    more = found
    while detector._buffer and any(call.name or call.parameters for call in more.calls):
        more = original(detector, "", tools)
        found.calls = [*found.calls, *more.calls]
        found.normal_text += more.normal_text
    if found.calls and is_in_call and hasattr(detector, _END_BUFFER):
        setattr(detector, _END_BUFFER, "")
    found.normal_text = words + (found.normal_text or "")
    return found


def hold_space(original: Original, parser: Any, chunk: str) -> Any:
    """Around `FunctionCallParser.parse_stream_chunk`."""
    if (reader := _reader_of(parser)) is not None:
        return _told(parser, reader.feed(chunk))
    text, calls = _parsed(original, parser, chunk)
    calls = _allowed_parts(parser, without_tails(parser, calls))
    begins = any(call.name for call in calls)
    text = getattr(parser, "sgl_ext_space", "") + text
    words = text.rstrip()
    parser.sgl_ext_space = "" if begins else text[len(words) :]
    parser.sgl_ext_called = begins or getattr(parser, "sgl_ext_called", False)
    return words, calls


def _reader_of(parser: Any) -> Reader | None:
    """What reads the answer of a parser; None if SGLang's parser does."""
    if not hasattr(parser, "sgl_ext_reader"):
        blocks = _blocks_of(parser) if parser.tools else ()
        detector, tools = parser.detector, parser.tools

        def foreign(block: Block) -> Foreign:
            return Foreign(block, detector, tools)

        parser.sgl_ext_reader = Reader(blocks, foreign) if blocks else None
    found: Reader | None = parser.sgl_ext_reader
    return found


def _blocks_of(parser: Any) -> tuple[Block, ...]:
    kind = type(parser.detector)
    names = [name for name, each in parser.ToolCallParserEnum.items() if each is kind]
    blocks = next((BLOCKS[name] for name in names if name in BLOCKS), ())
    if "hunyuan" in names:  # the tokenizer names its markers
        own = {"start": parser.detector.bot_token, "end": parser.detector.eot_token}
        return (blocks[0]._replace(**own),)
    return blocks


def _told(parser: Any, said: list[Said]) -> tuple[str, list[Any]]:
    """The words and the parts of calls that the client takes."""
    words = "".join(each for each in said if isinstance(each, str))
    calls = [
        sglang_api.ToolCallItem(tool_index=each.number, name=each.name, parameters=each.arguments)
        for each in said
        if not isinstance(each, str)
    ]
    return words, _allowed_parts(parser, calls) if calls else calls


def _note_cut(parser: Any, reader: Reader, context: Any) -> None:
    """Says of a call without an end that it has none, if the model did not end the answer."""
    if reader.is_cut and context is not None and context.is_cut:
        parser.detector.incomplete_tool_call_indices = {reader.calls - 1}


async def stream_in_order(
    original: Original,
    serving: Any,
    index: int,
    delta: str,
    parsers: Any,
    content: Any,
    *args: Any,
    flush: bool = False,
    **kw: Any,
) -> AsyncIterator[Any]:
    """Around `OpenAIServingChat._process_tool_call_stream`, which sends the words of a chunk before
    its calls: gives it words and calls apart."""
    note_end(content["meta_info"].get("finish_reason"))
    cutter = getattr(parsers.get(index), "sgl_ext_cutter", None)
    cutter = cutter or Cutter(BLOCKS.get(serving.tool_call_parser, ()))
    pieces = cutter.pieces(delta)
    for number, piece in enumerate(pieces, start=1):
        ends = flush and number == len(pieces)
        async for chunk in original(
            serving, index, piece, parsers, content, *args, flush=ends, **kw
        ):
            yield chunk
    parsers[index].sgl_ext_cutter = cutter


def add_no_end(
    original: Original, serving: Any, parser: Any, content: Any, *args: Any, **kw: Any
) -> Any:
    """Around `OpenAIServingChat._check_for_unstreamed_tool_args`, which closes the arguments of the
    last call: those of an answer that was cut stay open."""
    if was_cut(content["meta_info"].get("finish_reason")):
        return None
    return original(serving, parser, content, *args, **kw)


def process_whole(
    original: Original, serving: Any, text: str, tools: Any, reason: Any, *args: Any, **kw: Any
) -> Any:
    """Around `OpenAIServingChat._process_tool_calls`: a stop sequence inside of a call is no end of
    the call."""
    note_end(reason)
    context, given = current(), dict(reason)
    made = original(serving, text, tools, reason, *args, **kw)
    if context is not None and context.is_cut and context.has_open_call:
        reason.update(given)
    return made


def order_items(
    original: Original, serving: Any, *args: Any, finish_reason: Any = None, **kw: Any
) -> Any:
    """Around `OpenAIServingResponses._make_response_output_items`: words stand between the calls
    where the model wrote them, and the last item of an answer that was cut is incomplete."""
    note_end(finish_reason)
    context = current()
    if context is not None:
        context.parts, context.has_open_call = (), False
    items = original(serving, *args, finish_reason=finish_reason, **kw)
    if context is None:
        return items
    calls = [item for item in items if item.type not in ("reasoning", "message")]
    message = next((item for item in items if item.type == "message"), None)
    if message is not None and len(calls) and len(context.parts) > 1:
        before = [item for item in items if item.type == "reasoning"]
        items = [*before, *(_item(part, message, calls) for part in context.parts)]
    if calls and context.has_open_call and calls[-1].type == "custom_tool_call":
        begun = sglang_api.decode_custom_tool_input_prefix(calls[-1].input)
        calls[-1].input = begun or calls[-1].input
    is_open = bool(items) and items[-1].type in ("reasoning", "message")
    if is_open and finish_reason and finish_reason["type"] == "length":
        items[-1].status = "incomplete"
    return items


def _item(part: str | int, message: Any, calls: list[Any]) -> Any:
    if isinstance(part, int):
        return calls[part]
    content = message.content[0].model_copy(update={"text": part})
    name = f"msg_{uuid.uuid4().hex}"
    return message.model_copy(update={"id": name, "content": [content]})


def _parsed(original: Original, parser: Any, chunk: str) -> tuple[str, list[Any]]:
    """A chunk's text and calls. Formats with a parser of their own, too, get the words before the
    first call apart from it."""
    begin = getattr(parser.detector, "bot_token", None) or ""
    splits = len(begin) > 1 and not getattr(parser, "sgl_ext_called", False)
    at = chunk.find(begin) if splits else -1
    if at <= 0:
        text, calls = original(parser, chunk)
        if text == chunk and hasattr(parser.detector, "harmony_parser"):
            # It has not noticed that the text is passed on, and would return it with the call.
            parser.detector.harmony_parser = type(parser.detector.harmony_parser)()
        return text, calls
    words, before = original(parser, chunk[:at])
    text, calls = original(parser, chunk[at:])
    return words + text, [*before, *calls]


def release_space(original: Original, parser: Any) -> Any:
    """Around `FunctionCallParser.parse_stream_end`: no call follows any more."""
    context = current()
    if (reader := _reader_of(parser)) is not None:
        found = _told(parser, reader.end(is_cut=context is not None and context.is_cut))
        _note_cut(parser, reader, context)
        return found
    text, calls = original(parser)
    calls = _allowed_parts(parser, without_tails(parser, calls))
    if calls or getattr(parser, "sgl_ext_called", False):
        return text, calls
    detector = parser.detector
    if not text and hasattr(detector, "sgl_ext_uses_base"):  # what it holds back is no marker
        is_marker = detector._ends_with_partial_token(detector._buffer, detector.bot_token)
        text = getattr(detector, _END_BUFFER, "") + (detector._buffer if is_marker else "")
    return getattr(parser, "sgl_ext_space", "") + text, calls


def has_call(original: Original, parser: Any, text: str) -> bool:
    """Around `FunctionCallParser.has_tool_call`: whether the answer has what begins a call in a
    stream."""
    blocks = _blocks_of(parser) if parser.tools else ()
    return bool(original(parser, text)) or any(block.start in text for block in blocks)


def parse_whole(original: Original, parser: Any, text: str, **kw: Any) -> Any:
    """Around `FunctionCallParser.parse_non_stream`."""
    context = current()
    if (reader := _reader_of(parser)) is not None:
        is_cut = context is not None and context.is_cut
        return _whole(parser, reader, [*reader.feed(text), *reader.end(is_cut=is_cut)], context)
    text, calls = original(parser, text, **kw)
    if context is not None and context.allowed_tools is not None:
        left = [call for call in calls if call.name in context.allowed_tools]
        counter("forbidden_calls_left_out").inc(len(calls) - len(left))
        calls = left
    return text, _allowed(calls, [index > 0 for index in range(len(calls))])


def _whole(parser: Any, reader: Reader, said: list[Said], context: Any) -> tuple[str, list[Any]]:
    """The words and the whole calls of an answer. Notes their order."""
    words, parts = _told(parser, said)
    calls: dict[int, Any] = {}
    for part in parts:
        call = calls.setdefault(part.tool_index, part)
        if call is not part:
            call.parameters += part.parameters
    if context is None:
        return words, list(calls.values())
    numbers = {number: place for place, number in enumerate(calls)}
    order: list[str | int] = []
    for each in said:
        if isinstance(each, str):
            if order and isinstance(order[-1], str):
                order[-1] += each
            else:
                order.append(each)
        elif each.name is not None and each.number in numbers:
            order.append(numbers[each.number])
    context.parts = tuple(order)
    context.has_open_call = reader.is_cut
    _note_cut(parser, reader, context)
    return words, list(calls.values())


def _allowed_parts(parser: Any, calls: list[Any]) -> list[Any]:
    """The parts of calls in a stream that the client takes."""
    calls = _allowed(calls, [call.tool_index > 0 for call in calls])
    context = current()
    if not calls or context is None or context.allowed_tools is None:
        return calls
    forbidden = parser.__dict__.setdefault("sgl_ext_forbidden", set())
    for call in calls:
        if call.name and call.name not in context.allowed_tools:
            forbidden.add(call.tool_index)
            counter("forbidden_calls_left_out").inc()
    return [call for call in calls if call.tool_index not in forbidden]


def _allowed(calls: list[Any], are_further: list[bool]) -> list[Any]:
    """The parts of calls that the client takes. A call's first part has its name."""
    context = current()
    if not any(are_further) or context is None or not _takes_one(context.body):
        return calls
    further = [call for call, is_further in zip(calls, are_further, strict=True) if is_further]
    counter("parallel_calls_left_out").inc(sum(bool(call.name) for call in further))
    return [call for call, is_further in zip(calls, are_further, strict=True) if not is_further]


def _takes_one(body: Any) -> bool:
    """Whether an answer may have one call at most, by the field of any protocol."""
    choice = body.get("tool_choice") if isinstance(body, dict) else None
    if isinstance(choice, dict) and choice.get("disable_parallel_tool_use") is True:
        return True
    return isinstance(body, dict) and body.get("parallel_tool_calls") is False
