"""The state of every field that an SDK may send: found by sending requests with and without it."""

import tomllib
from collections.abc import AsyncIterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from docs.request_fields.examples import Schema
from docs.request_fields.observed import Observed, Observer

_FOLDER = Path(__file__).parent
ACTS = "acted on"
ELSEWHERE = "acted on in the balancer"
COUNTED = "translated or left out, and counted"
REFUSED = "refused by name"
HARMLESS = "harmless"
UNKNOWN = "unknown"
# Of a field's forms the first of these counts.
_ORDER = (ACTS, COUNTED, REFUSED, UNKNOWN)


class State(NamedTuple):
    """One field.

    object: the object that has it. text: what it is counted as, the error, or the reason.
    way: the fields that lead to it from the request, and the field itself.
    """

    object: str
    field: str
    state: str
    text: str = ""
    way: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The object and the field."""
        return f"{self.object}.{self.field}"


class Notes:
    """The reasons for fields without effect, and whether each is needed."""

    def __init__(self, path: str) -> None:
        notes = tomllib.loads((_FOLDER / "notes.toml").read_text())[path]
        self._elsewhere: dict[str, str] = notes["elsewhere"]
        self._harmless: dict[str, str] = notes["harmless"]
        self.unused = {*self._elsewhere, *self._harmless}

    def explained(self, state: State) -> State:
        """The state of a field without an effect that the examples show."""
        for kind, notes in ((ELSEWHERE, self._elsewhere), (HARMLESS, self._harmless)):
            for pattern, reason in notes.items():
                if fnmatchcase(state.name, pattern):
                    self.unused.discard(pattern)
                    return state._replace(state=kind, text=reason)
        return state

    def is_elsewhere(self, name: str) -> bool:
        """Whether the balancer acts on a field."""
        return any(fnmatchcase(name, pattern) for pattern in self._elsewhere)


async def states_of(observer: Observer, path: str, document: Any, notes: Notes) -> list[State]:
    """Every field's state, for the schema of a path."""
    given = tomllib.loads((_FOLDER / "examples.toml").read_text())[path]
    schema = Schema(document, given["bases"], given["values"])
    found: list[State] = []
    whole: dict[str, State] = {}  # objects that are translated or refused as such
    for name in schema.names():
        holder, field = schema.holder(name)
        if holder in whole:
            whole[name] = whole[holder]
        elif holder and not notes.is_elsewhere(f"{holder}.{field}"):
            with_it, without = schema.object_example(name)
            own = _state(
                name,
                field,
                await observer.observe(path, without),
                await observer.observe(path, with_it),
            )
            if own.state == REFUSED or own.text:
                whole[name] = own._replace(state=REFUSED if own.state == REFUSED else COUNTED)
        for field in schema.fields(name):
            state = State(name, field, UNKNOWN)
            if not notes.is_elsewhere(state.name):
                tried = [each async for each in _tried(observer, path, schema, name, field)]
                state = min(tried, key=lambda each: _ORDER.index(each.state))
            if state.state == UNKNOWN and name in whole:
                state = whole[name]._replace(object=name, field=field)
            state = notes.explained(state) if state.state == UNKNOWN else state
            found.append(state._replace(way=(*schema.way(name), field)))
    return found


async def _tried(
    observer: Observer, path: str, schema: Schema, name: str, field: str
) -> AsyncIterator[State]:
    """The state of a field by each of its forms."""
    for with_it, without in schema.examples(name, field):
        seen = await observer.observe(path, without), await observer.observe(path, with_it)
        yield _state(name, field, *seen)


def _state(name: str, field: str, without: Observed, seen: Observed) -> State:
    """The state of a field, or of the object that it holds."""
    if seen.error:
        return State(name, field, REFUSED, seen.error)
    counted = ", ".join(sorted(set(seen.counts) - set(without.counts)))
    if without.error or without.meaning != seen.meaning:
        return State(name, field, ACTS, counted)
    return State(name, field, COUNTED if counted else UNKNOWN, counted)
