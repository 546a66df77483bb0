"""Requests that have one field of a JSON schema, and the same requests without it.

The schema is an SDK's: what its users' type checkers allow. A field is a property of one of its
objects; the objects are reached through properties, lists and alternatives.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple

Json = dict[str, Any]
_MOST_VALUES = 8
_TEXT = "words"


class Example(NamedTuple):
    """A request with a field, and the same without it."""

    body: Json
    without: Json


class Schema:
    """A schema of requests, with the objects that it defines.

    root: the name of the request itself.
    bases: for an object by name, fields that its examples have beside the required ones; for
        "holder>object", those of an object that holds another.
    values: values of fields, as "object.field", whose own schema says too little.
    """

    root = "request"

    def __init__(
        self, document: Json, bases: Mapping[str, Json], values: Mapping[str, list[Any]]
    ) -> None:
        definitions = document.get("$defs", {})
        self.objects: dict[str, Json] = {
            name: each for name, each in definitions.items() if "properties" in each
        }
        self.objects[self.root] = {k: v for k, v in document.items() if k != "$defs"}
        self._definitions = definitions
        self._bases = bases
        self._given = values
        self._parents = self._shortest_ways()

    def fields(self, name: str) -> list[str]:
        """The fields of an object, without the one that says which object it is."""
        fields = self.objects[name]["properties"]
        return [field for field, schema in fields.items() if "const" not in schema]

    def names(self) -> list[str]:
        """The objects that a request may hold, each after the one that leads to it."""
        return list(self._parents)

    def holder(self, name: str) -> tuple[str, str]:
        """The object and its field that lead to an object; two empty texts for the request."""
        return self._parents[name]

    def way(self, name: str) -> tuple[str, ...]:
        """The fields that lead from the request to an object."""
        holder, field = self._parents[name]
        return (*self.way(holder), field) if holder else ()

    def object_example(self, name: str) -> Example:
        """A request with an object."""
        holder, field = self._parents[name]
        with_it = self._wrapped(name, self._least(name))
        base = {k: v for k, v in self._least(holder).items() if k != field}
        return Example(with_it, self._wrapped(holder, base))

    def examples(self, name: str, field: str) -> Iterator[Example]:
        """Requests with a field, in each of its forms."""
        schema = self.objects[name]["properties"][field]
        for value in self._given.get(f"{name}.{field}") or self._values(schema):
            base = self._least(name)
            with_it = {**base, field: value}
            base.pop(field, None)
            yield Example(self._wrapped(name, with_it), self._wrapped(name, base))

    def _shortest_ways(self) -> dict[str, tuple[str, str]]:
        """For each object that can be reached: an object and its field that lead to it."""
        found: dict[str, tuple[str, str]] = {self.root: ("", "")}
        waiting = deque([self.root])
        while waiting:
            name = waiting.popleft()
            for field, schema in self.objects[name]["properties"].items():
                for child in self._names_in(schema):
                    if child not in found:
                        found[child] = name, field
                        waiting.append(child)
        return found

    def _names_in(self, schema: Json) -> Iterator[str]:
        """The objects that a value of a schema may be or hold, outside of other objects."""
        if "$ref" in schema:
            name = schema["$ref"].rpartition("/")[2]
            if name in self.objects:
                yield name
            else:
                yield from self._names_in(self._definitions[name])
        for each in (*schema.get("anyOf", ()), *schema.get("oneOf", ()), schema.get("items")):
            if isinstance(each, dict):
                yield from self._names_in(each)

    def _wrapped(self, name: str, value: Json) -> Json:
        """A request that holds an object."""
        while name != self.root:
            parent, field = self._parents[name]
            schema = self.objects[parent]["properties"][field]
            base = self._least(parent) | self._bases.get(f"{parent}>{name}", {})
            placed = self._placed(schema, name, value)
            others = self._bases.get(parent, {}).get(field)
            if isinstance(placed, list) and isinstance(others, list):
                placed = others + placed
            value = {**base, field: placed}
            name = parent
        return value

    def _placed(self, schema: Json, name: str, value: Any) -> Any:
        """A value of a schema that is, or holds, an object of a name."""
        if "$ref" in schema:
            found = schema["$ref"].rpartition("/")[2]
            return value if found == name else self._placed(self._definitions[found], name, value)
        for each in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
            if name in self._names_in(each):
                return self._placed(each, name, value)
        return [self._placed(schema["items"], name, value)]

    def _least(self, name: str) -> Json:
        """An object with what it must have."""
        schema = self.objects[name]
        wanted = {field: schema["properties"][field] for field in schema.get("required", ())}
        values = {field: next(self._values(each)) for field, each in wanted.items()}
        return values | self._bases.get(name, {})

    def _values(self, schema: Json) -> Iterator[Any]:
        """Some values of a schema, the simplest first; each form once."""
        yield from islice(self._all_values(schema), _MOST_VALUES)

    def _all_values(self, schema: Json) -> Iterator[Any]:
        if "$ref" in schema:
            name = schema["$ref"].rpartition("/")[2]
            if name in self.objects:
                yield self._least(name)
            else:
                yield from self._all_values(self._definitions[name])
            return
        if "const" in schema or "enum" in schema:
            yield from schema.get("enum", [schema.get("const")])
            return
        forms = (*schema.get("anyOf", ()), *schema.get("oneOf", ()))
        if forms:
            for form in forms:
                if form.get("type") != "null":
                    yield from self._all_values(form)
            return
        kind = schema.get("type")
        if kind == "array":
            yield from ([each] for each in self._all_values(schema.get("items", {})))
            return
        yield from _SIMPLE.get(kind or "", [{_TEXT: _TEXT}])


_SIMPLE: dict[str, list[Any]] = {
    "string": [_TEXT],
    "integer": [1, 3],
    "number": [1, 0.5],
    "boolean": [True, False],
    "object": [{_TEXT: _TEXT}],
}
