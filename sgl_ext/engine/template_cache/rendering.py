"""One rendering of a changed template, which asks it for what each iteration has written before.

An iteration is known by its item and by the values that decide, beside it, what is written. What
stands for a value stands for no other one: not for one of another type, nor for a dict with its
keys in another order.
"""

from __future__ import annotations

import hashlib
import marshal
import secrets
import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from operator import attrgetter
from typing import Any, NamedTuple

from jinja2 import Undefined
from jinja2.utils import Namespace
from xxhash import xxh3_64_intdigest

from radix.byte_lru import Parts
from sgl_ext.engine.host_cache.shortcuts import Message
from sgl_ext.engine.template_cache.parts import Loop
from sgl_ext.engine.template_cache.rewrite import PREFIX
from sgl_ext.engine.template_cache.rules import LOOP, is_yes_or_no
from sgl_ext.engine.template_cache.run_rules import Needs
from sgl_ext.engine.template_cache.runs import NO_RUN, UNWRITTEN, Course, Mark, Part, Runs

_SHORT_CHARS = 64
# Of marshal: which writes the same for the same, and tells types and the order of keys.
_VERSION = 2
_LIST_HEAD_BYTES = 5
_LARGE = 1 << 63
_VALUE_BYTES = 200
_PLAIN = (str, bool, int, float, type(None))
# A key of this process's own: what is found stands for text in a prompt.
_key = secrets.token_bytes(32)
_UNDEFINED, _ABSENT = Mark(), Mark()


class _Place(NamedTuple):
    """Where an effect is: its namespace among those of its loop."""

    at: int
    attribute: str
    is_read: bool


class Site:
    """A loop, ready to be asked."""

    def __init__(self, number: int, loop: Loop, needs: Needs | None) -> None:
        self.number = number
        self.fixed = 0 if needs is None else len(needs.fixed)
        self.bases = () if needs is None else tuple(bound.base for bound in needs.bounds)
        self.spaces = len(loop.spaces)
        self.asks_yes_or_no = all(map(is_yes_or_no, loop.asked))
        self.places = [
            _Place(loop.spaces.index(effect.space), effect.attribute, effect.is_read)
            for effect in loop.effects
        ]


