"""What a request asks to be kept in the prefix cache, and for how long.

A client marks the ends of what it will send again. Anthropic's protocol puts a mark on
a block, and everything up to that block's end is meant; others speak of the whole prompt.

    /v1/messages           `cache_control` on tools, blocks of `system` and of messages, and
                           at the root, which means the last block that can take it
    /v1/chat/completions   `cache_control` on tools, parts, messages; at the root: all
    OpenAI's protocols     `prompt_cache_retention`: all
    every path             `nvext.cache_control`: all, or with the type "none" nothing

On /v1/messages a mark is part of the protocol, so what Anthropic refuses is refused in its
words. Elsewhere marks came over from other vocabularies and are hints: one that cannot be
used is dropped and counted. `nvext.cache_control` is our own, and refused wherever it is
malformed.

The longest wish wins where two mean the same end. A wish is clamped to the server's limits
only after Anthropic's rules were applied to it, so whether a request is valid does not
depend on them; for the same reason a mark without a ttl counts as '5m' in the rule on order.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeGuard

Place = tuple[str | int, ...]

MOST_MARKS = 4
DEFAULT_TTL_S = 300.0
_DAY_S = 86_400.0
_MESSAGES = "/v1/messages"
_CHAT = frozenset({"/v1/chat/completions", "/invocations"})
_PLAIN = frozenset({"/v1/responses", "/v1/completions", "/generate", "/api/chat", "/api/generate"})
_PATHS = _CHAT | _PLAIN | {_MESSAGES}
_UNMARKABLE = ("thinking", "redacted_thinking")
_TTL = re.compile(r"([0-9]{1,9})([smh]?)")
_UNIT_S = {"": 1, "s": 1, "m": 60, "h": 3600}
_MOST_S = 1e9
_TTL_WANTED = "must be a number of seconds above 0, alone or with a unit, such as '5m' or '1h'"


@dataclass(frozen=True, slots=True)
class TtlLimits:
    """What the server grants. `unmarked_s` is for requests without any mark; 0 keeps none."""

    min_s: float
    max_s: float
    default_s: float = DEFAULT_TTL_S
    unmarked_s: float = 0.0

    def granted_s(self, wanted_s: float | None) -> float:
        """The time a mark gets; None is a mark that states no time."""
        wanted_s = self.default_s if wanted_s is None else wanted_s
        return float(min(max(wanted_s, self.min_s), self.max_s))


@dataclass(frozen=True, slots=True)
class Mark:
    """Everything up to the end of the block at `place` is to be kept for `ttl_s`.

    A place is ("tools", 2), ("system", 0), ("messages", 3, 1) with the index of the message
    and of the block in it, or, where there are no blocks, ("messages", 3) or ("system",).
    """

    place: Place
    ttl_s: float


@dataclass(frozen=True, slots=True)
class Marks:
    """A request's marks.

    blocks: in the order tools, system, messages; at most MOST_MARKS, each place once.
    whole_ttl_s: how long the whole prompt is to be kept; 0 if that was not asked.
    keep: False if the client asks that nothing be kept; there are no other marks then.
    error: why the request is to be refused, "" if it is not; there are no marks then.
    ignored: marks that could not be used and are no reason to refuse.
    """

    blocks: tuple[Mark, ...] = ()
    whole_ttl_s: float = 0.0
    keep: bool = True
    error: str = ""
    ignored: int = 0


NO_MARKS = Marks()


class _Malformed(ValueError):
    """A mark that cannot be used; its text is what a client may be told."""


@dataclass(frozen=True, slots=True)
class _Found:
    """A mark as it stands in the body. `field` names the block that has it, "" is the root."""

    place: Place
    field: str
    block: Any
    control: Any


@dataclass(frozen=True, slots=True)
class _Wish:
    """A well-formed mark; `wanted_s` is None if it states no time."""

    place: Place
    field: str
    wanted_s: float | None
    spelled: str


def read_marks(path: str, body: Any, limits: TtlLimits) -> Marks:
    """The marks of a parsed request body; `path` is its URL path. Never raises.

    Empty for a path that generates nothing and for a body that is not an object. What else
    is malformed in a body is left for the engine to refuse.
    """
    if path not in _PATHS or not isinstance(body, dict):
        return NO_MARKS
    try:
        keep, whole_s = _read_own(body, limits)
        if path == _MESSAGES:
            wishes, ignored = _read_strictly(body), 0
        else:
            wishes, ignored = _read_leniently(_in_chat(body) if path in _CHAT else iter(()))
            asked_s, unusable = _read_whole(body, limits, path)
            whole_s, ignored = max(whole_s, asked_s), ignored + unusable
    except _Malformed as error:
        return Marks(error=str(error))
    if not keep:
        return Marks(keep=False, ignored=ignored)
    if not wishes and not whole_s:
        whole_s = limits.unmarked_s
    if not wishes and not whole_s and not ignored:
        return NO_MARKS
    return Marks(_granted(wishes, limits), whole_s, ignored=ignored)


def count_marks(path: str, body: Any) -> int:
    """How many marks of MOST_MARKS a request has, usable or not. Never raises."""
    if not isinstance(body, dict):
        return 0
    if path == _MESSAGES:
        return sum(1 for _ in _in_messages(body))
    return sum(1 for _ in _in_chat(body)) if path in _CHAT else 0


def _granted(wishes: list[_Wish], limits: TtlLimits) -> tuple[Mark, ...]:
    ttls: dict[Place, float] = {}
    for wish in wishes:
        ttls[wish.place] = max(limits.granted_s(wish.wanted_s), ttls.get(wish.place, 0.0))
    return tuple(Mark(place, ttl_s) for place, ttl_s in ttls.items())


def _read_own(body: dict[str, Any], limits: TtlLimits) -> tuple[bool, float]:
    """Whether the request may be kept, and the whole prompt's TTL, as `nvext` states them."""
    nvext = body.get("nvext")
    control = nvext.get("cache_control") if isinstance(nvext, dict) else None
    if control is None:
        return True, 0.0
    if isinstance(control, dict) and control.get("type") == "none":
        return False, 0.0
    return True, limits.granted_s(_wanted_s("nvext.cache_control", control, "or 'none'"))


