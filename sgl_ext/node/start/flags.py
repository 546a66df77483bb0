"""Checks SGLang's flags before an engine starts, without SGLang, which takes seconds to import.

The table is made from SGLang's parser by `python -m launch.sglang_flags`.
"""

import argparse
import json
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from difflib import get_close_matches
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Any, NoReturn

from sgl_ext.settings.schema import SettingsError

TABLE = Path(__file__).with_name("sglang_flags.json")
_TYPES: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "json": json.loads}
_CHOICE = re.compile(r"argument (\S+): invalid choice: '?(.*?)'? \(choose from (.*)\)", re.DOTALL)
_ARGUMENT = re.compile(r"argument (\S+): ")
_MOST_CHOICES = 12
_OURS = ("sgl_ext", "sgl_ext_cpu")


def check_flags(argv: Sequence[str], own: Iterable[str] = ()) -> None:
    """Raises SettingsError for the first flag that SGLang's parser would refuse.

    own: the launcher's flags, among which the nearest to a misspelt one may be. Without SGLang in
    the table's version nothing is checked here: then the engine says what is wrong.
    """
    table = json.loads(TABLE.read_text())
    if _installed() != table["sglang"]:
        return
    parser, names = _parser(table["flags"])
    _, rest = parser.parse_known_args(list(argv))
    for word in rest:
        flag = word.partition("=")[0]
        if flag.startswith("-"):
            raise SettingsError(f"{flag}: unknown flag{_nearest(flag, [*own, *names])}")
    if rest:
        raise SettingsError(f"{rest[0]!r}: belongs to no flag")


def sizes_given(argv: Sequence[str], names: Sequence[str]) -> dict[str, int]:
    """The numbers that a command line gives to these flags of SGLang, by their first names.

    Of several the last counts, as in SGLang. Raises SettingsError if one flag has two numbers under
    two names.
    """
    parser, _ = _parser(json.loads(TABLE.read_text())["flags"], collected=names)
    found, _ = parser.parse_known_args(list(argv))
    given: dict[str, dict[str, int]] = {
        name: by_name for name in names if (by_name := getattr(found, name))
    }
    for by_name in given.values():
        if len({*by_name.values()}) > 1:
            both = " and ".join(f"{name}={number}" for name, number in by_name.items())
            raise SettingsError(f"{both}: two names of one setting; keep one of them")
    return {name: next(iter(by_name.values())) for name, by_name in given.items()}


class _Collect(argparse.Action):
    """Collects the values of a flag by the name under which each was given."""

    def __call__(
        self, _: object, namespace: argparse.Namespace, value: Any, name: str | None = None
    ) -> None:
        by_name = getattr(namespace, self.dest) or {}
        setattr(namespace, self.dest, {**by_name, name: value})


def values_of(argv: Sequence[str]) -> dict[str, Any]:
    """SGLang's flags in a command line with their values, by their first names: numbers as numbers,
    True for a flag without a value. Of several, the last counts. Raises SettingsError."""
    parser, _ = _parser(json.loads(TABLE.read_text())["flags"])
    values, _ = parser.parse_known_args(list(argv))
    return {name: value for name, value in vars(values).items() if value not in (None, False)}


class _Choices(tuple[Any, ...]):
    """Choices to which another plugin of SGLang's can add: a value that is like none of them may be
    such a one."""

    def __contains__(self, value: object) -> bool:
        return super().__contains__(value) or not get_close_matches(str(value), map(str, self), 1)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        if found := _CHOICE.match(message):
            flag, value, listed = found.groups()
            choices = [word.strip(" '") for word in listed.split(",")]
            shown = f"; there are {', '.join(choices)}" if len(choices) <= _MOST_CHOICES else ""
            message = f"{flag}={value!r}: unknown{_nearest(value, choices) or shown}"
        raise SettingsError(_ARGUMENT.sub(r"\1: ", message))


def _parser(
    rows: Sequence[dict[str, Any]], collected: Collection[str] = ()
) -> tuple[argparse.ArgumentParser, list[str]]:
    """A parser that accepts what SGLang's does, and the names of its flags.

    collected: flags whose values it keeps by the name under which each was given.
    """
    parser = _Parser(add_help=False)
    is_extended = any(
        point.name not in _OURS
        for group in ("sglang.srt.plugins", "sglang.srt.platforms")
        for point in entry_points(group=group)
    )
    for row in rows:
        if row.get("nargs") == 0:
            parser.add_argument(*row["names"], action="store_true", dest=row["names"][0])
        else:
            choices = row.get("choices")
            if choices is not None and is_extended:
                choices = _Choices(choices)
            kind = _TYPES.get(row.get("type", ""), str)
            about: dict[str, Any] = {"nargs": row.get("nargs"), "choices": choices, "type": kind}
            if row["names"][0] in collected:
                about["action"] = _Collect
            parser.add_argument(*row["names"], dest=row["names"][0], **about)
    return parser, [name for row in rows for name in row["names"] if name.startswith("--")]


def _installed() -> str | None:
    try:
        return version("sglang")
    except PackageNotFoundError:
        return None


def _nearest(name: str, known: Iterable[str]) -> str:
    near = get_close_matches(name, [*known], 1)
    return f"; did you mean {near[0]}?" if near else ""
