"""What a request asks to keep in the prefix cache, and for how long.

A client marks the ends of prefixes that it will send again. A mark on a block covers
everything up to the end of that block; other marks cover the whole prompt.

    /v1/messages           `cache_control` on tools, on blocks of `system` and of messages, and
                           at the root, which marks the last block that can have a mark
    /v1/chat/completions   `cache_control` on tools, parts and messages; at the root: all
    OpenAI's protocols     fields of their own: `sgl_ext/protocols/prompt_cache.py`
    every path             `nvext.cache_control`: all, or with the type "none" nothing

On /v1/messages marks are part of the protocol, so marks that Anthropic rejects are rejected with
the same words. In other protocols `cache_control` is a hint: a malformed one is ignored and
counted. `nvext.cache_control` is our own field, and a malformed one is rejected on every path.

If two marks cover the same prefix, the longer TTL counts. TTLs are clamped to the server's
limits after Anthropic's rules were checked, so whether a request is valid does not depend on the
limits. For the same reason a mark without a TTL counts as '5m' in the rule on order. The
usage of an answer says which TTL a client got that states one above the limit.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise, starmap
from typing import Any, NamedTuple

from sgl_ext.reading.protocol import (
    FoundMark,
    Json,
    MalformedMark,
    MarkRules,
    Place,
    Protocol,
    listed,
)

LIMIT_MARKS = 4
DEFAULT_TTL_S = 300.0
UNMARKABLE = ("thinking", "redacted_thinking")
_TTL = re.compile(r"([0-9]{1,9})([smh]?)")
_UNIT_S = {"": 1, "s": 1, "m": 60, "h": 3600}
_LIMIT_TTL_S = 1e9
_TTL_FORM = "must be a number of seconds above 0, alone or with a unit, such as '5m' or '1h'"


@dataclass(frozen=True, slots=True)
class TtlLimits:
    """What the server grants. `unmarked_s` is for requests without any mark; 0 pins nothing."""

    min_s: float
    max_s: float
    default_s: float = DEFAULT_TTL_S
    unmarked_s: float = 0.0

    def granted_s(self, requested_s: float | None) -> float:
        """The TTL that a mark gets; None is a mark that states no TTL."""
        requested_s = self.default_s if requested_s is None else requested_s
        return float(min(max(requested_s, self.min_s), self.max_s))


class Mark(NamedTuple):
    """Everything up to the end of the block at `place` is to be kept for `ttl_s`."""

    place: Place
    ttl_s: float


@dataclass(frozen=True, slots=True)
class Marks:
    """A request's marks.

    blocks: in the order tools, system, messages; at most LIMIT_MARKS of each vocabulary, each place
        once.
    whole_ttl_s: how long to keep the whole prompt; 0 if the request does not ask for it.
    keep: False if the client asks to keep nothing; there are no other marks then.
    error: why the request is invalid, or ""; there are no marks then.
    ignored: malformed hints that do not make the request invalid.
    clamped_s: the TTL that is granted where the request states a longer one; 0 if it states none.
    """

    blocks: tuple[Mark, ...] = ()
    whole_ttl_s: float = 0.0
    keep: bool = True
    error: str = ""
    ignored: int = 0
    clamped_s: float = 0.0


NO_MARKS = Marks()


@dataclass(slots=True)
class _Grants:
    """Clamps what one request states to the limits, and notes whether any of it was too long."""

    limits: TtlLimits
    clamped_s: float = 0.0

    def ttl_s(self, stated_s: float | None, *, is_least: bool = True) -> float:
        """The TTL that a mark gets; 0 for 0, which asks for nothing."""
        if stated_s == 0:
            return 0.0
        if is_least and stated_s is not None and stated_s > self.limits.max_s:
            self.clamped_s = self.limits.max_s
        return self.limits.granted_s(stated_s)


def read_marks(
    protocol: Protocol, body: Any, limits: TtlLimits, lease_s: float | None = 0.0
) -> Marks:
    """The marks of a parsed request body. Never raises.

    Empty for a protocol without marks and for a body that is not an object. Other malformed
    parts of a body are left for the engine to reject. lease_s: for how many seconds hints of
    another kind want the whole prompt kept; None for the default, 0 for not at all.
    """
    rules = protocol.marks
    if rules is None or not isinstance(body, dict):
        return NO_MARKS
    grants = _Grants(limits)
    try:
        keep, own_s = _read_own(body)
        blocks, ignored = _read_blocks(rules, body)
        root_s, malformed = _read_root(rules, body)
        fields = rules.read_fields(body)
    except MalformedMark as error:
        return Marks(error=str(error))
    ignored += malformed + fields.ignored
    whole_s = max(
        grants.ttl_s(lease_s),
        grants.ttl_s(own_s),
        grants.ttl_s(root_s),
        grants.ttl_s(fields.whole_s, is_least=fields.is_least),
    )
    blocks += fields.blocks
    if not keep or not (fields.keep or blocks or whole_s):
        return Marks(keep=False, ignored=ignored)
    if not blocks:
        whole_s = whole_s or limits.unmarked_s
    ttls: dict[Place, float] = {}
    for place, ttl_s in blocks:
        ttls[place] = max(grants.ttl_s(ttl_s), ttls.get(place, 0.0))
    if not (ttls or whole_s or ignored):
        return NO_MARKS
    marks = tuple(starmap(Mark, ttls.items()))
    return Marks(marks, whole_s, ignored=ignored, clamped_s=grants.clamped_s)


def count_marks(protocol: Protocol, body: Any) -> int:
    """How many of LIMIT_MARKS marks a request has, malformed ones included. Never raises."""
    find = None if protocol.marks is None else protocol.marks.find
    return 0 if find is None or not isinstance(body, dict) else sum(1 for _ in find(body))


def control_of(holder: Any) -> Any:
    """The `cache_control` of a block, tool or body; None if it has none."""
    return holder.get("cache_control") if isinstance(holder, dict) else None


def marks_in(blocks: Any, place: Place, field: str) -> Iterator[FoundMark]:
    """The marks on a list's blocks; a mark inside a tool's result counts for that result."""
    for j, block in enumerate(listed(blocks)):
        if not isinstance(block, dict):
            continue
        if block.get("type") == "tool_result":
            for k, part in enumerate(listed(block.get("content"))):
                if (control := control_of(part)) is not None:
                    yield FoundMark((*place, j), f"{field}.{j}.content.{k}", part, control)
        if (control := block.get("cache_control")) is not None:
            yield FoundMark((*place, j), f"{field}.{j}", block, control)


def seconds_of(field: str, ttl: Any) -> float:
    """The seconds that a TTL states. Raises MalformedMark, which names the field."""
    seconds = 0.0
    if isinstance(ttl, str):
        if match := _TTL.fullmatch(ttl):
            seconds = int(match[1]) * _UNIT_S[match[2]]
    elif isinstance(ttl, int | float) and not isinstance(ttl, bool) and ttl <= _LIMIT_TTL_S:
        seconds = ttl
    if not seconds > 0:
        raise MalformedMark(f"{field}: {_TTL_FORM}")
    return seconds


def _read_own(body: Json) -> tuple[bool, float | None]:
    """Whether the request may be kept, and the seconds that `nvext` states for the whole prompt."""
    control = control_of(body.get("nvext"))
    if control is None:
        return True, 0.0
    if isinstance(control, dict) and control.get("type") == "none":
        return False, 0.0
    return True, _stated_s("nvext.cache_control", control, " or 'none'")


def _read_root(rules: MarkRules, body: Json) -> tuple[float | None, int]:
    """The seconds that a mark at the root states for the whole prompt, and how many are ignored."""
    control = body.get("cache_control") if rules.root_is_whole else None
    if control is None:
        return 0.0, 0
    try:
        return _stated_s("cache_control", control), 0
    except MalformedMark:
        return 0.0, 1


def _read_blocks(rules: MarkRules, body: Json) -> tuple[list[tuple[Place, float | None]], int]:
    """Places with the TTLs that their marks state, and how many hints are ignored.

    Raises at a mark that breaks a strict protocol's rule.
    """
    marks: list[tuple[FoundMark, float | None]] = []
    ignored = 0
    for found in () if rules.find is None else rules.find(body):
        try:
            marks.append((found, _stated_by_block(found)))
        except MalformedMark:
            if rules.is_strict:
                raise
            ignored += 1
    if rules.is_strict:
        _check_by_anthropics_rules(marks)
    ignored += max(len(marks) - LIMIT_MARKS, 0)
    return [(found.place, ttl_s) for found, ttl_s in marks[:LIMIT_MARKS] if found.place], ignored


def _check_by_anthropics_rules(marks: list[tuple[FoundMark, float | None]]) -> None:
    if len(marks) > LIMIT_MARKS:
        raise MalformedMark(
            f"A maximum of {LIMIT_MARKS} blocks with cache_control may be provided. "
            f"Found {len(marks)}."
        )
    for (before, before_s), (mark, ttl_s) in pairwise(marks):
        if (ttl_s or DEFAULT_TTL_S) > (before_s or DEFAULT_TTL_S):
            raise MalformedMark(
                f"{_field(mark)}.ttl: a ttl='{mark.control.get('ttl') or '5m'}' cache_control "
                "block must not come after a "
                f"ttl='{before.control.get('ttl') or '5m'}' cache_control block. Note that blocks "
                "are processed in the following order: `tools`, `system`, `messages`."
            )


def _field(mark: FoundMark) -> str:
    return f"{mark.field}.cache_control".removeprefix(".")


def _stated_by_block(found: FoundMark) -> float | None:
    kind = found.block.get("type") if isinstance(found.block, dict) else None
    if kind in UNMARKABLE:
        raise MalformedMark(f"{found.field}.{kind}.cache_control: Extra inputs are not permitted")
    ttl_s = _stated_s(_field(found), found.control)
    if kind == "text" and found.block.get("text") == "":
        raise MalformedMark(f"{found.field}: cache_control cannot be set for empty text blocks")
    return ttl_s


def _stated_s(field: str, control: Any, other_type: str = "") -> float | None:
    """The seconds that a `cache_control` states, None if it states none."""
    if not isinstance(control, dict) or control.get("type") != "ephemeral":
        raise MalformedMark(f"{field}: must be an object whose `type` is 'ephemeral'{other_type}")
    ttl = control.get("ttl")
    return None if ttl is None else seconds_of(f"{field}.ttl", ttl)
