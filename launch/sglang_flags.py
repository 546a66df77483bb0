"""Writes the table of SGLang's flags that the launcher checks a command line with.

    python -m launch.sglang_flags

SGLang's own parser takes several seconds to import. Run this for a new version of SGLang; a test
compares the table with the parser.
"""

import argparse
import json
import os
from importlib import import_module
from importlib.metadata import version
from typing import Any

from sgl_ext.node.flags import TABLE

_TYPES = {int: "int", float: "float", json.loads: "json"}


def table() -> dict[str, Any]:
    """The table as the installed SGLang has it. It imports SGLang."""
    os.environ.setdefault("SGLANG_PLATFORM", "sgl_ext_cpu")  # it adds choices
    parser = argparse.ArgumentParser()
    import_module("sglang.srt.server_args").ServerArgs.add_cli_args(parser)
    return {
        "sglang": version("sglang"),
        "flags": sorted((_row(action) for action in parser._actions), key=lambda row: row["names"]),
    }


def _row(action: argparse.Action) -> dict[str, Any]:
    row: dict[str, Any] = {"names": list(action.option_strings)}
    if action.nargs is not None:
        row["nargs"] = action.nargs
    if action.type in _TYPES:
        row["type"] = _TYPES[action.type]
    # A type of SGLang's own may read other words than its choices.
    if action.choices is not None and action.type in (None, str, *_TYPES):
        row["choices"] = sorted(action.choices, key=str)
    return row


def main() -> None:
    found = table()
    rows = ",\n".join(json.dumps(row) for row in found["flags"])
    text = f'{{"sglang": "{found["sglang"]}", "flags": [\n{rows}\n]}}\n'
    TABLE.write_text(text)


if __name__ == "__main__":
    main()
