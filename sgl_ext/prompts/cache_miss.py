"""Why a request did not read what a request that it names had left in the cache.

A fingerprint of a request has hashes and token counts. Two fingerprints are compared in the order
of the prompt, and the first of these that is true is the reason:

    another model, tools, instructions, messages ... the hashes differ there
    evicted ........................................ the engine no longer had the same prompt
    a setting ...................................... less was read, and a field differs that
                                                     changes how templates render the prompt
    unavailable .................................... less was read, and nothing above explains it
"""

import weakref
from typing import Any, NamedTuple

import orjson
import xxhash

from sgl_ext.prompts.prompt import EVICTED, SLACK_TOKENS, Left, Prompt, evicted_tokens
from sgl_ext.protocols.cache_diagnostics import Found
from sgl_ext.reading.places import common_prefix
from sgl_ext.reading.protocol import Json
from sgl_ext.reading.segments import SORTED, Chain

MODEL, TOOLS, SYSTEM, MESSAGES = "model", "tools", "system", "messages"
COMPACTED, UNAVAILABLE = "compacted", "unavailable"
# Causes that leave no other reason than UNAVAILABLE.
ANOTHER_ENGINE, RENDERING = "another_engine", "rendering"
# What separates caches, beside the model: the hashes of all segments differ with it.
_SEPARATES = "cache"
_SETTINGS = (
    MODEL,
    _SEPARATES,
    "prompt_cache_key",
    "text_format",
    "reasoning_effort",
    "verbosity",
    "tool_choice",
)
Settings = tuple[int, ...]
"""A hash for each of `_SETTINGS`; 0 for those that a request lacks."""


def settings_of(body: Json) -> Settings:
    """The settings of a parsed body. Never raises."""
    get = body.get
    text, reasoning, output = get("text"), get("reasoning"), get("output_config")
    verbosity = get("verbosity")
    formats = [get("response_format"), get("output_format")]
    efforts = [get("reasoning_effort"), get("thinking"), get("chat_template_kwargs")]
    if isinstance(text, dict):
        verbosity = verbosity or text.get("verbosity")
        formats.append(text.get("format"))
    if isinstance(reasoning, dict):
        efforts.append(reasoning.get("effort"))
    if isinstance(output, dict):
        formats.append(output.get("format"))
        efforts.append(output.get("effort"))
    separates = [get("lora_path"), get("cache_salt"), get("extra_key"), get("previous_response_id")]
    return (
        _hash(get("model")),
        _hash_any(separates),
        _hash(get("prompt_cache_key")),
        _hash_any(formats),
        _hash_any(efforts),
        _hash(verbosity),
        _hash(get("tool_choice")),
    )


def _hash_any(values: list[Any]) -> int:
    """The hash of the values that are there, in their order."""
    there = [value for value in values if value is not None]
    return _hash(there) if there else 0


def _hash(value: Any) -> int:
    if value is None:
        return 0
    try:
        return xxhash.xxh3_64_intdigest(orjson.dumps(value, option=SORTED))
    except TypeError:  # nested too deeply, or a text that is none
        return 1


class Fingerprint(NamedTuple):
    """A request's hashes and counts.

    left: what its turn left in a cache; None if it is not complete, or the engine counted nothing.
    prompt: what is remembered of it, as long as it is.
    """

    settings: Settings
    chain: Chain
    left: Left | None = None
    prompt: "weakref.ref[Prompt] | None" = None


def find_miss(
    old: Fingerprint,
    new: Fingerprint,
    worker: str,
    held_tokens: int | None,
    cached_tokens: int | None,
) -> Found | None:
    """Why `new` could not read all that `old` had left; None if nothing says that it could not.

    worker: the engine that answers `new`.
    held_tokens: what the engine of `old` was known to hold of `new` when that was placed; None if
        that is unknown.
    cached_tokens: what was read; None if that is unknown.

    The tokens are estimated from bytes; those of an eviction are counted by the engine.
    """
    left = old.left
    reusable = 0 if left is None else left.tokens
    settings = zip(_SETTINGS, old.settings, new.settings, strict=True)
    differ = [name for name, before, after in settings if before != after]
    if MODEL in differ:
        return Found(MODEL, reusable, reusable)
    if _SEPARATES in differ:
        return _unavailable(_SEPARATES)
    same = common_prefix(old.chain.hashes, new.chain.hashes)
    if same < min(len(old.chain.hashes), len(new.chain.hashes)):
        share = old.chain.ends[same - 1] / old.chain.ends[-1] if same else 0.0
        return Found(_part(old.chain, new.chain, same), round(reusable * (1 - share)), reusable)
    if left is None or cached_tokens is None or left.tokens - cached_tokens <= SLACK_TOKENS:
        return None
    if len(new.chain.hashes) < len(old.chain.hashes):
        return None  # it is the beginning of the named one
    if evicted := evicted_tokens(left, held_tokens, cached_tokens):
        return Found(EVICTED, evicted, reusable)
    if worker != left.worker:
        return _unavailable(ANOTHER_ENGINE)
    if differ:
        return Found(differ[0], left.tokens - cached_tokens, reusable)
    is_held = held_tokens is not None and held_tokens > cached_tokens + SLACK_TOKENS
    return _unavailable(RENDERING if is_held else None)


def _unavailable(cause: str | None) -> Found:
    return Found(UNAVAILABLE, 0, 0, {} if cause is None else {"cause": cause})


def _part(old: Chain, new: Chain, same: int) -> str:
    """The part of the prompt in which the segment after the same ones is."""
    if same < max(old.tool_segments, new.tool_segments):
        return TOOLS
    if same < max(old.head_segments, new.head_segments):
        return SYSTEM
    head = old.ends[old.head_segments - 1] if old.head_segments else 0
    is_shorter = 2 * (new.ends[-1] - head) < old.ends[-1] - head
    return COMPACTED if is_shorter else MESSAGES
