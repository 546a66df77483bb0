"""`sgl-ext completion`: what a shell needs to complete verbs and options."""

import os
from enum import StrEnum
from typing import Annotated

import typer

PROGRAM = "sgl-ext"
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
