"""Token counts in the bytes of an answer.

    chat, completions    "usage": {prompt_tokens, completion_tokens, prompt_tokens_details}
    responses            "usage": {input_tokens, output_tokens, input_tokens_details}
    messages             "usage": {input_tokens, output_tokens, cache_read_input_tokens,
                         cache_creation_input_tokens}; `input_tokens` excludes the other two. In a
                         stream, the first event counts the prompt and a later one the answer
    generate             "meta_info": {prompt_tokens, completion_tokens, cached_tokens}; a list of
                         prompts, and several answers to one, have one each
    prefill              {prompt_tokens, cached_tokens, prefilled_tokens}, at the top level

Generated text cannot be mistaken for counts: JSON escapes the quotation marks inside it.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

_WINDOW_BYTES = 4096
_OBJECTS = (b'"usage":', b'"meta_info":')
_COUNT = re.compile(
    rb'"(prompt_tokens|input_tokens|completion_tokens|output_tokens|cached_tokens|prefilled_tokens'
    rb'|cache_read_input_tokens|cache_creation_input_tokens)":\s*(\d{1,12})(?=[,}\s])'
)
_ITEM = b'"meta_info":'
_LISTS = (b"[", b'{"predictions":[')
_SHORT_TTL_S = 300.0
_Counts = dict[bytes, bytes]  # digits


class Usage(msgspec.Struct, frozen=True, gc=False):
    """What an answer says of its cost; None is a count that it does not state.

    prompt_tokens: the length of the prompt.
    cached_tokens: prompt tokens read from the cache.
    computed_tokens: prompt tokens not read from the cache, plus generated tokens.
    """

    prompt_tokens: int | None
    cached_tokens: int | None
    computed_tokens: int | None

    @property
    def output_tokens(self) -> int | None:
        """Generated tokens."""
        prompt, output = self.prompt_tokens, self.computed_tokens
        if prompt is None or output is None:
            return None
        if (uncached := prompt - (self.cached_tokens or 0)) > 0:
            output -= uncached
        return output if output > 0 else 0


def read_usage(first: bytes, last: bytes) -> Usage | None:
    """The usage in the first and the last events of a stream, or in a whole answer given twice.

    None if it states no usage.
    """
    if first is last and last.startswith(_LISTS):
        return read_items(last.split(_ITEM)[1:])
    end = prompt = _counts(last)
    length, generated = _prompt(end), _generated(end)
    if first is not last:
        begin = _counts(first)
        generated = max(_generated(begin), generated)
        if (beginning := _prompt(begin)) is not None:
            prompt, length = begin, beginning
    cached = _cached(prompt)
    if b"prefilled_tokens" in prompt:
        return Usage(length, cached, int(prompt[b"prefilled_tokens"]))
    if cached is None and prompt is not end:
        cached = _cached(end)
    if length is None:
        return None if cached is None else Usage(None, cached, None)
    return Usage(length, cached, max(length - (cached or 0), 0) + generated)


def read_items(items: Iterable[bytes]) -> Usage | None:
    """The usage of several items together; each states its own in `meta_info`."""
    found = [_usage_of_item(item) for item in items]
    known = [usage for usage in found if usage is not None]
    return Usage(*map(sum, zip(*known, strict=True))) if known else None


def _usage_of_item(item: bytes) -> tuple[int, int, int] | None:
    item = item[item.find(_ITEM) :] if _ITEM in item else item
    counts = _first_of_each(item[:_WINDOW_BYTES])
    if not _generated(counts) and len(item) > _WINDOW_BYTES:  # behind log probabilities
        counts = _first_of_each(item)
    length, cached = _prompt(counts), _cached(counts) or 0
    if length is None:
        return None
    return length, cached, max(length - cached, 0) + _generated(counts)


def _counts(data: bytes) -> _Counts:
    """The counts of the last object that holds any; empty if there is none."""
    for name in _OBJECTS:
        at = data.rfind(name)
        while at >= 0:  # a tool may have a parameter of this name
            window = data[at : at + _WINDOW_BYTES]
            if len(data) - at > _WINDOW_BYTES:  # log probabilities may stand between the counts
                window += data[max(at + _WINDOW_BYTES, len(data) - _WINDOW_BYTES) :]
            if counts := _first_of_each(window):
                return counts
            at = data.rfind(name, 0, at)
    counts = _first_of_each(data[-_WINDOW_BYTES:])
    return counts if b"prefilled_tokens" in counts else {}


def _first_of_each(data: bytes) -> _Counts:
    return dict(reversed(_COUNT.findall(data)))


def _prompt(counts: _Counts) -> int | None:
    if (length := counts.get(b"prompt_tokens")) is not None:
        return int(length)
    if b"input_tokens" not in counts:
        return None
    names = (b"input_tokens", b"cache_read_input_tokens", b"cache_creation_input_tokens")
    return sum([int(counts.get(name, b"0")) for name in names])


def _cached(counts: _Counts) -> int | None:
    cached = counts.get(b"cached_tokens") or counts.get(b"cache_read_input_tokens")
    return None if cached is None else int(cached)


def _generated(counts: _Counts) -> int:
    return int(counts.get(b"completion_tokens") or counts.get(b"output_tokens", b"0"))


def with_cache_creation(
    usage: dict[str, Any], marked: Sequence[tuple[int, float]]
) -> dict[str, Any]:
    """Anthropic's usage object, with the tokens that a request's marks wrote to the cache.

    marked: for each mark, in ascending order, the tokens up to its block's end, and its TTL.
    Tokens between the end of the cached prefix and the last mark were written. Each counts for
    the first mark that follows it. The sum of `input_tokens`, `cache_creation_input_tokens` and
    `cache_read_input_tokens` remains the length of the prompt.
    """
    read = usage.get("cache_read_input_tokens") or 0
    prompt = (usage.get("input_tokens") or 0) + read
    reached = read
    by_ttl = {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0}
    for tokens, ttl_s in marked:
        written = max(min(tokens, prompt) - reached, 0)
        reached += written
        by_ttl[f"ephemeral_{'1h' if ttl_s > _SHORT_TTL_S else '5m'}_input_tokens"] += written
    return usage | {
        "input_tokens": prompt - reached,
        "cache_creation_input_tokens": reached - read,
        "cache_read_input_tokens": read,
        "cache_creation": by_ttl,
    }


def written_tokens(marked: Iterable[int], prompt: int, cached: int) -> int:
    """The tokens between the end of the cached prefix and the last mark, which marks wrote to the
    cache. marked: the tokens up to each mark's block's end."""
    return max(min(max(marked, default=0), prompt) - cached, 0)