def _read_whole(body: dict[str, Any], limits: TtlLimits, path: str) -> tuple[float, int]:
    """The whole prompt's TTL in the words of others, and how many of these are unusable."""
    ttl_s, unusable = 0.0, 0
    if path in _CHAT and (control := body.get("cache_control")) is not None:
        try:
            ttl_s = limits.granted_s(_wanted_s("cache_control", control))
        except _Malformed:
            unusable += 1
    retention = body.get("prompt_cache_retention")
    if retention in ("in_memory", "in-memory"):
        ttl_s = max(ttl_s, limits.granted_s(None))
    elif retention == "24h":
        ttl_s = max(ttl_s, limits.granted_s(_DAY_S))
    elif retention is not None:
        unusable += 1
    return ttl_s, unusable


def _read_strictly(body: dict[str, Any]) -> list[_Wish]:
    """By Anthropic's rules; raises at the first that is broken."""
    wishes = [_wish(found) for found in _in_messages(body)]
    if len(wishes) > MOST_MARKS:
        raise _Malformed(
            f"A maximum of {MOST_MARKS} blocks with cache_control may be provided. "
            f"Found {len(wishes)}."
        )
    shortest: _Wish | None = None
    for wish in wishes:
        if shortest is not None and _by_rule_s(wish) > _by_rule_s(shortest):
            raise _Malformed(
                f"{wish.field}.ttl: a ttl='{wish.spelled}' cache_control block must not come "
                f"after a ttl='{shortest.spelled}' cache_control block. Note that blocks are "
                "processed in the following order: `tools`, `system`, `messages`."
            )
        shortest = wish
    return [wish for wish in wishes if wish.place]


def _by_rule_s(wish: _Wish) -> float:
    return DEFAULT_TTL_S if wish.wanted_s is None else wish.wanted_s


def _read_leniently(founds: Iterator[_Found]) -> tuple[list[_Wish], int]:
    wishes: list[_Wish] = []
    ignored = 0
    for found in founds:
        try:
            wish = _wish(found)
        except _Malformed:
            ignored += 1
            continue
        if len(wishes) < MOST_MARKS:
            wishes.append(wish)
        else:
            ignored += 1
    return wishes, ignored


def _wish(found: _Found) -> _Wish:
    kind = found.block.get("type") if isinstance(found.block, dict) else None
    if kind in _UNMARKABLE:
        raise _Malformed(f"{found.field}.{kind}.cache_control: Extra inputs are not permitted")
    field = f"{found.field}.cache_control" if found.field else "cache_control"
    wanted_s = _wanted_s(field, found.control)
    if found.field and kind == "text" and found.block.get("text") == "":
        raise _Malformed(f"{found.field}: cache_control cannot be set for empty text blocks")
    spelled = "5m" if wanted_s is None else str(found.control["ttl"])
    return _Wish(found.place, field, wanted_s, spelled)


