"""Checks at an engine's start: of the environment before SGLang is imported, which takes many
seconds; then, as hooks, of the flags and of the hooks of each process. What they log of the
arguments is short and has no secret."""

import gc
import logging
import os
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import msgspec

from sgl_ext.engine import sglang_api, sglang_check, topology
from sgl_ext.engine.arguments import as_given, being_resolved, in_effect
from sgl_ext.engine.core.folder import acknowledged
from sgl_ext.engine.sglang_types import ServerArgs
from sgl_ext.engine.sglang_versions import is_tested, tested_text
from sgl_ext.settings.schema import EngineSettings
from sgl_ext.settings.secrets import EngineSecret, is_reachable

PLUGIN = "sgl_ext"
_OFF = ("", "0", "false", "no", "off", "n", "f")
_DETOKENIZER_TIMEOUT_S = 120.0
_SECRET_ENDS = ("api_key", "password")
_ARGUMENTS = "server_args="
_logger = logging.getLogger(__name__)


def check_environment(environ: Mapping[str, str] = os.environ) -> None:
    """Raises RuntimeError or ValueError that names what the plugin cannot work with."""
    try:
        found = version("sglang")
    except PackageNotFoundError:
        raise RuntimeError("SGLang is not installed: pip install 'sgl-ext[engine]'") from None
    settings = EngineSettings.from_environment(environ)
    if not is_tested(found) and not settings.untested_sglang:
        do = "set untested-sglang to try: docs/how/upstream.md"
        raise RuntimeError(f"it is tested with SGLang {tested_text()}, and this is {found}; {do}")
    if environ.get("SGLANG_RUST_SERVER", "").lower() not in _OFF:
        raise RuntimeError("SGLANG_RUST_SERVER is set, and its front end has no hooks: unset it")
    allowed = environ.get("SGLANG_PLUGINS", "")
    if allowed.strip() and PLUGIN not in (name.strip() for name in allowed.split(",")):
        raise RuntimeError(f"SGLANG_PLUGINS={allowed!r} leaves out {PLUGIN!r}")
    EngineSecret(settings.engine_secret)


def require_secret(host: str) -> None:
    """Raises ValueError if other machines can reach this address, and the engine has no secret.

    An engine without one believes everyone what only a balancer knows: tenant, group and wait.
    """
    if is_reachable(host) and EngineSettings.from_environment().engine_secret is None:
        reason = "other machines can reach this address, so set engine-secret: docs/guide/fleet.md"
        raise ValueError(f"--host {host}: {reason}")


def check_arguments(server_args: ServerArgs, *_: Any) -> None:
    """After argument parsing: resolves the arguments as SGLang is about to, stops the start if the
    extension does not work with them, and logs once what it serves without."""
    facts = topology.facts_of(server_args)
    if reasons := [*topology.refused(facts), *topology.problems(facts.args)]:
        raise SystemExit("\n".join(f"sgl-ext: {reason}" for reason in reasons))
    for rule in topology.degraded(facts):
        _logger.warning("sgl-ext: %s", rule)
    for group, why in sglang_check.groups_off().items():
        _logger.warning("sgl-ext: %s: off, %s", group, why)
    sglang_api.logger.addFilter(ShortArguments(server_args))


def report_parsers(server_args: ServerArgs) -> None:
    """Logs what SGLang chose where the operator wrote `auto` for a parser, and what is lost where
    it found none, as it turns that parser off and serves."""
    given, args = as_given(server_args), in_effect()
    found = {"reasoning": args.reasoning_parser, "tool calls": args.tool_call_parser}
    by_auto = {kind: name for kind, name in found.items() if given[_PARSERS[kind][0]] == "auto"}
    if chosen := [f"{kind} {name}" for kind, name in by_auto.items() if name]:
        _logger.info("sgl-ext: parsers found in the model (auto): %s", ", ".join(chosen))
    for kind, name in by_auto.items():
        if name is None:
            field, loss = _PARSERS[kind]
            what = f"auto found none for this model, so {loss}"
            do = "name one, or none: docs/guide/models.md"
            _logger.warning("sgl-ext: --%s: %s; %s", field.replace("_", "-"), what, do)


_PARSERS = {
    "reasoning": ("reasoning_parser", "thinking is left out of requests"),
    "tool calls": ("tool_call_parser", "calls of tools arrive as text"),
}
"""Of each parser: its argument, and what is lost without one."""


def await_acknowledgements(scheduler_infos: Sequence[Any]) -> None:
    """After an engine's processes are up: stops the start unless each has verified its hooks.

    A scheduler reports that it is ready only after it loaded plugins, so its acknowledgement must
    exist by now. A detokenizer reports nothing, and may still import modules. The further machines
    of an engine serve no HTTP, so no process waits there; the engine's first rank has verified
    their schedulers (`sgl_ext.engine.scheduler.nodes`).
    """
    if acknowledged()["scheduler"] < len(scheduler_infos):
        raise SystemExit("sgl-ext: the plugin was not loaded in a scheduler process")
    deadline = time.monotonic() + _DETOKENIZER_TIMEOUT_S
    while not acknowledged()["detokenizer"]:
        if time.monotonic() > deadline:
            raise SystemExit("sgl-ext: the plugin was not loaded in the detokenizer process")
        time.sleep(0.05)


def freeze_again(*_: Any) -> None:
    """After a scheduler has captured its CUDA graphs: lets garbage collections skip the modules,
    which the plugin froze and SGLang unfroze at the end of a capture."""
    gc.freeze()


class ShortArguments(logging.Filter):
    """Of the log of SGLang's start: its arguments are those that differ from their defaults, as all
    of them are a line of 15 KB, and no line has a secret of theirs, whatever its words."""

    def __init__(self, server_args: ServerArgs) -> None:
        super().__init__()
        self._args = server_args

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if text.startswith(_ARGUMENTS):
            text = f"{_ARGUMENTS}{self.changed()}"
        for name, value in as_given(self._args).items():
            if name.endswith(_SECRET_ENDS) and value and isinstance(value, str):
                text = text.replace(value, "...")
        record.msg, record.args = text, None
        return True

    def changed(self) -> dict[str, Any]:
        """The arguments that differ from SGLang's defaults, without parts that it works out."""
        args = being_resolved(self._args)
        fields: Any = msgspec.structs.fields(type(self._args))  # type: ignore[arg-type]
        found = {each.name: (getattr(args, each.name), each.default) for each in fields}
        return {
            name: "..." if name.endswith(_SECRET_ENDS) else value
            for name, (value, default) in found.items()
            if value != default and value not in (None, [], ()) and type(value) is not dict
        }
