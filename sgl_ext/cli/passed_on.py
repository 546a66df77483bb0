"""Verbs that pass their words on to another command line: `serve`, `keys`, `size`, `recipes`."""

import typer

AS_IT_IS: dict[str, object] = {
    "ignore_unknown_options": True,
    "allow_extra_args": True,
    "help_option_names": [],
}
"""Settings of such a verb: each of its words, --help too, is in the context's args."""


def serve(context: typer.Context) -> None:
    """Start engines and one balancer in front of them.

    Flags that are not the launcher's go to every engine. --help lists the launcher's.
    """
    from sgl_ext.launch import main

    main(context.args)


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
    from sgl_ext.recipes.__main__ import run

    raise typer.Exit(run(context.args))