class Rendering:
    """One rendering, which the changed template asks for what is known."""

    def __init__(self, sites: Sequence[Site], parts: Parts[Part], runs: Runs, space: str) -> None:
        self._sites = sites
        self._runs = runs
        self._courses: list[Course] = []
        self._course: Course | None = None
        self._find = parts.find
        self._keep = parts.keep
        self._space = space
        self._digests: dict[int, tuple[Any, bytes]] = {}
        self._now: Site | None = None
        self._name: tuple[str, int, bytes, tuple[Any, ...]] = "", 0, b"", ()
        self._before: list[Any] = []
        self.known = 0
        self.new = 0

    def run(self, number: int, loop: Any, items: Any, *values: Any) -> str | None:
        """What this iteration and those behind it write, as far as it is known what they do one
        behind the other. Their effects are done then, and the loop is at the last of them."""
        site = self._sites[number]
        spaces, values = values[: site.spaces], values[site.spaces :]
        limits = values[site.fixed :]
        if type(items) is not list or not all(type(limit) is int for limit in limits):
            return None
        if not all(type(space) is Namespace for space in spaces):
            return None
        try:
            fixed = tuple(map(self._value, values[: site.fixed]))
            written = marshal.dumps(items, _VERSION)[_LIST_HEAD_BYTES:]
            key = self._space, site.number, xxh3_64_intdigest(marshal.dumps(items[:2], _VERSION))
        except ValueError:
            return None
        before = self._runs.find(key) or NO_RUN
        same = before.items_in(written)
        ends = before.ends[:same]
        for item in items[same:]:
            ends.append((ends[-1] if ends else 0) + len(marshal.dumps(item, _VERSION)))
        assert ends[-1] == len(written)
        bounds = tuple(limit - base for limit, base in zip(limits, site.bases, strict=True))
        length = before.length_in(fixed, bounds, same)
        begun = before.cut(length)._replace(fixed=fixed, bounds=bounds, written=written, ends=ends)
        self._course = Course(number, key, begun)
        self._courses.append(self._course)
        if not length:
            return None
        if begun.left:
            self._leave(site, spaces, begun.left[-1])
        deque(islice(loop, length - 1), 0)
        self.known += length
        return begun.text

    def remember(self) -> None:
        """Keeps what the loops did one iteration behind the other."""
        for course in self._courses:
            self._runs.keep(course.key, course.run)

    def find(self, number: int, item: Any, *values: Any) -> str | None:
        """What an iteration writes, whose effects are done then. None: it must be rendered."""
        site = self._sites[number]
        self._now = None
        if self._course is not None and self._course.number != number:
            self._course = None
        spaces: Sequence[Any] = ()
        if site.spaces:
            spaces, values = values[: site.spaces], values[site.spaces :]
            if not all(type(space) is Namespace for space in spaces):
                return None
        try:
            if not site.asks_yes_or_no:
                values = tuple(map(self._value, values))
            written = marshal.dumps(dict(item) if type(item) is Message else item, _VERSION)
        except ValueError:
            return None
        name = self._space, site.number, written, values
        part = self._find(name)
        if part is None:
            self._now, self._name = site, name
            self._before = [self._hide(spaces[place.at], place) for place in site.places]
            return None
        self._leave(site, spaces, part.left)
        self._note(part)
        self.known += 1
        return part.text

    def keep(self, text: str, *spaces: Any) -> str:
        """Remembers what the iteration has written, which is what it gives."""
        self.new += 1
        site, self._now = self._now, None
        if site is None:
            self._course = None
            return text
        left = []
        for (at, attribute, _), before in zip(site.places, self._before, strict=True):
            attributes = _attributes(spaces[at])
            value = attributes.get(attribute, _ABSENT)
            if value is UNWRITTEN:
                del attributes[attribute]
                if before is not _ABSENT:
                    attributes[attribute] = before
            left.append(UNWRITTEN if value is _ABSENT else value)
        if all(type(value) in _PLAIN or value is UNWRITTEN for value in left):
            *_, item, values = self._name
            size = sys.getsizeof(text) + len(item) + sum(map(sys.getsizeof, left))
            size += _VALUE_BYTES * len(values)
            part = Part(text, tuple(left))
            self._keep(self._name, part, size)
            self._note(part)
        else:
            self._course = None
        return text

    def _note(self, part: Part) -> None:
        """Takes down what an iteration did; behind one that is not, no other is."""
        if self._course is not None:
            self._course.parts.append(part)

    @staticmethod
    def _leave(site: Site, spaces: Sequence[Any], all_left: Sequence[Any]) -> None:
        """Does effects."""
        for (at, attribute, _), left in zip(site.places, all_left, strict=True):
            if left is not UNWRITTEN:
                spaces[at][attribute] = left

    def _hide(self, space: Any, place: _Place) -> Any:
        """Puts a mark where it can be seen afterwards whether an iteration has written."""
        attributes = _attributes(space)
        before = attributes.get(place.attribute, _ABSENT)
        if not place.is_read:
            attributes[place.attribute] = UNWRITTEN
        return before

    def _value(self, value: Any) -> Any:
        """What stands for a value, and for no other one. Raises ValueError: JSON has no such."""
        kind = type(value)
        if kind is bool or value is None or (kind is str and len(value) <= _SHORT_CHARS):
            return value
        if kind is int and abs(value) < _LARGE:
            return int, value
        if isinstance(value, Undefined):
            return _UNDEFINED
        return self._digest(value)

    def _digest(self, value: Any) -> bytes:
        # It is held, so no other value gets its id; and templates cannot change one.
        found = self._digests.get(id(value))
        if found is None:
            written = marshal.dumps(dict(value) if type(value) is Message else value, _VERSION)
            digest = hashlib.blake2b(written, digest_size=16, key=_key).digest()
            found = self._digests[id(value)] = value, digest
        return found[1]


def _attributes(space: Any) -> dict[str, Any]:
    found: dict[str, Any] = object.__getattribute__(space, "_Namespace__attrs")
    return found


def filters_of(environment: Any, names: Iterable[str]) -> dict[str, Callable[..., Any]]:
    """What a changed template calls, by names that no template can write.

    names: the attributes that it asks for.
    """

    def item(value: Any, name: Any) -> Any:
        return value if isinstance(value, Undefined) else environment.getitem(value, name)

    found: dict[str, Callable[..., Any]] = {f"loop_{name}": attrgetter(name) for name in LOOP}
    found |= {f"attribute_{name}": _getter(environment, name) for name in names}
    found |= {"find": Rendering.find, "keep": Rendering.keep, "run": Rendering.run, "item": item}
    return {PREFIX + name: made for name, made in found.items()}


def _getter(environment: Any, name: str) -> Callable[[Any], Any]:
    """`environment.getattr`, for which an attribute of what is undefined is undefined."""
    is_key = not name.startswith("_") and not hasattr(dict, name)
    is_public = not name.startswith("_")

    def attribute(value: Any) -> Any:
        kind = type(value)
        if is_key and (kind is dict or kind is Message):
            return value[name] if name in value else environment.undefined(obj=value, name=name)
        if is_public and kind is Namespace:
            found = _attributes(value).get(name)
            if found is not None and type(found) in _PLAIN:
                return found
        return value if isinstance(value, Undefined) else environment.getattr(value, name)

    return attribute
