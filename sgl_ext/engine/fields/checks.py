"""Kinds of checks of one value. Each says what is wrong with a value, and what it takes.

`wrong(value, model)` returns what a value must be, or None if it is right. A value that is None or
absent is right: SGLang then takes its default. `str(check)` is text in docs/reference/limits.md.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

INT32, INT64 = 2**31 - 1, 2**63 - 1
_SHOWN = 40


class Model(NamedTuple):
    """What bounds the fields of a request.

    vocab_size, context_tokens, hidden_size: of the engine's model.
    prompt_tokens: of the request; 0 before it is tokenized.
    is_native: the client wrote SGLang's own fields, and no other protocol's.
    """

    vocab_size: int
    context_tokens: int
    hidden_size: int = 0
    prompt_tokens: int = 0
    is_native: bool = False


class Check(Protocol):
    """Finds out what is wrong with a value."""

    def wrong(self, value: Any, model: Model) -> str | None:
        """What the value must be; None if it is right."""
        ...


@dataclass(frozen=True, slots=True)
class Whole:
    """An integer in a range, the ends included."""

    low: int
    high: int

    def wrong(self, value: Any, model: Model) -> str | None:
        """What the value must be; None if it is right."""
        if type(value) is int and self.low <= value <= self.high:
            return None
        return f"must be an integer from {self.low} to {self.high}{_got(value)}"

    def __str__(self) -> str:
        high = {INT32: "2^31 - 1", INT64: "2^63 - 1", 1 << 30: "2^30"}.get(self.high, self.high)
        low = "-2^63" if self.low == -INT64 - 1 else self.low
        return f"an integer from {low} to {high}"


@dataclass(frozen=True, slots=True)
class WholeTo:
    """An integer up to a number that the model or the prompt sets.

    of: the attribute of `Model`. less: by which the greatest value is below it.
    """

    low: int
    of: str
    high: int = INT64
    less: int = 0

    def wrong(self, value: Any, model: Model) -> str | None:
        """What the value must be; None if it is right."""
        high = min(self.high, getattr(model, self.of) - self.less)
        if type(value) is int and self.low <= value <= high:
            return None
        return f"must be an integer from {self.low} to {high}{_got(value)}"

    def __str__(self) -> str:
        names = {"vocab_size": "the vocabulary's size", "prompt_tokens": "the prompt's tokens"}
        limit = "" if self.high == INT64 else f"{self.high:,} and "
        return f"an integer from {self.low} to {limit}{names[self.of]}"


@dataclass(frozen=True, slots=True)
class OneOf:
    """A value that either of two checks takes. The message is the second's."""

    only: Any
    other: Check

    def wrong(self, value: Any, model: Model) -> str | None:
        """What the value must be; None if it is right."""
        if type(value) is type(self.only) and value == self.only:
            return None
        found = self.other.wrong(value, model)
        return None if found is None else found.replace("must be", f"must be {self.only}, or", 1)

    def __str__(self) -> str:
        return f"{self.only}, or {self.other}"


@dataclass(frozen=True, slots=True)
class Number:
    """A finite number in a range, the ends included."""

    low: float
    high: float

    def wrong(self, value: Any, model: Model) -> str | None:
        """What the value must be; None if it is right."""
        if type(value) in (int, float) and self.low <= value <= self.high:
            return None
        return f"must be a number from {self.low:g} to {self.high:g}{_got(value)}"

    def __str__(self) -> str:
        low, high = (f"{int(x):,}" if x == int(x) else f"{x:g}" for x in (self.low, self.high))
        return f"a number from {low} to {high}"


@dataclass(frozen=True, slots=True)
class Flag:
    """true or false."""

    def wrong(self, value: Any, model: Model) -> str | None:
        """What the value must be; None if it is right."""
        return None if type(value) is bool else f"must be true or false{_got(value)}"

    def __str__(self) -> str:
        return "true or false"


@dataclass(frozen=True, slots=True)
class Text:
    """A text of a bounded length."""

    limit: int

    def wrong(self, value: Any, model: Model) -> str | None:
        """What the value must be; None if it is right."""
        if not isinstance(value, str):
            return f"must be a text{_got(value)}"
        if len(value) > self.limit:
            return f"must have at most {self.limit} characters, and has {len(value)}"
        return None

    def __str__(self) -> str:
        return f"a text of {self.limit:,} characters"


@dataclass(frozen=True, slots=True)
class Texts:
    """A text or a list of texts: how many, how long each, and all together."""

    count: int
    each: int
    total: int

    def wrong(self, value: Any, model: Model) -> str | None:
        """What the value must be; None if it is right."""
        values = [value] if isinstance(value, str) else value
        if not isinstance(values, list) or not all(isinstance(each, str) for each in values):
            return "must be a text or a list of texts"
        if len(values) > self.count:
            return f"must have at most {self.count} texts, and has {len(values)}"
        if (longest := max(map(len, values), default=0)) > self.each:
            return f"a text must have at most {self.each} characters, and one has {longest}"
        if (total := sum(map(len, values))) > self.total:
            return f"must have at most {self.total} characters in all, and has {total}"
        return None

    def __str__(self) -> str:
        return f"{self.count} texts of {self.each:,} characters, {self.total:,} in all"