def _wanted_s(field: str, control: Any, other_type: str = "") -> float | None:
    """The seconds that a `cache_control` states, None if it states none."""
    if not isinstance(control, dict) or control.get("type") != "ephemeral":
        wanted = f"'ephemeral' {other_type}".rstrip()
        raise _Malformed(f"{field}: must be an object whose `type` is {wanted}")
    ttl = control.get("ttl")
    if ttl is None:
        return None
    seconds = 0.0
    if isinstance(ttl, str):
        if parsed := _TTL.fullmatch(ttl):
            seconds = int(parsed[1]) * _UNIT_S[parsed[2]]
    elif isinstance(ttl, int | float) and not isinstance(ttl, bool) and ttl <= _MOST_S:
        seconds = ttl
    if not seconds > 0:
        raise _Malformed(f"{field}.ttl: {_TTL_WANTED}")
    return seconds


def _marked(holder: Any) -> TypeGuard[dict[str, Any]]:
    return isinstance(holder, dict) and holder.get("cache_control") is not None


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _in_messages(body: dict[str, Any]) -> Iterator[_Found]:
    """The marks of /v1/messages in prompt order, the root's last."""
    for kind in ("tools", "system"):
        for k, block in enumerate(_listed(body.get(kind))):
            if _marked(block):
                tested = None if kind == "tools" else block
                yield _Found((kind, k), f"{kind}.{k}", tested, block["cache_control"])
    for i, message in enumerate(_listed(body.get("messages"))):
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list):
            yield from _in_blocks(content, i)
    if _marked(body):
        yield _Found(_last_place(body), "", None, body["cache_control"])


def _in_blocks(content: list[Any], i: int) -> Iterator[_Found]:
    """The marks of a message's blocks; one inside a tool's result is at that result's place."""
    for j, block in enumerate(content):
        if not isinstance(block, dict):
            continue
        inner = block.get("content")
        if isinstance(inner, list) and block.get("type") == "tool_result":
            for k, part in enumerate(inner):
                if _marked(part):
                    field = f"messages.{i}.content.{j}.content.{k}"
                    yield _Found(("messages", i, j), field, part, part["cache_control"])
        if block.get("cache_control") is not None:
            field = f"messages.{i}.content.{j}"
            yield _Found(("messages", i, j), field, block, block["cache_control"])


def _last_place(body: dict[str, Any]) -> Place:
    """The place of the last block that can take a mark; () if there is none."""
    messages = _listed(body.get("messages"))
    for i in range(len(messages) - 1, -1, -1):
        message = messages[i]
        content = message.get("content") if isinstance(message, dict) else None
        if (found := _last_in(content)) is not None:
            return ("messages", i, *found)
    if (found := _last_in(body.get("system"))) is not None:
        return ("system", *found)
    tools = _listed(body.get("tools"))
    return ("tools", len(tools) - 1) if tools else ()


def _last_in(content: Any) -> tuple[int, ...] | None:
    """What leads from a content to its last block that can take a mark; () if it is a text."""
    if isinstance(content, str):
        return () if content else None
    blocks = _listed(content)
    for j in range(len(blocks) - 1, -1, -1):
        block = blocks[j]
        if not isinstance(block, dict) or block.get("type") in _UNMARKABLE:
            continue
        if block.get("type") != "text" or block.get("text") != "":
            return (j,)
    return None


def _in_chat(body: dict[str, Any]) -> Iterator[_Found]:
    """The marks of /v1/chat/completions in prompt order; one on a message is at its end."""
    for k, tool in enumerate(_listed(body.get("tools"))):
        inner = tool.get("function") if isinstance(tool, dict) else None
        for holder in (tool, inner):
            if _marked(holder):
                yield _Found(("tools", k), f"tools.{k}", None, holder["cache_control"])
                break
    for i, message in enumerate(_listed(body.get("messages"))):
        if not isinstance(message, dict):
            continue
        for j, part in enumerate(_listed(message.get("content"))):
            if _marked(part):
                field = f"messages.{i}.content.{j}"
                yield _Found(("messages", i, j), field, part, part["cache_control"])
        if message.get("cache_control") is not None:
            yield _Found(("messages", i), f"messages.{i}", message, message["cache_control"])
