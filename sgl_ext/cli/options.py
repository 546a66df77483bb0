"""The options that verbs share."""

from typing import Annotated

from typer import Option

from sgl_ext.cli.node import DEFAULT_URL, KEY_VARIABLE

Url = Annotated[
    str,
    Option(
        "--url", envvar="SGL_EXT_URL", metavar="URL", help="The node's address.", show_default=True
    ),
]
Key = Annotated[
    str | None,
    Option(
        "--key",
        metavar="SOURCE",
        help=f"Its key: file:PATH or env:VARIABLE. Default: the variable {KEY_VARIABLE}.",
    ),
]
Json = Annotated[bool, Option("--json", help="Print JSON for programs.")]
HERE = DEFAULT_URL