@dataclass(frozen=True, slots=True)
class Ids:
    """A list of token ids of the vocabulary."""

    count: int

    def wrong(self, value: Any, model: Model) -> str | None:
        """What the value must be; None if it is right."""
        if not isinstance(value, list):
            return f"must be a list of token ids{_got(value)}"
        if len(value) > self.count:
            return f"must have at most {self.count} token ids, and has {len(value)}"
        for each in value:
            if type(each) is not int or not 0 <= each < model.vocab_size:
                return f"must have token ids from 0 to {model.vocab_size - 1}{_got(each)}"
        return None

    def __str__(self) -> str:
        return f"{self.count:,} token ids of the vocabulary"


@dataclass(frozen=True, slots=True)
class Biases:
    """Numbers by token id, as text or integer."""

    count: int
    each: Number

    def wrong(self, value: Any, model: Model) -> str | None:
        """What the value must be; None if it is right."""
        if not isinstance(value, Mapping):
            return f"must be an object{_got(value)}"
        if len(value) > self.count:
            return f"must have at most {self.count} token ids, and has {len(value)}"
        for key, bias in value.items():
            digits = str(key)
            is_id = digits.isascii() and digits.isdecimal() and len(digits) < 12
            if not is_id or int(digits) >= model.vocab_size:
                return f"must have token ids from 0 to {model.vocab_size - 1}{_got(key)}"
            if (found := self.each.wrong(bias, model)) is not None:
                return found
        return None

    def __str__(self) -> str:
        return f"{self.count:,} token ids of the vocabulary, each with {self.each}"


@dataclass(frozen=True, slots=True)
class Fields:
    """An object whose fields have checks of their own; others are wrong.

    needs: fields that are right only together with another one.
    """

    checks: Mapping[str, Check]
    needs: Mapping[str, str]

    def wrong(self, value: Any, model: Model) -> str | None:
        """What the value must be; None if it is right."""
        if not isinstance(value, dict):
            return f"must be an object{_got(value)}"
        for name, inner in value.items():
            check = self.checks.get(name)
            if check is None:
                return f"has no field {str(name)[:_SHOWN]!r}"
            if inner is not None and (found := check.wrong(inner, model)) is not None:
                return f"{name} {found}"
        for name, other in self.needs.items():
            if value.get(name) and value.get(other) is None:
                return f"{name} must be together with {other}"
        return None

    def __str__(self) -> str:
        fields = [f"`{name}`: {check}" for name, check in self.checks.items()]
        needs = [f"`{name}` together with `{other}`" for name, other in self.needs.items()]
        return "; ".join(fields + needs)


@dataclass(frozen=True, slots=True)
class Notes:
    """An object of scalars, or of lists and objects of scalars, as SGLang's `custom_params`.

    whole: the fields that a scheduler calculates with, each with its check.
    """

    count: int
    characters: int
    whole: Mapping[str, Check]

    def wrong(self, value: Any, model: Model) -> str | None:
        """What the value must be; None if it is right."""
        if not isinstance(value, dict):
            return f"must be an object{_got(value)}"
        if len(value) > self.count:
            return f"must have at most {self.count} fields, and has {len(value)}"
        size = 0
        for name, inner in value.items():
            check = self.whole.get(name)
            if check is not None and inner is not None and (found := check.wrong(inner, model)):
                return f"{name} {found}"
            values = inner if isinstance(inner, list) else [inner]
            values = list(inner.values()) if isinstance(inner, dict) else values
            if not all(_is_scalar(each) for each in values):
                return f"{str(name)[:_SHOWN]!r} must have texts, numbers, true, false or null"
            size += len(name) + sum(len(str(each)) for each in values)
        if size > self.characters:
            return f"must have at most {self.characters} characters, and has {size}"
        return None

    def __str__(self) -> str:
        inner = "; ".join(f"`{name}`: {check}" for name, check in self.whole.items())
        end = f"; {inner}" if inner else ""
        return f"{self.count} fields, {self.characters:,} characters, one level deep{end}"


@dataclass(frozen=True, slots=True)
class Embeddings:
    """A vector of finite numbers for each token."""

    def wrong(self, value: Any, model: Model) -> str | None:
        """What the value must be; None if it is right."""
        rows = value if isinstance(value, list) else [value]
        for row in rows:
            is_row = isinstance(row, list) and len(row) == model.hidden_size
            if not is_row or not all(type(x) in (int, float) and math.isfinite(x) for x in row):
                return f"must have {model.hidden_size} finite numbers for each token"
        return None

    def __str__(self) -> str:
        return "a vector of the model's width for each token, of finite numbers"


@dataclass(frozen=True, slots=True)
class Internal:
    """A field that the engine sets itself, and a client must not.

    unset: its value before, beside None.
    """

    by: str
    unset: int | None = None

    def wrong(self, value: Any, model: Model) -> str | None:
        """What the value must be; None if it is right."""
        is_unset = value is None or (type(value) is type(self.unset) and value == self.unset)
        return f"is set by {self.by}, not by clients" if model.is_native and not is_unset else None

    def __str__(self) -> str:
        return f"refused: {self.by} sets it"


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """A field that reaches no scheduler as the client sent it, or that is checked elsewhere."""

    why: str

    def wrong(self, value: Any, model: Model) -> str | None:
        """None: the field is no matter of this table."""
        return None

    def __str__(self) -> str:
        return self.why


def _is_scalar(value: Any) -> bool:
    if type(value) is int:
        return -INT64 <= value <= INT64
    return value is None or type(value) in (str, bool) or _is_finite(value)


def _is_finite(value: Any) -> bool:
    return type(value) is float and math.isfinite(value)


def _got(value: Any) -> str:
    text = repr(value) if isinstance(value, (int, float, str, bool, type(None))) else ""
    return f"; got {text}" if 0 < len(text) <= _SHOWN else ""
