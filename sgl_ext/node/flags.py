"""Checks SGLang's flags before an engine starts, without SGLang, which takes seconds to import.

The table is made from SGLang's parser by `python -m launch.sglang_flags`.

`check_addresses` is about the ports of a node's engines beside their own, and about engines that
have several machines. With data-parallel attention, SGLang listens on ports at a fixed distance
from an engine's own (`PortArgs.init_new` and `_broadcast_worker_ports`). So two engines with
consecutive ports would take each other's.
"""

import argparse
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Any, NoReturn

from sgl_ext.ports import require_port
from sgl_ext.settings.schema import LaunchSettings, SettingsError

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


def check_given_flags(
    engine_args: Sequence[str], argv: Sequence[str], file: str, own: Iterable[str]
) -> None:
    """As `check_flags`; the error of a flag that stands in the file, and not on the command line
    `argv`, names its place there."""
    try:
        check_flags(engine_args, own)
    except SettingsError as error:
        flag = re.split("[=:]", str(error), maxsplit=1)[0]
        is_in_file = flag.startswith("--") and all(word.split("=")[0] != flag for word in argv)
        raise SettingsError(f"{file}: [engine] {error}" if is_in_file else str(error)) from None


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


_ATTENTION_DP = (13, *range(233, 240))
_MEETING = "--dist-init-addr"
_BOOTSTRAP, _BOOTSTRAP_DEFAULT = "--disaggregation-bootstrap-port", 8998
# Each may name a port, or a Unix socket.
_ENDPOINTS = ("--kv-events-config", "--load-publish-endpoint")
# Each names a port on which an engine listens.
_NAMED = (
    *(_MEETING, _BOOTSTRAP, "--nccl-port", "--encoder-bootstrap-port"),
    *("--engine-info-bootstrap-port", "--gated-launch-port", "--smg-http-sidecar-port"),
    *_ENDPOINTS,
)
_SERVE = "python -m sgl_ext.engine.serve"


def ports_beside(engine_args: Sequence[str]) -> tuple[int, ...]:
    """The distances from an engine's port to the further ports that SGLang derives from it."""
    given = values_of(engine_args)
    spreads = given.get("--enable-dp-attention") or given.get("--dwdp-size")
    if not (spreads or given.get("--attn-dp-size", 1) > 1) or _MEETING in given:
        return ()
    return _ATTENTION_DP


def check_addresses(settings: LaunchSettings) -> None:
    """Raises SettingsError for a port that is taken, or that several engines would take, and for an
    engine on several machines that this launcher cannot start."""
    given = values_of(settings.engine_args)
    _check_machines(settings, given)
    if given.get("--disaggregation-mode") == "prefill":
        given = {_BOOTSTRAP: _BOOTSTRAP_DEFAULT} | given
    for flag in _NAMED:
        if flag not in given or (flag in _ENDPOINTS and "tcp:" not in str(given[flag])):
            continue
        if settings.instances > 1:
            reason = "all engines would listen on it; start them by themselves, each with its own"
            shared = f"with instances={settings.instances}, {reason}"
            raise SettingsError(f"{flag}={given[flag]}: {shared}")
        if settings.ray_address is None:
            for port in _ports_of(flag, str(given[flag]), given):
                require_port(port, f"{flag}={given[flag]}")


def why_one_start(settings: LaunchSettings) -> str:
    """Why the engine cannot be restarted by this launcher alone; "" if it can."""
    nodes = values_of(settings.engine_args).get("--nnodes", 1)
    if nodes == 1:
        return ""
    reason = "the engine's other machines must start again, too: docs/guide/fleet.md"
    return f"--nnodes={nodes}: {reason}"


def _check_machines(settings: LaunchSettings, given: Mapping[str, Any]) -> None:
    nodes, rank = given.get("--nnodes", 1), given.get("--node-rank", 0)
    if rank > 0:
        reason = f"it has no HTTP server; start it with {_SERVE}: docs/guide/fleet.md"
        raise SettingsError(f"--node-rank={rank}: only the first machine has a launcher; {reason}")
    if nodes == 1:
        return
    if settings.ray_address is not None:
        raise SettingsError(f"--nnodes={nodes}: an engine on Ray has one machine")
    if settings.instances > 1:
        reason = "an engine of several machines needs a launcher of its own; set instances to 1"
        raise SettingsError(f"instances={settings.instances}: with --nnodes={nodes}, {reason}")
    if _MEETING not in given:
        reason = f"its ranks need an address where they meet: {_MEETING} HOST:PORT"
        raise SettingsError(f"--nnodes={nodes}: {reason}")


def _ports_of(flag: str, value: str, given: Mapping[str, Any]) -> list[int]:
    """The ports that a flag's value stands for; none if it is malformed, which SGLang says."""
    port = value.rpartition(":")[2]
    if not port.isdecimal():
        return []
    base = int(port)
    spreads = flag == _MEETING and given.get("--attn-dp-size", 1) > 1
    # The first is where ranks meet, the others are derived from it.
    return [base, *range(base + 1, base + 7), base + 13] if spreads else [base]
