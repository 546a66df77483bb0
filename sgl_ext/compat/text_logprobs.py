"""Log probabilities of an answer's text on /v1/responses, whole and streamed.

    generated   <think> Hm . </think> It is alpha .     each with its log probability
    SGLang      all of them, in whole answers; in a stream it refuses them
    here        It is alpha .                           in deltas, and at the end

SGLang 0.5.23 does so. Thinking, calls and markup pass between the texts, in the order in which the
model wrote them. So each text is looked for behind the one before it.

    create_responses                          `allow_in_stream`
    TokenizerManager.generate_request         `ask`
    responses_stream_generator_non_harmony    `stream_response`
    responses_full_generator                  `complete_response`

    fault     log probabilities of /v1/responses are those of all tokens, and refused in a stream
    hooks     group "log probabilities"
    test      tests/compat/test_text_logprobs.py
    upstream  no patch yet
    ends with a version that gives each text its own
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Any, NamedTuple

import orjson

from sgl_ext.engine.core.request_context import context_of, current
from sgl_ext.engine.sglang_http_types import ServingResponses
from sgl_ext.engine.sglang_types import Original

_NOT_ASCII = re.compile(r"[^\x00-\x7f]")
_INCLUDE = "message.output_text.logprobs"
_TEXT_DELTA, _TEXT_DONE = "response.output_text.delta", "response.output_text.done"
_PART_DONE, _ITEM_DONE = "response.content_part.done", "response.output_item.done"
_ENDS = ("response.completed", "response.incomplete")
_OTHER_DELTAS = (
    "response.reasoning_text.delta",
    "response.reasoning_summary_text.delta",
    "response.function_call_arguments.delta",
    "response.custom_tool_call_input.delta",
)
_KNOWN = frozenset((_TEXT_DELTA, _TEXT_DONE, _PART_DONE, _ITEM_DONE, *_ENDS, *_OTHER_DELTAS))


class Token(NamedTuple):
    """A generated token. top: the most probable ones, each with its log probability."""

    text: str
    logprob: float
    top: tuple[tuple[str, float], ...] = ()

    @property
    def short(self) -> dict[str, Any]:
        """As events have it."""
        top = [{"token": text, "logprob": logprob} for text, logprob in self.top]
        return {"token": self.text, "logprob": self.logprob, "top_logprobs": top}

    @property
    def whole(self) -> dict[str, Any]:
        """As a text has it."""
        top = [{**each, "bytes": _bytes(each["token"])} for each in self.short["top_logprobs"]]
        return {**self.short, "bytes": _bytes(self.text), "top_logprobs": top}


class Tokens:
    """The tokens of an answer behind the texts that were found in them."""

    def __init__(self) -> None:
        self._tokens: list[Token] = []
        self._begins: list[int] = []
        self._text = ""

    def add(self, tokens: Sequence[Token]) -> None:
        """What the model generated next."""
        begin = len(self._text)
        for token in tokens:
            self._tokens.append(token)
            self._begins.append(begin)
            begin += len(token.text)
        self._text += "".join(token.text for token in tokens)

    def of(self, text: str) -> list[Token]:
        """The tokens of the next text. None of them is given twice.

        A text that is not found has the tokens of its length.
        """
        if not text:
            return []
        place = self._find(text)
        begin, end = place or (0, min(len(text), len(self._text)))
        last = bisect_left(self._begins, end)
        # The one in which it begins, if it does not begin with one.
        first = 0 if place is None else max(bisect_right(self._begins, begin) - 1, 0)
        found = self._tokens[first:last]
        self._tokens, self._text = self._tokens[last:], self._text[end:]
        self._begins = [at - end for at in self._begins[last:]]
        return found

    def know(self, text: str) -> bool:
        """Whether the tokens of a text are there."""
        return self._find(text) is not None

    def _find(self, text: str) -> tuple[int, int] | None:
        """Where a text begins and ends: with a token, or where the last text ended, if it does
        anywhere."""
        first = at = self._text.find(text)
        while at > 0:
            place = bisect_left(self._begins, at)
            if place < len(self._begins) and self._begins[place] == at:
                break
            at = self._text.find(text, at + 1)
        if at >= 0:
            return at, at + len(text)
        if first >= 0:
            return first, first + len(text)
        if text.isascii():
            return None
        # Tokens of half a character have a mark in its place.
        found = re.search(_NOT_ASCII.sub(_or_marks, re.escape(text)), self._text)
        return None if found is None else found.span()


def _or_marks(char: re.Match[str]) -> str:
    return f"(?:{char[0]}|\\ufffd{{1,4}})"


async def allow_in_stream(
    original: Callable[..., Awaitable[Any]],
    serving: ServingResponses,
    request: Any,
    raw_request: Any = None,
) -> Any:
    """Around `OpenAIServingResponses.create_responses`: keeps the wish for log probabilities from
    SGLang, which refuses it in a stream."""
    context = context_of(raw_request)
    wishes = request.stream and _INCLUDE in (request.include or ())
    if wishes and context is not None and not getattr(serving, "use_harmony", False):
        request.include = [each for each in request.include if each != _INCLUDE]
        context.top_logprobs = request.top_logprobs or 0
    return await original(serving, request, raw_request)


def ask(_: Any, request: Any, *__: Any, **___: Any) -> None:
    """Before `TokenizerManager.generate_request`: asks the scheduler for what SGLang refuses."""
    context = current()
    if context is not None and context.top_logprobs is not None:
        request.return_logprob, request.logprob_start_len = True, -1
        request.top_logprobs_num, request.return_text_in_logprobs = context.top_logprobs, True


def stream_response(
    original: Original,
    serving: ServingResponses,
    request: Any,
    params: Any,
    results: Any,
    *args: Any,
    **kw: Any,
) -> Any:
    """Around `OpenAIServingResponses.responses_stream_generator_non_harmony`."""
    context = current()
    if context is None or context.top_logprobs is None:
        return original(serving, request, params, results, *args, **kw)
    tokens = Tokens()
    stream = original(serving, request, params, _noted(results, tokens), *args, **kw)
    return _with_logprobs(stream, tokens)


async def complete_response(original: Callable[..., Awaitable[Any]], *args: Any, **kw: Any) -> Any:
    """Around `OpenAIServingResponses.responses_full_generator`."""
    response = await original(*args, **kw)
    for item in getattr(response, "output", None) or ():
        for part in getattr(item, "content", None) or ():
            if getattr(part, "logprobs", None):
                _leave_text(response.output, part.logprobs)
                return response
    return response


def _leave_text(items: list[Any], generated: Sequence[Any]) -> None:
    """Leaves each text of an answer the log probabilities of its own tokens."""
    tokens = Tokens()
    tokens.add([Token(each.token, each.logprob, (each,)) for each in generated])
    for item in items:
        for part in getattr(item, "content", None) or ():
            found = tokens.of(part.text)
            if item.type == "message":
                part.logprobs = [token.top[0] for token in found]
        if arguments := getattr(item, "arguments", None):
            tokens.of(arguments)


async def _noted(results: AsyncIterator[Any], tokens: Tokens) -> AsyncIterator[Any]:
    known = 0
    async for result in results:
        chunk = result if isinstance(result, dict) else getattr(result, "last_output", None)
        meta = chunk.get("meta_info") if isinstance(chunk, dict) else None
        if meta and (given := meta.get("output_token_logprobs")):
            # All so far, or those of this chunk.
            length = meta.get("output_token_logprobs_length", len(given))
            first = len(given) - (length - known)
            tokens.add(list(_read(given, meta.get("output_top_logprobs"), max(first, 0))))
            known = length
        yield result


def _read(given: Sequence[Any], tops: Sequence[Any] | None, first: int) -> Iterator[Token]:
    for at in range(first, len(given)):
        logprob, _, text = given[at]
        top = tops[at] if tops and at < len(tops) else None
        yield Token(text or "", logprob, tuple((each[2] or "", each[0]) for each in top or ()))


async def _with_logprobs(events: AsyncIterator[str], tokens: Tokens) -> AsyncIterator[str]:
    of_item: dict[str, list[Token]] = {}
    async for event in events:
        name = event.partition("\n")[0].removeprefix("event: ")
        if name not in _KNOWN:
            yield event
            continue
        document = orjson.loads(event.partition("data: ")[2])
        if name in _OTHER_DELTAS:
            tokens.of(document["delta"])
            yield event
            continue
        if name == _TEXT_DELTA:
            found = tokens.of(document["delta"])
            of_item.setdefault(document["item_id"], []).extend(found)
            document["logprobs"] = [token.short for token in found]
        elif name == _TEXT_DONE:
            document["logprobs"] = [each.short for each in of_item.get(document["item_id"], ())]
        elif name == _PART_DONE:
            _complete(document["part"], of_item.get(document["item_id"]))
        else:
            items = [document["item"]] if name == _ITEM_DONE else document["response"]["output"]
            for item in items:
                for part in item.get("content") or ():
                    _complete(part, of_item.get(item["id"]))
        yield f"event: {name}\ndata: {orjson.dumps(document).decode()}\n\n"


def _complete(part: dict[str, Any], tokens: Sequence[Token] | None) -> None:
    if part.get("type") == "output_text":
        part["logprobs"] = [token.whole for token in tokens or ()]


def _bytes(text: str) -> list[int]:
    return list(text.encode())
