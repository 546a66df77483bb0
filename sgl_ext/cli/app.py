"""The command `sgl-ext`: its verbs, its exit codes, and how it says what went wrong.

Exit codes: 0 done; 1 the node said no, is not ready or is not there; 2 the command line is wrong.
"""

import os
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Annotated, Any

import typer
from typer.core import CompletionItem, TyperCommand  # type: ignore[attr-defined]

from sgl_ext.cli import bench, chat, config, engines, pins, prompts, run_folder, status, top
from sgl_ext.cli.clients import clients
from sgl_ext.cli.contexts import app as contexts
from sgl_ext.cli.events import events
from sgl_ext.cli.node import NodeError, UsageError
from sgl_ext.cli.requests import requests
from sgl_ext.cli.show import console, plain, warn
from sgl_ext.cli.usage import usage

PROGRAM = "sgl-ext"
_INTERRUPTED = 130
app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command. Raises SystemExit with its exit code."""
    answer_shell()
    try:
        code = app(args=argv, prog_name=PROGRAM, standalone_mode=False)
    except (typer.TyperException, UsageError) as error:
        warn(str(error) if isinstance(error, UsageError) else _wrong_words(error))
        code = 2
    except NodeError as error:
        warn(str(error))
        code = 1
    except typer.Abort:
        code = _INTERRUPTED
    raise SystemExit(code)


def _wrong_words(error: typer.TyperException) -> str:
    """What is wrong with a command line, in the words that `sgl_ext.arguments` has for it."""
    context = getattr(error, "ctx", None)
    words = error.format_message()
    at = PROGRAM if context is None else context.command_path
    verb = at.removeprefix(PROGRAM).strip()
    return f"{verb}: {words.rstrip('.')} (see {at} --help)" if verb else words


def _show_version(wanted: bool) -> None:
    if wanted:
        version()
        raise typer.Exit


def version() -> None:
    """Print the versions of sgl-ext and SGLang, and the commit."""
    from sgl_ext.version import versions

    found = versions()
    commit = f" ({found.commit})" if found.commit else ""
    console().print(plain(f"{PROGRAM} {found.sgl_ext}{commit}, SGLang {found.sglang or '-'}"))


@app.callback(invoke_without_command=True)
def sgl_ext(
    context: typer.Context,
    shows_version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Print versions and commit."
        ),
    ] = False,
) -> None:
    """Serve models with SGLang for coding agents, and operate a running node."""
    if context.invoked_subcommand is None:
        print(context.get_help())


# Of a verb that passes its words on to another command line: --help, too, is in the context's args.
_AS_IT_IS: dict[str, object] = {
    "ignore_unknown_options": True,
    "allow_extra_args": True,
    "help_option_names": [],
}


def serve(context: typer.Context) -> None:
    """Start engines and one balancer in front of them.

    Flags that are not the launcher's go to every engine. --help lists the launcher's.
    """
    from sgl_ext.launch import main

    main(context.args)


def help(
    context: typer.Context,
    verb: Annotated[
        list[str] | None, typer.Argument(metavar="VERB", help="A verb, such as pins delete.")
    ] = None,
) -> None:
    """Print the help of the command, or of a verb."""
    root = context.find_root().command
    root.main(args=[*(verb or ()), "--help"], prog_name=PROGRAM, standalone_mode=False)


def keys(context: typer.Context) -> None:
    """Create, list and revoke the API keys in a key file."""
    from sgl_ext.keys import main

    main(context.args)


def size(context: typer.Context) -> None:
    """Tell how many tokens, sessions and pins fit a model and a GPU."""
    from sgl_ext.sizing.__main__ import run

    raise typer.Exit(run(context.args))


def recipes(context: typer.Context) -> None:
    """List, print or copy the settings, alerts and manifests that come with sgl-ext."""
    from sgl_ext.recipes import run

    raise typer.Exit(run(context.args))


class PassedOn(TyperCommand):
    """A verb that passes its words on. It completes the flags of `serve`, and names of recipes."""

    def shell_complete(self, ctx: Any, incomplete: str) -> list[CompletionItem]:
        known: list[str] = []
        if self.name == "serve":
            from sgl_ext.settings.fields import launch_flags

            known = launch_flags()
        elif self.name == "recipes":
            from sgl_ext.recipes import recipes

            known = list(recipes())
        return [CompletionItem(word) for word in known if word.startswith(incomplete)]


_VARIABLE = "_SGL_EXT_COMPLETE"


class Shell(StrEnum):
    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def completion(
    context: typer.Context, shell: Annotated[Shell, typer.Argument(help="The shell.")]
) -> None:
    """Print a script that completes verbs and options in a shell.

    bash: eval "$(sgl-ext completion bash)" in ~/.bashrc. zsh: the same in ~/.zshrc, after
    compinit. fish: sgl-ext completion fish > ~/.config/fish/completions/sgl-ext.fish
    """
    # The command prints its script if it is started with this variable.
    os.environ[_VARIABLE] = f"source_{shell.value}"
    answer_shell()
    context.find_root().command.main(args=[], prog_name=PROGRAM, complete_var=_VARIABLE)


def answer_shell() -> None:
    """Lets the command answer if a shell asks for completions. Call it before the command."""
    if _VARIABLE in os.environ:
        # Typer itself calls it only for options of its own that do what `completion` does.
        from typer.completion import completion_init  # type: ignore[attr-defined]

        completion_init()


_START, _LOOK, _CHANGE = "Start a node", "Look at a running node", "Change a running node"
_PREPARE = "Prepare"
_VERBS: dict[str, list[Callable[..., None]]] = {
    _START: [serve],
    _LOOK: [
        *(status.status, top.top, events, chat.models, chat.chat, run_folder.logs),
        *(requests, usage, prompts.explain, prompts.doctor, clients, bench.bench),
    ],
    _CHANGE: [
        *(engines.restart, engines.drain, engines.undrain, engines.add, engines.reload),
        run_folder.stop,
    ],
    _PREPARE: [size, recipes, keys, completion, version, help],
}
for panel, verbs in _VERBS.items():
    for verb in verbs:
        is_own = verb not in (serve, keys, size, recipes)
        settings = {} if is_own else _AS_IT_IS
        cls = TyperCommand if is_own else PassedOn
        app.command(
            cls=cls, rich_help_panel=panel, context_settings=settings, add_help_option=is_own
        )(verb)
app.add_typer(pins.app, name="pins", rich_help_panel=_LOOK)
app.add_typer(config.app, name="config", rich_help_panel=_PREPARE)
app.add_typer(contexts, name="context", rich_help_panel=_CHANGE)
